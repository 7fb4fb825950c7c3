"""Every storage's birth and death while real code runs on tensors without data, by phase, stream and place.

Sees operators and nothing else: knows no model. Values that code reads from a tensor are answered with ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
HOST = "cpu"


@dataclass(frozen=True)
class StorageEvent:
    """A storage is born (its size) or dies (less than 0). Host memory has no stream."""

    storage: int
    num_bytes: int
    stream: int
    is_host: bool
    phase: str


@dataclass(eq=False)
class Fullest:
    """Bytes alive, and the most there were in each phase."""

    now: int = 0
    peaks: dict[str, int] = field(default_factory=dict)

    def add(self, num_bytes: int, phase: str) -> None:
        self.now += num_bytes
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.now)


class Storages(TorchDispatchMode):
    """Counts while it is entered. Entered inside a FakeTensorMode, so that it sees an operator first."""

    def __init__(self, get_stream: Callable[[], int] = lambda: 0, *, sees_kernels: bool = True) -> None:
        """`sees_kernels`: what attention kernels of a GPU, and others, take inside is added."""
        super().__init__()
        self.sees_kernels = sees_kernels
        self.get_stream, self.phase = get_stream, "load"
        self.events: list[StorageEvent] = []
        self.device, self.host = Fullest(), Fullest()
        self._numbers: dict[int, int] = {}

    @property
    def places(self) -> tuple[Fullest, Fullest]:
        return self.device, self.host

    def forget_peaks(self, *kept: str) -> None:
        """Of all phases but those."""
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
        """Also for what was there before."""
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

    def allocate_for_a_moment(self, num_bytes: int) -> None:
        """What an operator takes and gives back inside, unseen."""
        number, stream = len(self.events), self.get_stream()
        self._note(StorageEvent(number, num_bytes, stream, False, self.phase))
        self._note(StorageEvent(number, -num_bytes, stream, False, self.phase))

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
        if self.sees_kernels and op is torch.ops.ulysses.attend_backward.default:
            found = op(*args, **(kwargs or {}))
            for leaf in found:
                self.track(leaf)
            self.allocate_for_a_moment(count_kernel_bytes(*args[1:3], kernel=args[8]))
            return found
        if self.sees_kernels and op is aten.logsumexp.default:  # all exponentials (ReduceOps.cpp: logsumexp_out_impl)
            self.allocate_for_a_moment(args[0].nbytes)
        found = op(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            self.track(found)
        else:
            for leaf in tree_leaves(found):
                if isinstance(leaf, Tensor):
                    self.track(leaf)
        return found


def count_kernel_bytes(q: Tensor, k: Tensor, *, kernel: str) -> int:
    """Inside flash attention's backward, [tokens, heads, dim]: dq in float32, a number per token and head, and where
    heads share keys, dk and dv of each query head (FlashAttention 2, flash_api.cpp) or of each key head in float32
    (3 and newer)."""
    num_bytes = 4 * q.numel() + 4 * q.size(0) * q.size(1)
    if k.size(1) == q.size(1):
        return num_bytes
    is_new = kernel in ("flash_attention_3", "flash_attention_4")
    return num_bytes + (2 * 4 * k.numel() if is_new else 2 * q.numel() * q.element_size())


def _make_one(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return False  # the question is always whether something went wrong
    return 1.0 if dtype.is_floating_point else 1
