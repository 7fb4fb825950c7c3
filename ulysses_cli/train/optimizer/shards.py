"""Maps this rank's shares of the parameters to the engine's flat tensors, at any ZeRO stage.

Uses the attributes of DeepSpeed's optimizers; imports nothing of it. states.py reads and writes the flat tensors.
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
    """This rank's share of every trained parameter. Parameters without a share on this rank are left out."""
    return list(_walk_shards(module, optimizer, rank))


def _walk_shards(module: nn.Module, optimizer: Any, rank: int) -> Iterator[Shard]:
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_tensor"):
            flat, offset, shard_numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = rank * shard_numel
            numel = max(0, min(shard_numel, parameter.ds_numel - start))
        else:
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is None:
                continue
            flat, offset = mapping.param_group_index, mapping.hp_fragment_address.start
            start, numel = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
        if numel:
            yield Shard(name, get_shape(parameter), start, numel, flat, offset)


def count_parameters(module: nn.Module) -> tuple[int, int, int]:
    """Returns elements on this rank, in all, and of parameters that DeepSpeed keeps whole because they are small."""
    local = total = small = 0
    for parameter in module.parameters():
        numel = int(getattr(parameter, "ds_numel", parameter.numel()))
        total += numel
        if getattr(parameter, "ds_persist", False):
            small += numel
        local += parameter.ds_tensor.ds_numel if hasattr(parameter, "ds_tensor") else numel
    return local, total, small
