"""Checkpoint -> a Hugging Face folder, layer by layer: host memory holds one shard of the result.

Works from the files alone, on one process, whatever number of ranks wrote them.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ulysses_cli.plan.models.chat_template import find_end_marker
from ulysses_cli.plan.secrets import collect_secrets, mask_text
from ulysses_cli.run_folder.archive import REPLACED, WRITING, CheckpointError, sync
from ulysses_cli.run_folder.manifest import MODEL_FACTS
from ulysses_cli.train.checkpoint.format import TensorSource, index_sources, read_range
from ulysses_cli.train.finiteness import WORDS, is_finite
from ulysses_cli.train.telemetry.run_file import TOOL
from ulysses_cli.train.tensor_file import write_tensors

MAX_SHARD_BYTES = 5 * 10**9
BASE_CONFIG = "base_config"  # beside adapters: the base as it was trained, with its stretch of positions
PREFIX = "model."  # the engine wraps the model under this name
LAYER = re.compile(r"(.*?\.layers\.\d+\.)")


class ShardWriter:
    """Tensors -> STEM.safetensors, or numbered shards with an index. Holds one shard at a time."""

    def __init__(self, to: Path, stem: str, dtype: torch.dtype) -> None:
        self.to, self.stem, self.dtype = to, stem, dtype
        self.files: list[tuple[Path, list[str]]] = []
        self.batch: list[tuple[str, Tensor]] = []
        self.batch_bytes = self.total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        num_bytes = tensor.numel() * self.dtype.itemsize
        if self.batch and self.batch_bytes + num_bytes > MAX_SHARD_BYTES:
            self._flush()
        self.batch.append((name, convert(name, tensor, self.dtype)))
        self.batch_bytes += num_bytes
        self.total_bytes += num_bytes

    def finish(self) -> list[str]:
        """-> the names written."""
        self._flush()
        index: dict[str, str] = {}
        for at, (part, names) in enumerate(self.files, 1):
            number = "" if len(self.files) == 1 else f"-{at:05d}-of-{len(self.files):05d}"
            part.rename(self.to / f"{self.stem}{number}.safetensors")
            index |= dict.fromkeys(names, f"{self.stem}{number}.safetensors")
        if len(self.files) > 1:
            content = {"metadata": {"total_size": self.total_bytes}, "weight_map": index}
            (self.to / f"{self.stem}.safetensors.index.json").write_text(json.dumps(content, indent=2))
        return sorted(index)

    def _flush(self) -> None:
        part = self.to / f"{self.stem}.{len(self.files)}.part"
        write_tensors(part, self.batch, {"format": "pt"})
        self.files.append((part, [name for name, _ in self.batch]))
        self.batch.clear()
        self.batch_bytes = 0


def convert(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers stay numbers: float16 ends at 65504."""
    written = tensor.to(dtype)
    if not is_finite(written):
        reason = f" as {dtype}: its largest value is {tensor.abs().max():g}" if is_finite(tensor) else ""
        raise CheckpointError(f"{name} holds {WORDS}{reason}")
    return written


def export_weights(
    checkpoint: Path, to: Path, dtype: torch.dtype, left_out: frozenset[str], is_adapter: bool, skeleton: Any = None
) -> list[str]:
    """Every trained tensor -> model*.safetensors, or adapter_model.safetensors -> the names written. `skeleton` is the
    model without weights: transformers reads from it how this family's tensors are named and cut in files."""
    sources, shapes = index_sources(checkpoint)
    names = sorted(name for name in sources if rename(name, is_adapter) not in left_out)
    if not names:
        raise CheckpointError(f"{checkpoint} holds no weights")
    writer = ShardWriter(to, "adapter_model" if is_adapter else "model", dtype)
    for group in _group_by_layer(names):
        for name, tensor in _read(group, sources, shapes, dtype, is_adapter, skeleton):
            writer.add(name, tensor)
    return writer.finish()


def _group_by_layer(names: Sequence[str]) -> list[list[str]]:
    """A file's tensor may be made of several parameters of one layer, and of no other."""
    groups: dict[str, list[str]] = {}
    for name in names:
        found = LAYER.match(name)
        groups.setdefault(found[1] if found else name, []).append(name)
    return list(groups.values())


def _read(
    names: list[str],
    sources: Mapping[str, list[TensorSource]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    is_adapter: bool,
    skeleton: Any,
) -> Iterator[tuple[str, Tensor]]:
    held = {rename(name, is_adapter): convert(name, read_parameter(name, sources, shapes), dtype) for name in names}
    if skeleton is not None:
        from transformers.core_model_loading import revert_weight_conversion

        held = revert_weight_conversion(skeleton, held)
    for name in sorted(held):
        yield name, held[name].contiguous()


def read_parameter(
    name: str, sources: Mapping[str, list[TensorSource]], shapes: Mapping[str, tuple[int, ...]]
) -> Tensor:
    shape = shapes[name]
    return read_range(sources[name], f"{name}|master", 0, torch.Size(shape).numel()).view(shape)


def rename(name: str, is_adapter: bool) -> str:
    """As the model calls it, or as peft expects it in a file."""
    name = name.removeprefix(PREFIX)
    return f"base_model.model.{name.replace('.default.', '.')}" if is_adapter else name


def export_model(
    checkpoint: Path,
    to: Path,
    *,
    config: Any,
    tokenizer: Any,
    adapter_config: Any,
    dtype: torch.dtype,
    card: str,
    step: int,
    check: Callable[[Path], object] = lambda _: None,
    merge: Callable[[Path, Any], object] | None = None,
) -> Path:
    """The whole folder, under its final name only when it is whole and `check` has nothing to say against it. `merge`
    writes the weights instead, into a folder, for the model without weights that it is given."""
    from transformers import AutoModelForCausalLM

    with _folder_beside(to) as beside:
        is_adapter = adapter_config is not None
        tied = frozenset({"lm_head.weight"}) if config.tie_word_embeddings else frozenset()
        with torch.device("meta"):
            skeleton = None if is_adapter else AutoModelForCausalLM.from_config(copy.deepcopy(config))
        if merge is not None:
            merge(beside, skeleton)
        else:
            export_weights(checkpoint, beside, dtype, tied, is_adapter, skeleton)
        if is_adapter:
            adapter_config.inference_mode = True
            adapter_config.save_pretrained(beside)
        else:
            config.architectures = [type(skeleton).__name__]
            _write_generation_config(config, tokenizer, beside)
        config.dtype = dtype
        # Adapters name their base, whose own config would win over one beside them; the card says how to load both.
        written = (beside / BASE_CONFIG if is_adapter else beside) / "config.json"
        config.save_pretrained(written.parent)
        written.write_text(mask_text(written.read_text(encoding="utf-8"), collect_secrets({}, os.environ)))
        tokenizer.save_pretrained(beside)
        (beside / "README.md").write_text(card, encoding="utf-8")
        facts = {"step": step, "made_by": f"{TOOL} {metadata.version(TOOL)}"}
        (beside / MODEL_FACTS).write_text(json.dumps(facts), encoding="utf-8")
        check(beside)
    return to


@contextmanager
def _folder_beside(to: Path) -> Iterator[Path]:
    """An empty folder that gets its name when all is done. What is half made goes, whatever ends this."""
    beside = to.with_name(f"{to.name}{WRITING}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
        put_folder(beside, to)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_generation_config(config: Any, tokenizer: Any, to: Path) -> None:
    """The base model's stop tokens and the like, and the end of a turn where a shipped template taught it; a model from
    random weights may have neither."""
    from transformers import GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(config.name_or_path)
    except (OSError, ValueError):
        found = None
    end = find_end_marker(str(tokenizer.chat_template))
    if end:
        found = found or GenerationConfig(eos_token_id=config.eos_token_id)
        known = found.eos_token_id if found.eos_token_id is not None else tokenizer.eos_token_id
        stops = known if isinstance(known, list) else [] if known is None else [known]
        end_id = tokenizer.convert_tokens_to_ids(end)
        found.eos_token_id = stops if end_id in stops else [*stops, end_id]
    if found is not None:
        found.save_pretrained(to)


def put_folder(beside: Path, to: Path) -> None:
    """A folder of that name is whole at any moment: an older one leaves under another name before it is removed."""
    for file in beside.rglob("*"):
        sync(file)
    sync(beside)
    replaced = to.with_name(f"{to.name}{REPLACED}")
    shutil.rmtree(replaced, ignore_errors=True)
    if to.exists():
        to.rename(replaced)
    beside.rename(to)
    sync(to.parent)
    shutil.rmtree(replaced, ignore_errors=True)
