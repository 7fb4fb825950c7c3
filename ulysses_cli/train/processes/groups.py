"""Makes the process groups of a layout. The only caller of new_group.

Every rank makes every group, in the same order, as torch requires; each keeps those that it is part of. DeepSpeed
shards over the whole world, sequence ranks included, and gets no other group: see plan/ds_config.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout as set_group_timeout

from ulysses_cli.plan.layout import Layout
from ulysses_cli.train.processes.sequence_axis import SequenceAxis, make_sequence_axis

NO_LIMIT = timedelta(days=30)


@dataclass(frozen=True, eq=False)
class Groups:
    """This rank's process groups and its place in the layout."""

    layout: Layout
    rank: int
    sp_axis: SequenceAxis
    sp_group: dist.ProcessGroup | None  # None when every rank has its own rows
    host_group: dist.ProcessGroup  # all ranks, over gloo: small facts that must not wait for a GPU

    def wait_without_limit(self) -> None:
        """Removes the groups' time-outs. The watchdog detects hangs; ranks may wait for hours for one that writes a
        large model."""
        if dist.get_backend() == "fake":
            return
        for group in {dist.group.WORLD, self.sp_group, self.host_group} - {None}:
            set_group_timeout(NO_LIMIT, group)

    @property
    def dp_index(self) -> int:
        return self.layout.get_dp_index(self.rank)

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def make_groups(layout: Layout, timeout: timedelta) -> Groups:
    """Collective over all ranks. A rank that shares its row with no other needs no group."""
    rank = dist.get_rank()
    if dist.get_world_size() != layout.world_size:
        raise ValueError(f"{dist.get_world_size()} processes run, the layout has {layout.world_size}")
    sp_group = None
    for ranks in layout.sp_groups if layout.sp_size > 1 else ():
        group = dist.new_group(ranks, timeout=timeout)
        if rank in ranks:
            sp_group = group
    is_on_host = dist.get_backend() in ("gloo", "fake")
    host_group = dist.group.WORLD if is_on_host else dist.new_group(backend="gloo", timeout=timeout)
    return Groups(layout, rank, make_sequence_axis(sp_group), sp_group, host_group)
