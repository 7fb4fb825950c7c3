"""Autograd on sizes: which tensors a node saves, in which order a backward runs nodes, and when a gradient goes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from sys import getrefcount
from typing import Any, ClassVar

from ulysses_cli.plan.sizes.tensor import Running, Tensor, is_contiguous, keep_order, make, make_like

Backward = Callable[["Node", list[Any]], Sequence[Any]]
GRADIENT = "gradient"  # the kind of work of a backward
LEAF = 1 << 60  # a leaf's gradient is added as soon as it is there


@contextmanager
def grad_mode(enabled: bool) -> Iterator[None]:
    before, Running.grad = Running.grad, enabled
    try:
        yield
    finally:
        Running.grad = before


class SavedHooks:
    """torch.autograd.graph.saved_tensors_hooks"""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        self.pack, self.unpack = pack, unpack

    def __enter__(self) -> None:
        Running.hooks.append(self)

    def __exit__(self, *_: object) -> None:
        Running.hooks.pop()


class Node:
    """One operator of the graph. `run` takes this node and the gradients of its results, and returns those of its
    inputs. A later `sequence` runs first."""

    __slots__ = ("__weakref__", "data", "edges", "hooks", "place", "pre_hooks", "results", "run", "saved", "sequence")

    def __init__(self, run: Backward, inputs: Sequence[Tensor | None], sequence: int | None = None) -> None:
        if sequence is None:
            Running.sequence += 1
            sequence = Running.sequence
        self.sequence, self.run, self.place = sequence, run, Running.meter.tag[1]
        self.saved: tuple[Any, ...] = ()
        self.results: tuple[tuple[Any, ...], ...] = ()
        self.data: Any = None
        self.hooks: list[Any] | None = None
        self.pre_hooks: dict[int, list[Any]] | None = None
        self.edges = [_find_edge(t) for t in inputs]

    def save(self, *tensors: Tensor | None) -> None:
        self.saved = (*self.saved, *(_pack(t) for t in tensors))

    def take(self) -> list[Any]:
        return [_unpack(saved) for saved in self.saved]

    def needs(self, index: int) -> bool:
        return self.edges[index] is not None


def _find_edge(t: Tensor | None) -> tuple[Node, int] | None:
    if t is None or not t._requires_grad:
        return None
    if t.node is not None:
        return t.node, t.index
    if t._accumulate is None:
        t._accumulate = Node(Accumulation(t), (), LEAF)
        t._accumulate.results = ((t.shape, t.dtype, False),)
    return t._accumulate, 0


class Accumulation:
    """Adds up a leaf's gradient, then calls the leaf's hooks."""

    def __init__(self, leaf: Tensor) -> None:
        self.leaf = weakref.ref(leaf)

    def __call__(self, node: Node, grads: list[Any]) -> Sequence[Any]:
        leaf = self.leaf()
        if leaf is None:
            return ()
        grad = grads[0]
        if leaf.grad is None:
            # what nobody else holds becomes the gradient itself
            is_alone = getrefcount(grad) <= 3 and (is_contiguous(grad) or grad.steps == leaf.steps)
            leaf.grad = grad.detach() if is_alone else make(grad.shape, grad.dtype, leaf.steps)
        grads[0] = grad = None  # a second one is added in place, and gone before the hooks
        for hook in leaf._hooks or ():
            hook(leaf)
        return ()


def _pack(t: Tensor | None) -> Any:
    if t is None:
        return None
    if Running.hooks:
        hooks = Running.hooks[-1]
        return hooks.unpack, hooks.pack(t)
    return t if t.node is None else t.detach()  # a leaf is saved itself: its data may be replaced


def _unpack(saved: Any) -> Any:
    return saved[0](saved[1]) if isinstance(saved, tuple) else saved


def begin(run: Backward, *inputs: Tensor | None) -> Node | None:
    """A node where any input needs a gradient."""
    if Running.grad:
        for t in inputs:
            if t is not None and t._requires_grad:
                return Node(run, inputs)
    return None


def finish(node: Node | None, out: Tensor) -> Tensor:
    if node is not None:
        node.results = ((out.shape, out.dtype, out.storage.on_host),)
        out.node, out.index, out._requires_grad = node, 0, True
    return out


def finish_all(node: Node | None, outs: Sequence[Tensor]) -> Sequence[Tensor]:
    if node is not None:
        node.results = tuple((out.shape, out.dtype, out.storage.on_host) for out in outs)
        for index, out in enumerate(outs):
            if out.dtype.is_floating_point or out.dtype.is_complex:
                out.node, out.index, out._requires_grad = node, index, True
    return outs


class Context:
    """What a Function's forward and backward share."""

    def __init__(self) -> None:
        self._to_save: tuple[Tensor | None, ...] = ()
        self._node: Any = None
        self._has_no_grad: tuple[Tensor, ...] = ()
        self._fills = True
        self.needs_input_grad: tuple[bool, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self._to_save = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self._has_no_grad = tensors

    def mark_dirty(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None:
        self._fills = value

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(self._node.take())

    def maybe_clear_saved_tensors(self) -> None:
        self._node.saved = ()


class Function:
    """torch.autograd.Function"""

    once: ClassVar[bool] = False
    forward: Any
    backward: Any

    @classmethod
    def apply(cls, *args: Any) -> Any:
        tensors = [a if isinstance(a, Tensor) else None for a in args]
        node, ctx = begin(cls._run, *tensors), Context()
        ctx.needs_input_grad = tuple(t is not None and t._requires_grad for t in tensors)
        with grad_mode(False):
            if hasattr(cls, "setup_context"):
                result = cls.forward(*args)
                cls.setup_context(ctx, args, result)
            else:
                result = cls.forward(ctx, *args)
        if node is None:
            return result
        is_one = not isinstance(result, tuple)
        given = {id(t) for t in tensors if t is not None}
        plain = {id(t) for t in ctx._has_no_grad}
        outs, marked = [], []
        for out in (result,) if is_one else result:
            if not isinstance(out, Tensor):
                outs.append(out)
                continue
            own = out.detach() if out.node is not None or id(out) in given else out
            outs.append(own)
            marked.append((own, id(out) in plain))
        del result
        own_ids = {id(own) for own, _ in marked}
        node.data = cls, ctx
        node.save(*(t if t is None or id(t) not in own_ids else t.detach() for t in ctx._to_save))
        ctx._to_save, ctx._has_no_grad = (), ()
        node.results = tuple((out.shape, out.dtype, out.storage.on_host) for out, _ in marked)
        for index, (out, is_plain) in enumerate(marked):
            if not is_plain and (out.dtype.is_floating_point or out.dtype.is_complex):
                out.node, out.index, out._requires_grad = node, index, True
        return outs[0] if is_one else tuple(outs)

    @staticmethod
    def _run(node: Node, grads: list[Any]) -> Sequence[Any]:
        cls, ctx = node.data
        ctx._node = weakref.proxy(node)
        if ctx._fills:
            for index, (shape, dtype, on_host) in enumerate(node.results):
                if grads[index] is None:
                    grads[index] = make(shape, dtype, on_host=on_host)
        with grad_mode(False):
            found = cls.backward(ctx, *grads)
        return found if isinstance(found, tuple) else (found,)


def backward(
    roots: Sequence[Tensor], grads: Sequence[Tensor], wanted: Sequence[Tensor] | None = None
) -> list[Tensor | None]:
    """Runs the graph behind `roots`: of the nodes that are ready the newest first, leaves at once. With `wanted`, as
    torch.autograd.grad: returns the gradients of those tensors and adds up none."""
    caught: dict[tuple[Node, int], Tensor] = {}
    targets = {}
    if wanted is not None:
        targets = {edge: None for t in wanted if (edge := _find_edge(t)) is not None}
    first = [t.node or (edge[0] if (edge := _find_edge(t)) else None) for t in roots]
    waiting: dict[Node, int] = {}
    stack = [node for node in dict.fromkeys(first) if node is not None]
    seen = set(stack)
    while stack:
        for edge in stack.pop().edges:
            if edge is not None:
                waiting[edge[0]] = waiting.get(edge[0], 0) + 1
                if edge[0] not in seen:
                    seen.add(edge[0])
                    stack.append(edge[0])
    buffers: dict[Node, list[Tensor | None]] = {}
    for t, node, grad in zip(roots, first, grads, strict=True):
        if node is not None:
            buffers.setdefault(node, [None] * max(1, len(node.results)))[t.index] = grad
    ready = [(-node.sequence, number, node) for number, node in enumerate(buffers) if not waiting.get(node)]
    ready.sort(key=lambda item: item[:2])
    count = len(ready)
    del seen, stack, first
    grad = None  # type: ignore[assignment]
    meter, tag = Running.meter, Running.meter.tag
    with grad_mode(False):
        while ready:
            _, _, node = heappop(ready)
            meter.tag = GRADIENT, node.place
            received = buffers.pop(node, None)
            if received is not None and node.pre_hooks:
                for index, hooks in node.pre_hooks.items():
                    for hook in hooks:
                        replaced = hook(received[index]) if received[index] is not None else None
                        received[index] = replaced if replaced is not None else received[index]
                        del replaced
            if wanted is not None and received is not None:
                for index, each in enumerate(received):
                    if (node, index) in targets and each is not None:
                        caught[node, index] = each
                each = None
            outs: list[Any]
            edge = None
            if received is None or (wanted is not None and node.sequence == LEAF):
                outs = [None] * len(node.edges)
            else:
                outs = list(node.run(node, received))
                outs += [None] * (len(node.edges) - len(outs))
                for index, edge in enumerate(node.edges):
                    if edge is None:
                        outs[index] = None
                    elif outs[index] is not None:
                        _fit(outs, index, edge)
                for hook in node.hooks or ():
                    hook(outs, received)
            del received
            node.saved = ()
            for index, edge in enumerate(node.edges):
                if edge is None:
                    continue
                target, at = edge
                out, outs[index] = outs[index], None
                if out is not None:
                    buffer = buffers.setdefault(target, [None] * max(1, len(target.results)))
                    if buffer[at] is None:
                        buffer[at] = out
                    else:
                        buffer[at] = _add(buffer, at, out)
                    del buffer
                del out
                waiting[target] -= 1
                if not waiting[target]:
                    count += 1
                    heappush(ready, (-target.sequence, count, target))
                del target
            del edge, node, outs  # each holds tensors that the next node's run must not find
    meter.tag = tag
    if wanted is None:
        return []
    return [caught.pop(edge, None) if (edge := _find_edge(t)) is not None else None for t in wanted]


def _add(buffer: list[Any], at: int, out: Tensor) -> Tensor:
    """The sum of two gradients."""
    first = buffer[at]
    buffer[at] = None
    return make(out.shape, first.dtype, keep_order([first, out], out.shape), on_host=out.storage.on_host)


def _fit(outs: list[Any], index: int, edge: tuple[Node, int]) -> None:
    """As the engine makes a gradient fit: summed over what was broadcast, then of the result's type."""
    shape, dtype, _ = edge[0].results[edge[1]]
    if outs[index].shape != shape:
        outs[index] = sum_to(outs[index], shape)
    if outs[index].dtype is not dtype:
        outs[index] = make_like(outs[index], dtype)


def sum_to(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """at::sum_to: one sum that keeps dimensions, then a view without the leading ones."""
    return t if t.shape == shape else make(shape, t.dtype, on_host=t.storage.on_host)


# --- recomputation: torch.utils.checkpoint in the form that is not reentrant. A call saves its inputs; the first of its
# saved tensors that a backward asks for runs it again, up to the last one that it saved.


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
