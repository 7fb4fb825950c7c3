"""Where in the engine's flat tensors this rank's shares of the parameters lie, whatever the ZeRO stage.

Knows DeepSpeed's optimizers by their attributes; imports nothing of it. What the flat tensors hold is states.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Shard:
    """Elements [start, start + numel) of a flattened parameter: elements [offset, offset + numel) of a flat master."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    flat: int
    offset: int


def get_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The whole parameter's shape, also where this rank holds only a part of it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def get_masters(optimizer: Any) -> list[Tensor]:
    """The flat float32 tensors that the optimizer updates on this rank."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return list(optimizer.fp32_partitioned_groups_flat)
    return list(optimizer.single_partition_of_fp32_groups)


def list_shards(module: nn.Module, optimizer: Any, rank: int) -> list[Shard]:
    """Every trained parameter's share of this rank; parameters without one here are left out."""
    return list(_walk_shards(module, optimizer, rank))


def _walk_shards(module: nn.Module, optimizer: Any, rank: int) -> Iterator[Shard]:
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_tensor"):
            flat, offset, held = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = rank * held
            numel = max(0, min(held, parameter.ds_numel - start))
        else:
            place = getattr(parameter, "_hp_mapping", None)
            if place is None:
                continue
            flat, offset = place.param_group_index, place.hp_fragment_address.start
            start, numel = place.lp_fragment_address.start, place.lp_fragment_address.numel
        if numel:
            yield Shard(name, get_shape(parameter), start, numel, flat, offset)


def count_held(module: nn.Module) -> tuple[int, int, int]:
    """(elements on this rank, of all, of those that DeepSpeed keeps whole because they are small)."""
    held = whole = small = 0
    for parameter in module.parameters():
        size = int(getattr(parameter, "ds_numel", parameter.numel()))
        whole += size
        if getattr(parameter, "ds_persist", False):
            small += size
        held += parameter.ds_tensor.ds_numel if hasattr(parameter, "ds_tensor") else size
    return held, whole, small
