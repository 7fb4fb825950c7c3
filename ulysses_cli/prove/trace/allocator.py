"""A small model of torch's caching allocator: takes allocations and frees of storages, returns the bytes reserved.

Rules from c10/cuda/CUDACachingAllocator.cpp: sizes are rounded up to 512; sizes up to 1 MiB have a pool of their own;
the smallest free block of the same stream that is large enough is used and split. Works on sizes, not on tensors.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

ROUND, SMALL, MIB = 512, 1 << 20, 1 << 20
SMALL_SEGMENT, LARGE_SEGMENT, LARGE_ALLOC = 2 * MIB, 20 * MIB, 10 * MIB
ALIGN = 2 * MIB  # of segments made for one large tensor


@dataclass(eq=False)
class SegmentBlock:
    """A free or allocated part of a segment."""

    size: int
    is_free: bool
    before: SegmentBlock | None = None
    after: SegmentBlock | None = None


class Pool:
    """Free blocks of one stream and one kind of sizes."""

    def __init__(self, *, is_small: bool, expandable: bool) -> None:
        self.is_small, self.expandable = is_small, expandable
        self.reserved = 0
        self.free: list[tuple[int, int, SegmentBlock]] = []
        self.tail: SegmentBlock | None = None  # the end of the one segment that grows
        self._number = 0

    def take(self, size: int) -> SegmentBlock:
        at = bisect_left(self.free, (size, -1))
        block = self.free.pop(at)[2] if at < len(self.free) else self._grow(size)
        block.is_free = False
        rest = block.size - size
        if rest >= ROUND if self.is_small or self.expandable else rest > SMALL:
            left = SegmentBlock(rest, True, block, block.after)
            if block.after is not None:
                block.after.before = left
            block.after, block.size = left, size
            if self.tail is block:
                self.tail = left
            self._put(left)
        return block

    def give_back(self, block: SegmentBlock) -> None:
        block.is_free = True
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._drop(other)
                block = self._merge(block, other)
        self._put(block)

    def _merge(self, block: SegmentBlock, other: SegmentBlock) -> SegmentBlock:
        first, second = (other, block) if block.before is other else (block, other)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if self.tail is second:
            self.tail = first
        return first

    def _grow(self, size: int) -> SegmentBlock:
        if not self.expandable:
            block = SegmentBlock(count_segment(size), True)
            self.reserved += block.size
            return block
        page, tail = SMALL_SEGMENT if self.is_small else LARGE_SEGMENT, self.tail
        held = tail.size if tail is not None and tail.is_free else 0
        grown = -(-(size - held) // page) * page
        self.reserved += grown
        if tail is not None and tail.is_free:
            self._drop(tail)
            tail.size += grown
            return tail
        self.tail = SegmentBlock(grown, True, tail)
        if tail is not None:
            tail.after = self.tail
        return self.tail

    def _put(self, block: SegmentBlock) -> None:
        self._number += 1
        insort(self.free, (block.size, self._number, block))

    def _drop(self, block: SegmentBlock) -> None:
        at = bisect_left(self.free, (block.size, -1))
        while self.free[at][2] is not block:
            at += 1
        del self.free[at]


def count_segment(size: int) -> int:
    """Bytes of the segment that is allocated on the device when no free block is large enough."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE_ALLOC else -(-size // ALIGN) * ALIGN


def replay(events: Iterable[tuple[int, int, int]], *, expandable: bool) -> int:
    """Takes (storage, its bytes when allocated or a number below 0 when freed, stream) in order. Returns the most bytes
    ever reserved, if nothing is ever returned to the device."""
    pools: dict[tuple[int, bool], Pool] = {}
    blocks: dict[int, tuple[Pool, SegmentBlock]] = {}
    for storage, num_bytes, stream in events:
        if num_bytes > 0:
            size = -(-num_bytes // ROUND) * ROUND
            is_small = size <= SMALL
            pool = pools.setdefault((stream, is_small), Pool(is_small=is_small, expandable=expandable))
            blocks[storage] = pool, pool.take(size)
        elif storage in blocks:
            pool, block = blocks.pop(storage)
            pool.give_back(block)
    return sum(pool.reserved for pool in pools.values())
