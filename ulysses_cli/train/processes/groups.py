"""Makes the process groups of a layout, among them the axis of ranks that share a row. The only caller of new_group.

Every rank makes every group, in the same order, as torch requires; each keeps those that it is part of. DeepSpeed
shards over the whole world, sequence ranks included, and gets no other group: see plan/ds_config.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout as set_group_timeout

from ulysses_cli.plan.layout import Group, Layout


@dataclass(frozen=True, eq=False)
class SequenceAxis:
    """The ranks that share a row. `group` is None when there is only one."""

    group: dist.ProcessGroup | None
    size: int
    rank: int


NO_AXIS = SequenceAxis(None, 1, 0)


def make_sequence_axis(group: dist.ProcessGroup | None) -> SequenceAxis:
    if group is None or dist.get_world_size(group) == 1:
        return NO_AXIS
    return SequenceAxis(group, dist.get_world_size(group), dist.get_rank(group))


NO_LIMIT = timedelta(days=30)


@dataclass(frozen=True, eq=False)
class Groups:
    """This rank's process groups and its place in the layout."""

    layout: Layout
    rank: int
    sp_axis: SequenceAxis
    ulysses_axis: SequenceAxis  # of the sp axis, the ranks that exchange heads of the same tokens
    ring_axis: SequenceAxis  # of the sp axis, the ranks that hold the same heads of different tokens
    sp_group: dist.ProcessGroup | None  # None when every rank has its own rows
    host_group: dist.ProcessGroup  # all ranks, over gloo: small facts that must not wait for a GPU

    def wait_without_limit(self) -> None:
        """Removes the groups' time-outs. The watchdog detects hangs; ranks may wait for hours for one that writes a
        large model."""
        if dist.get_backend() == "fake":
            return
        axes = (self.ulysses_axis.group, self.ring_axis.group)
        for group in {dist.group.WORLD, self.sp_group, self.host_group, *axes} - {None}:
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
    sp_groups = layout.sp_groups if layout.sp_size > 1 else ()
    sp_group = _make_own(sp_groups, rank, timeout)
    inner, outer = sp_group, None
    if layout.ring_size > 1:
        inner = None
        if layout.ulysses_size > 1:
            inner = _make_own(chain.from_iterable(map(layout.list_ulysses_groups, sp_groups)), rank, timeout)
        outer = _make_own(chain.from_iterable(map(layout.list_ring_groups, sp_groups)), rank, timeout)
    is_on_host = dist.get_backend() in ("gloo", "fake")
    host_group = dist.group.WORLD if is_on_host else dist.new_group(backend="gloo", timeout=timeout)
    sp_axis, ulysses_axis, ring_axis = (make_sequence_axis(group) for group in (sp_group, inner, outer))
    return Groups(layout, rank, sp_axis, ulysses_axis, ring_axis, sp_group, host_group)


def _make_own(groups: Iterable[Group], rank: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """Makes all of these groups, on every rank in the same order. Returns the one with this rank."""
    own = None
    for ranks in groups:
        group = dist.new_group(ranks, timeout=timeout)
        if rank in ranks:
            own = group
    return own
