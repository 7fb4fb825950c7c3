"""An exported folder is loaded as anyone would load it, and compared with the checkpoint that it was made from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ulysses_cli.run_folder.archive import CheckpointError
from ulysses_cli.train.checkpoint.format import index_sources
from ulysses_cli.train.export.weights import PREFIX, read_parameter, rename
from ulysses_cli.train.processes.host_memory import count_free_bytes

PROBE_TOKENS = 16
MEMORY_SHARE = 0.5  # of what is available on the host: others work there too


def check_adapter(checkpoint: Path, folder: Path, dtype: torch.dtype) -> str:
    """Every adapter is in the file, under its name, with its values."""
    sources, shapes = index_sources(checkpoint)
    with safe_open(folder / "adapter_model.safetensors", "pt") as opened:
        wanted = {rename(name, is_adapter=True): name for name in sources}
        _compare_names(set(opened.keys()), set(wanted))
        for name in wanted:
            if not torch.equal(opened.get_tensor(name), read_parameter(wanted[name], sources, shapes).to(dtype)):
                raise CheckpointError(f"{folder} was not exported rightly: {name} differs from the checkpoint")
    return f"{len(wanted)} tensors equal the checkpoint's"


def check_model(checkpoint: Path, folder: Path, config: Any, dtype: torch.dtype, tell: Callable[[str], None]) -> str:
    """Reloaded by transformers: names, shapes, every value, and the logits of a probe."""
    from transformers import AutoModelForCausalLM

    sources, shapes = index_sources(checkpoint)
    num_bytes = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
    if 2 * num_bytes > MEMORY_SHARE * count_free_bytes():
        return "not reloaded: host memory is too small for two copies of the model"
    tell("loading what was exported")
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}  # which every family has
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    spoilt = [
        *map(str, found["missing_keys"]),
        *map(str, found["unexpected_keys"]),
        *map(str, found["mismatched_keys"]),
    ]
    if spoilt:
        raise CheckpointError(f"{folder} was not exported rightly: {', '.join(sorted(spoilt)[:3])}")
    loaded = dict(model.named_parameters())
    wanted = {name.removeprefix(PREFIX): name for name in sources}
    _compare_names(set(loaded), set(wanted))
    reference = AutoModelForCausalLM.from_config(copy.deepcopy(config), **options)
    for name, parameter in reference.named_parameters():
        parameter.data.copy_(read_parameter(wanted[name], sources, shapes))
        if not torch.equal(parameter, loaded[name]):
            raise CheckpointError(f"{folder} was not exported rightly: {name} differs from the checkpoint")
    probe = torch.arange(PROBE_TOKENS)[None] % config.vocab_size
    with torch.no_grad():
        ours, right = (one.eval()(probe, use_cache=False).logits for one in (model, reference))
    if not torch.equal(ours, right):
        raise CheckpointError(f"{folder} was not exported rightly: logits differ from the trained model's")
    return f"{len(wanted)} tensors and the logits of a probe equal the trained model's"


def _compare_names(ours: set[str], wanted: set[str]) -> None:
    if ours != wanted:
        odd = sorted(ours ^ wanted)[:3]
        raise CheckpointError(f"the export was not right: {', '.join(odd)} {'is' if len(odd) == 1 else 'are'} odd")
