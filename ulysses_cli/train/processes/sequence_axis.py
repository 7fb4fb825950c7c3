"""The ranks that share a row: their process group, its size and this rank's place in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


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
