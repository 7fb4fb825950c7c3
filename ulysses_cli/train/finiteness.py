"""Checks that tensors are finite: one NaN or infinity in a weight spoils all that is computed from it, hours before
anyone sees it. One pass over a tensor, without a copy of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.utils import cached_file

from ulysses_cli.plan.files.weight_files import list_weight_files, read_header

WORDS = "NaN or infinity"


def is_finite(tensor: Tensor) -> bool:
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor.detach()))


def find_nonfinite(module: nn.Module) -> str:
    """The first parameter whose part on this rank holds NaN or infinity, or ''. Parts on a disk are not checked."""
    return next((name for name, part in _walk_parts(module) if not is_finite(part)), "")


def _walk_parts(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters():
        shard = getattr(parameter, "ds_tensor", None)
        yield name, parameter.data if shard is None else shard.data


def find_file(path: str, name: str, revision: str | None = None) -> Path | None:
    """The weight file that holds a tensor of this name. None where the files use another name."""
    try:
        folder = Path(str(cached_file(os.path.expanduser(path), "config.json", revision=revision))).parent
        return next((file for file in list_weight_files(folder) if name in read_header(file)), None)
    except (OSError, ValueError):
        return None
