"""Checkpoint -> a Hugging Face folder, one tensor at a time: host memory holds one shard of the result.

Works from the files alone, on one process, whatever number of ranks wrote them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ulysses_cli.train.archive import CheckpointError
from ulysses_cli.train.checkpoint import Source, index_sources, read_range
from ulysses_cli.train.tensor_file import write_tensors

MAX_SHARD_BYTES = 5 * 10**9
PREFIX = "model."  # the engine wraps the model under this name


def export_weights(
    checkpoint: Path, to: Path, dtype: torch.dtype, left_out: frozenset[str], is_adapter: bool
) -> list[str]:
    """Every trained tensor -> model*.safetensors, or adapter_model.safetensors. -> the names written."""
    sources, shapes = index_sources(checkpoint)
    names = sorted(name for name in sources if _rename(name, is_adapter) not in left_out)
    if not names:
        raise CheckpointError(f"{checkpoint} holds no weights")
    groups: list[list[str]] = [[]]
    size = 0
    for name in names:
        own = torch.Size(shapes[name]).numel() * dtype.itemsize
        if groups[-1] and size + own > MAX_SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += own
    stem = "adapter_model" if is_adapter else "model"
    index: dict[str, str] = {}
    for at, group in enumerate(groups):
        file = f"{stem}.safetensors" if len(groups) == 1 else f"{stem}-{at + 1:05d}-of-{len(groups):05d}.safetensors"
        write_tensors(to / file, _read(group, sources, shapes, dtype, is_adapter), {"format": "pt"})
        index |= {_rename(name, is_adapter): file for name in group}
    if len(groups) > 1:
        total = sum(torch.Size(shapes[name]).numel() for name in names) * dtype.itemsize
        content = {"metadata": {"total_size": total}, "weight_map": index}
        (to / f"{stem}.safetensors.index.json").write_text(json.dumps(content, indent=2))
    return sorted(index)


def _read(
    names: list[str],
    sources: Mapping[str, list[Source]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    is_adapter: bool,
) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        flat = read_range(sources[name], f"{name}|master", 0, torch.Size(shapes[name]).numel())
        yield _rename(name, is_adapter), flat.to(dtype).view(shapes[name])


def _rename(name: str, is_adapter: bool) -> str:
    """As transformers or peft expect it in a file."""
    name = name.removeprefix(PREFIX)
    return f"base_model.model.{name.replace('.default.', '.')}" if is_adapter else name


def export_model(
    checkpoint: Path, to: Path, *, config: Any, tokenizer: Any, adapter_config: Any, dtype: torch.dtype, card: str
) -> Path:
    """The whole folder, under its final name only when it is whole."""
    beside = to.with_name(f"{to.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    is_adapter = adapter_config is not None
    tied = frozenset({"lm_head.weight"}) if config.tie_word_embeddings else frozenset()
    export_weights(checkpoint, beside, dtype, tied, is_adapter)
    if is_adapter:
        adapter_config.inference_mode = True
        adapter_config.save_pretrained(beside)
    else:
        config.dtype = dtype
        config.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    (beside / "README.md").write_text(card, encoding="utf-8")
    if to.exists():
        shutil.rmtree(to)
    beside.rename(to)
    return to
