"""Records when each storage is allocated and freed while training code runs on tensors without data, by phase, stream
and device or host, and replays these through a small model of torch's caching allocator: the bytes reserved.

It sees operators and no model. A value that code reads from a tensor is 1. The allocator works on sizes (rules from
c10/cuda/CUDACachingAllocator.cpp), not on tensors."""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


aten = torch.ops.aten
HOST = "cpu"


@dataclass(frozen=True)
class StorageEvent:
    """A storage is allocated (its size) or freed (minus its size). Host memory has no stream."""

    storage: int
    num_bytes: int
    stream: int
    is_host: bool
    phase: str


@dataclass(eq=False)
class LiveBytes:
    """Bytes allocated now, and their peak in each phase."""

    now: int = 0
    peaks: dict[str, int] = field(default_factory=dict)

    def add(self, num_bytes: int, phase: str) -> None:
        self.now += num_bytes
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.now)


class Storages(TorchDispatchMode):
    """Records while it is entered. Enter it inside a FakeTensorMode, so that it sees each operator first."""

    def __init__(self, get_stream: Callable[[], int] = lambda: 0, *, sees_kernels: bool = True) -> None:
        """`sees_kernels`: add the temporary memory inside a GPU's kernels, which operators do not show."""
        super().__init__()
        self.sees_kernels = sees_kernels
        self.get_stream, self.phase = get_stream, "load"
        self.events: list[StorageEvent] = []
        self.device, self.host = LiveBytes(), LiveBytes()
        self._numbers: dict[int, int] = {}

    @property
    def places(self) -> tuple[LiveBytes, LiveBytes]:
        return self.device, self.host

    def forget_peaks(self, *kept: str) -> None:
        """Forgets the peaks of all phases but these."""
        for place in self.places:
            place.peaks = {phase: size for phase, size in place.peaks.items() if phase in kept}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        for place in self.places:
            place.add(0, phase)
        try:
            yield
        finally:
            self.phase = before

    def track(self, tensor: Tensor) -> None:
        """Records a tensor's storage, once; also one that was allocated before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._numbers:
            return
        num_bytes, is_host = storage.nbytes(), tensor.device.type == HOST
        number = len(self.events)
        self._numbers[key] = number
        stream = 0 if is_host else self.get_stream()
        self._note(StorageEvent(number, num_bytes, stream, is_host, self.phase))
        weakref.finalize(storage, self._forget, key, number, num_bytes, stream, is_host)

    def add_temporary(self, num_bytes: int) -> None:
        """Memory that an operator allocates and frees inside, which cannot be seen here."""
        number, stream = len(self.events), self.get_stream()
        self._note(StorageEvent(number, num_bytes, stream, False, self.phase))
        self._note(StorageEvent(number, -num_bytes, stream, False, self.phase))

    def _count_inside(self, op: Any, args: Any) -> int:
        """Temporary memory inside one of the operators of attention."""
        if op is torch.ops.ulysses.attend.default:
            return count_padding_bytes(*args[:3], is_backward=False)
        workspace = count_kernel_bytes(*args[1:3], kernel=args[8]) if self.sees_kernels else 0
        return workspace + count_padding_bytes(*args[1:4], is_backward=True)

    def _forget(self, key: int, number: int, num_bytes: int, stream: int, is_host: bool) -> None:
        self._numbers.pop(key, None)
        self._note(StorageEvent(number, -num_bytes, stream, is_host, self.phase))

    def _note(self, event: StorageEvent) -> None:
        self.events.append(event)
        (self.host if event.is_host else self.device).add(event.num_bytes, event.phase)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is aten._local_scalar_dense.default:
            return _make_one(args[0].dtype)
        if op is aten.equal.default:
            return True
        if op in (torch.ops.ulysses.attend.default, torch.ops.ulysses.attend_backward.default):
            outputs = op(*args, **(kwargs or {}))
            for leaf in outputs:
                self.track(leaf)
            self.add_temporary(self._count_inside(op, args))
            return outputs
        if self.sees_kernels and op is aten.logsumexp.default:  # all exponentials (ReduceOps.cpp: logsumexp_out_impl)
            self.add_temporary(args[0].nbytes)
        outputs = op(*args, **(kwargs or {}))
        if isinstance(outputs, Tensor):
            self.track(outputs)
        else:
            for leaf in tree_leaves(outputs):
                if isinstance(leaf, Tensor):
                    self.track(leaf)
        return outputs


def count_padding_bytes(q: Tensor, k: Tensor, v: Tensor, *, is_backward: bool) -> int:
    """Where values are narrower than keys (train/attention/kernels/operators.py: _widen), tensors of a key's width: the
    values, and the result instead of a narrow one; in the backward the values, their gradient instead of a narrow one,
    the result and its gradient."""
    if k.size(2) == v.size(2):
        return 0
    if is_backward:
        return 2 * k.nbytes - v.nbytes + 2 * q.nbytes
    return k.nbytes + q.nbytes - q.nbytes // q.size(2) * v.size(2)


def count_kernel_bytes(q: Tensor, k: Tensor, *, kernel: str) -> int:
    """Temporary memory of flash attention's backward, tensors of [tokens, heads, dim]: dq in float32, one number per
    token and head, and where heads share keys, dk and dv of each query head (FlashAttention 2, flash_api.cpp) or of
    each key head in float32 (3 and newer)."""
    num_bytes = 4 * q.numel() + 4 * q.size(0) * q.size(1)
    if k.size(1) == q.size(1):
        return num_bytes
    is_new = kernel in ("flash_attention_3", "flash_attention_4")
    return num_bytes + (2 * 4 * k.numel() if is_new else 2 * q.numel() * q.element_size())


def _make_one(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return False  # code only reads booleans to ask whether something went wrong
    return 1.0 if dtype.is_floating_point else 1
