"""world = dp_replicate x dp_shard x sp, and sp = ring x ulysses: each rank's coordinates, and which ranks form a group.

Pure integers. Ranks that exchange heads are neighbours, so that the exchange stays on the fastest link; replicas are
farthest apart. Makes no process groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

Group = tuple[int, ...]
GPUS_PER_NODE = 8  # of the usual machine


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes. Rank = (dp_replicate x dp_shard_size + dp_shard) x sp_size + sp. Inside an sp group, sp = ring
    x ulysses_size + ulysses: a ring holds shares of the row's queries, and the ranks of a share exchange heads."""

    dp_replicate_size: int = 1
    dp_shard_size: int = 1
    sp_size: int = 1
    ring_size: int = 1

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size < 1:
                raise ValueError(f"{name} is {size}; every axis has at least one rank")
        if self.sp_size % self.ring_size:
            raise ValueError(f"ring_size {self.ring_size} does not divide sp_size {self.sp_size}")

    @property
    def world_size(self) -> int:
        return self.dp_replicate_size * self.dp_shard_size * self.sp_size

    @property
    def ulysses_size(self) -> int:
        """Ranks that share the heads of the same tokens."""
        return self.sp_size // self.ring_size

    @property
    def dp_size(self) -> int:
        """How many different rows are processed at once."""
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def replica_size(self) -> int:
        """Ranks that hold one full copy of the parameters between them."""
        return self.dp_shard_size * self.sp_size

    def get_dp_index(self, rank: int) -> int:
        """Which of the dp_size rows of a micro-step this rank holds a slice of."""
        return rank // self.sp_size

    @property
    def sp_groups(self) -> tuple[Group, ...]:
        """Ranks that share one row, in the order of its slices."""
        return self.list_sp_groups(self.dp_size)

    def list_sp_groups(self, limit: int) -> tuple[Group, ...]:
        """The first `limit` of sp_groups, without making the others."""
        starts = range(0, min(self.dp_size, limit) * self.sp_size, self.sp_size)
        return tuple(tuple(range(start, start + self.sp_size)) for start in starts)

    def list_ulysses_groups(self, sp_group: Group) -> list[Group]:
        """Ranks of an sp group that exchange heads."""
        return [sp_group[start : start + self.ulysses_size] for start in range(0, self.sp_size, self.ulysses_size)]

    def list_ring_groups(self, sp_group: Group) -> list[Group]:
        """Ranks of an sp group that hold the same heads of different tokens."""
        return [sp_group[first :: self.ulysses_size] for first in range(self.ulysses_size)]


@dataclass(frozen=True)
class Placement:
    """Where ranks stand: a machine holds neighbouring ranks, and those that share a row should share one."""

    layout: Layout
    num_nodes: int

    @property
    def gpus_per_node(self) -> int:
        return self.layout.world_size // self.num_nodes

    @property
    def num_crossing(self) -> int:
        """How many groups that share a row stand on more than one machine."""
        return self._count_crossing(self.layout.sp_size)

    @property
    def num_crossing_heads(self) -> int:
        """How many groups that exchange heads stand on more than one machine."""
        return self._count_crossing(self.layout.ulysses_size)

    @property
    def num_crossing_copies(self) -> int:
        """How many replicas stand on more than one machine; 0 without copies of the weights inside replicas (hpZ)."""
        return self._count_crossing(self.layout.replica_size) if self.layout.dp_replicate_size > 1 else 0

    def list_copies(self, node: int) -> list[int]:
        """The replicas that have ranks on a machine."""
        first, end = node * self.gpus_per_node, (node + 1) * self.gpus_per_node
        return list(range(first // self.layout.replica_size, (end - 1) // self.layout.replica_size + 1))

    def _count_crossing(self, size: int) -> int:
        starts = range(0, self.layout.world_size, size)
        return sum(start // self.gpus_per_node != (start + size - 1) // self.gpus_per_node for start in starts)

    @property
    def must_cross(self) -> bool:
        return self.layout.sp_size > self.gpus_per_node

    def list_machine(self, node: int) -> list[range]:
        """Returns the machine's ranks, as one range for each row that they share."""
        size, per_node = self.layout.sp_size, self.gpus_per_node
        first, end = node * per_node, (node + 1) * per_node
        bounds = [first, *range((first // size + 1) * size, end, size), end]
        return [range(begin, stop) for begin, stop in pairwise(bounds)]


def count_near_ranks(sp_size: int, gpus_per_node: int) -> int:
    """Returns how many ranks of its row the worst-placed rank has on its machine, itself included.

    A row begins at a multiple of sp_size; only its place inside a machine matters, which repeats soon."""
    starts = range(0, math.lcm(sp_size, gpus_per_node), sp_size)
    return min(min(_list_parts(start % gpus_per_node, sp_size, gpus_per_node)) for start in starts)


def _list_parts(first: int, size: int, per_node: int) -> list[int]:
    """Returns how many of `size` neighbouring ranks stand on each machine; the first stands at `first` of its own."""
    bounds = [0, *range(per_node - first, size, per_node), size]
    return [end - begin for begin, end in pairwise(bounds)]


def list_divisors(number: int) -> list[int]:
    """All divisors in rising order: the legal sizes of an axis."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


@dataclass(frozen=True)
class KvHeads:
    """Key/value heads on each rank. Where they do not divide evenly, ranks share heads: a head goes to each rank whose
    query heads need it, and its gradients are summed."""

    num_local: int
    is_repeated: bool


def compute_kv_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> KvHeads:
    """The most key/value heads that the consecutive query heads of any rank need, of those that exchange heads."""
    local_heads, group = num_heads // num_ranks, num_heads // num_kv_heads
    needed = [
        (rank * local_heads + local_heads - 1) // group - rank * local_heads // group + 1 for rank in range(num_ranks)
    ]
    return KvHeads(max(needed), is_repeated=num_kv_heads % num_ranks != 0)
