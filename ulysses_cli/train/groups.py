"""Layout -> process groups. The only caller of new_group.

Every rank makes every group, in the same order, as torch demands; each keeps those that it is part of. DeepSpeed shards
over the whole world, sequence ranks included, and is told of no other group: see plan/ds_config.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ulysses_cli.plan.layout import Layout
from ulysses_cli.train.exchange import Axis, make_axis


@dataclass(frozen=True, eq=False)
class Groups:
    """This rank's place in the mesh."""

    layout: Layout
    rank: int
    sp_axis: Axis
    sp_group: dist.ProcessGroup
    host_group: dist.ProcessGroup  # all ranks, over the network: small facts that must not wait for a GPU

    @property
    def dp_index(self) -> int:
        return self.layout.get_dp_index(self.rank)

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def make_groups(layout: Layout, timeout: timedelta) -> Groups:
    """Collective: all ranks of the world call it together."""
    rank = dist.get_rank()
    if dist.get_world_size() != layout.world_size:
        raise ValueError(f"{dist.get_world_size()} processes run, the layout has {layout.world_size}")
    mine = None
    for ranks in layout.sp_groups:
        group = dist.new_group(ranks, timeout=timeout)
        if rank in ranks:
            mine = group
    if mine is None:
        raise AssertionError(f"rank {rank} is in no sp group of {layout}")
    host = dist.group.WORLD if dist.get_backend() in ("gloo", "fake") else dist.new_group(backend="gloo")
    return Groups(layout, rank, make_axis(mine), mine, host)
