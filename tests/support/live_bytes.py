"""Counts the bytes alive while real code runs on tensors without data: every storage's birth and death."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Storages that existed before are counted when `track` is called on them, or at their first use. `ignored`: a
    device whose tensors are shapes alone."""

    def __init__(self, ignored: str = "") -> None:
        super().__init__()
        self.ignored = ignored
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0
        self.log: list[tuple[str, int, int]] = []

    def track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.sizes or tensor.device.type == self.ignored:
            return
        self.sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.forget, key)

    def forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.now
        found = op(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self.track(leaf)
        self.log.append((str(op), before, self.now))
        return found
