"""Records when each storage is allocated and freed while training code runs on tensors without data, by phase, stream
and device or host.

It sees operators and no model. A value that code reads from a tensor is 1.
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
