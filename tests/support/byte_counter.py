"""Counts the bytes that are alive while code runs.

A dispatch mode sees each storage when an operator returns it and when it is freed. Tests and benchmarks use it. It
shares no code with the trace of ulysses_cli, which it checks.
"""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ByteCounter(TorchDispatchMode):
    """Counts in `now` the bytes alive, in `peak` the most at once, in `largest` those of the largest storage. Storages
    that existed before count from the call of `track`, or from the first operator that returns a view of them."""

    def __init__(self, *, ignored_device: str = "", min_bytes: int = 0) -> None:
        """Leaves out storages on `ignored_device` (for example "meta"), and those below `min_bytes`."""
        super().__init__()
        self.ignored_device, self.min_bytes = ignored_device, min_bytes
        self.now = self.peak = self.largest = 0
        self.events: list[tuple[int, int]] = []  # (number of a storage, its bytes; negative when it is freed)
        self.num_storages = 0
        self._numbers: dict[int, int] = {}
        self._ignored: set[int] = set()

    def ignore(self, *tensors: Tensor) -> None:
        """Leaves out tensors, for example weights and inputs, which exist before and after."""
        self._ignored |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def get_number(self, tensor: Tensor) -> int:
        """Returns a storage's number, or -1 for one that is not counted."""
        return self._numbers.get(tensor.untyped_storage()._cdata, -1)

    def list_alive(self) -> set[int]:
        return set(self._numbers.values())

    def track(self, tensor: Tensor) -> int:
        """Counts the tensor's storage, once; returns its number."""
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        is_ignored = key in self._ignored or tensor.device.type == self.ignored_device or num_bytes < self.min_bytes
        if key not in self._numbers and not is_ignored:
            self._numbers[key] = number = self.num_storages
            self.num_storages += 1
            self.largest = max(self.largest, num_bytes)
            self.record(number, num_bytes)
            weakref.finalize(storage, self._forget, key, number, num_bytes)
        return self._numbers.get(key, -1)

    def _forget(self, key: int, number: int, num_bytes: int) -> None:
        self._numbers.pop(key, None)
        self.record(number, -num_bytes)

    def record(self, number: int, num_bytes: int) -> None:
        self.events.append((number, num_bytes))
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def run(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an operator and returns its result. A subclass may do more with it."""
        return op(*args, **kwargs)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.run(op, args, kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.track(leaf)
        return result
