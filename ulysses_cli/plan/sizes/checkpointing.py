"""torch.utils.checkpoint on sizes, the form that is not reentrant: a call saves its inputs, and its first saved tensor
that a backward asks for runs it again, up to the last tensor that it saved."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ulysses_cli.plan.sizes.autograd import SavedHooks, _pack, _unpack, grad_mode
from ulysses_cli.plan.sizes.tensor import Running, Tensor


class _Enough(Exception):
    """All saved tensors are there again."""


class _Holder:
    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None


class _Frame:
    """One call, until its backward has run it again."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function, self.holders, self.is_done = function, list[weakref.ref[_Holder]](), False
        # inputs are saved by the hooks around the call
        self.saved = [(_pack(a), a._requires_grad) if isinstance(a, Tensor) else (a, None) for a in args]

    def pack(self, _: Tensor) -> _Holder:
        holder = _Holder()
        self.holders.append(weakref.ref(holder))
        return holder

    def unpack(self, holder: _Holder) -> Any:
        if not self.is_done:
            self._run_again()
            self.is_done = True
        tensor, holder.tensor = holder.tensor, None
        return tensor

    def _run_again(self) -> None:
        number = 0

        def pack_again(t: Tensor) -> Tensor:
            nonlocal number
            t = t.detach() if t._requires_grad else t
            holder = self.holders[number]()
            number += 1
            if holder is not None:
                holder.tensor = t
            if number == len(self.holders):
                raise _Enough
            return t

        args = []
        for saved, requires_grad in self.saved:
            if requires_grad is None:
                args.append(saved)
                continue
            t = _unpack(saved).detach()
            args.append(t.requires_grad_(requires_grad))
            del t
        try:
            with SavedHooks(pack_again, lambda t: t), grad_mode(True):
                self.function(*args)
        except _Enough:
            pass


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **named: Any) -> Any:
    if not Running.grad:
        return function(*args, **named)
    frame = _Frame(lambda *again: function(*again, **named), args)
    with SavedHooks(frame.pack, frame.unpack):
        return function(*args, **named)
