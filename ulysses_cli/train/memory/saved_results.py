"""What a layer's forward keeps for its recomputation: results too dear to compute twice, handed back in their order.

`keep` is called by whoever computes such a result; `SavedResults` is one run of one layer. Where tensors wait is
decided by a storage. Results are kept here and not by a dispatch mode over all operators, because under ZeRO-3 the two
runs of a layer do not execute the same operators: gathers come and go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor


class ResultStorage(Protocol):
    """Where one run of one layer leaves tensors. Each is fetched once."""

    def store(self, tensor: Tensor) -> Any: ...

    def fetch(self, stored: Any) -> Tensor: ...


class DeviceStorage:
    """Tensors stay where they are."""

    def store(self, tensor: Tensor) -> Tensor:
        return tensor.detach()

    def fetch(self, stored: Tensor) -> Tensor:
        return stored


class SavedResults:
    """The results of one run of a layer, in the order in which its forward made them."""

    def __init__(self, storage: ResultStorage) -> None:
        self._shelf = storage
        self._results: deque[list[Any]] = deque()
        self._has_run = False

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """The layer: the first time it leaves results here, then it finds them."""
        token = _current.set(self)
        try:
            return function(*args)
        finally:
            self._has_run = True
            _current.reset(token)

    def keep(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if self._has_run:
            if not self._results:
                raise RuntimeError("a layer asks again for results that its recomputation has had")
            return tuple(self._shelf.fetch(stored) for stored in self._results.popleft())
        results = compute()
        self._results.append([self._shelf.store(result) for result in results])
        return results


_current: ContextVar[SavedResults | None] = ContextVar("kept", default=None)


def is_saving_results() -> bool:
    """Inside a layer that will be recomputed and keeps results."""
    return _current.get() is not None and torch.is_grad_enabled()


def keep(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """`compute()`; inside a layer that keeps results its recomputation gets the same ones without computing."""
    kept = _current.get()
    return compute() if kept is None else kept.keep(compute)
