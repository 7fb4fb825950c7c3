"""Operators that look at the same storage in another way, and those that copy because there is no such way."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ulysses_cli.plan.sizes.autograd import Node, begin, finish, finish_all
from ulysses_cli.plan.sizes.tensor import (
    DType,
    Shape,
    Tensor,
    find_view_steps,
    get_steps,
    is_contiguous,
    make,
    make_like,
    view,
)


def read_sizes(sizes: Sequence[Any]) -> Shape:
    """f(2, 3) and f((2, 3))"""
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else tuple(sizes)


def _infer(t: Tensor, shape: Shape) -> Shape:
    if -1 in shape:
        rest = prod(size for size in shape if size != -1)
        shape = tuple((t.numel() // rest if rest else 0) if size == -1 else size for size in shape)
    if prod(shape) != t.numel():
        raise ValueError(f"shape {list(shape)} is invalid for a tensor of {list(t.shape)}")
    return shape


def raw_reshape(t: Tensor, shape: Shape) -> Tensor:
    steps = find_view_steps(t, shape)
    if isinstance(steps, bool):
        return make(shape, t.dtype, on_host=t.storage.on_host)
    return view(t, shape, steps)


def _reshape_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    return (raw_reshape(grads[0], node.data),)


def reshape(t: Tensor, *sizes: Any) -> Tensor:
    shape = _infer(t, read_sizes(sizes))
    if isinstance(find_view_steps(t, shape), bool):
        t = clone(t, contiguous_format)
    node = begin(_reshape_backward, t)
    if node is not None:
        node.data = t.shape
    return finish(node, raw_reshape(t, shape))


def view_as(t: Tensor, *sizes: Any) -> Tensor:
    """Tensor.view, also as another type"""
    if len(sizes) == 1 and isinstance(sizes[0], DType):
        last = t.shape[-1] * t.dtype.itemsize // sizes[0].itemsize
        return Tensor((*t.shape[:-1], last), sizes[0], t.storage)
    return reshape(t, *sizes)


def flatten(t: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    if not t.shape:
        return reshape(t, 1)
    start, end = start_dim % t.ndim, end_dim % t.ndim
    return t if start == end else reshape(t, *t.shape[:start], prod(t.shape[start : end + 1]), *t.shape[end + 1 :])


def unflatten(t: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    dim %= t.ndim
    known = prod(size for size in sizes if size != -1)
    parts = tuple(t.shape[dim] // known if size == -1 else size for size in sizes)
    return reshape(t, *t.shape[:dim], *parts, *t.shape[dim + 1 :])


def raw_permute(t: Tensor, order: Sequence[int]) -> Tensor:
    steps = get_steps(t)
    return view(t, tuple(t.shape[dim] for dim in order), tuple(steps[dim] for dim in order))


def _permute_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    return (raw_permute(grads[0], node.data),)


def permute(t: Tensor, *order: Any) -> Tensor:
    dims = [dim % t.ndim for dim in read_sizes(order)]
    node = begin(_permute_backward, t)
    if node is not None:
        node.data = sorted(range(len(dims)), key=dims.__getitem__)
    return finish(node, raw_permute(t, dims))


def transpose(t: Tensor, a: int, b: int) -> Tensor:
    order = list(range(t.ndim))
    if order:
        order[a], order[b] = order[b], order[a]
    return permute(t, order)


def swap_last(t: Tensor) -> Tensor:
    """.t() and .mT"""
    return transpose(t, -2, -1) if t.ndim > 1 else t


def movedim(t: Tensor, source: int, destination: int) -> Tensor:
    order = [dim for dim in range(t.ndim) if dim != source % t.ndim]
    order.insert(destination % t.ndim, source % t.ndim)
    return permute(t, order)


def _restore_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    return (raw_reshape(grads[0], node.data),)


def unsqueeze(t: Tensor, dim: int) -> Tensor:
    dim %= t.ndim + 1
    node = begin(_restore_backward, t)
    if node is not None:
        node.data = t.shape
    steps = get_steps(t)
    step = t.shape[dim] * steps[dim] if dim < t.ndim else 1
    shape = (*t.shape[:dim], 1, *t.shape[dim:])
    return finish(node, view(t, shape, None if t.steps is None else (*steps[:dim], step, *steps[dim:])))


def squeeze(t: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    dims = range(t.ndim) if dim is None else [d % t.ndim for d in ((dim,) if isinstance(dim, int) else dim)]
    kept = [d for d in range(t.ndim) if d not in dims or t.shape[d] != 1]
    node = begin(_restore_backward, t)
    if node is not None:
        node.data = t.shape
    steps = get_steps(t)
    return finish(
        node, view(t, tuple(t.shape[d] for d in kept), None if t.steps is None else tuple(steps[d] for d in kept))
    )


def _expand_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    grad = grads[0]
    return (grad if grad.shape == node.data else make(node.data, grad.dtype, on_host=grad.storage.on_host),)


def expand(t: Tensor, *sizes: Any) -> Tensor:
    wanted = read_sizes(sizes)
    lead = len(wanted) - t.ndim
    shape = tuple(t.shape[d - lead] if size == -1 else size for d, size in enumerate(wanted))
    steps = (0,) * lead + tuple(
        step if own == size else 0 for step, own, size in zip(get_steps(t), t.shape, shape[lead:], strict=True)
    )
    node = begin(_expand_backward, t)
    if node is not None:
        node.data = t.shape
    return finish(node, view(t, shape, t.steps if shape == t.shape else steps))


def broadcast_shapes(*shapes: Shape) -> Shape:
    ndim = max(map(len, shapes), default=0)
    found = [1] * ndim
    for shape in shapes:
        for at, size in enumerate(shape, ndim - len(shape)):
            if size != 1:
                if found[at] not in (1, size):
                    raise ValueError(f"shapes {[list(each) for each in shapes]} cannot be broadcast")
                found[at] = size
    return tuple(found)


def broadcast_tensors(*tensors: Tensor) -> list[Tensor]:
    shape = broadcast_shapes(*(t.shape for t in tensors))
    return [expand(t, shape) for t in tensors]


# --- parts ------------------------------------------------------------------------------------------------------------


def _fill_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    """Zeros around a part's gradient."""
    return (make(node.data, grads[0].dtype, on_host=grads[0].storage.on_host),)


def narrow(t: Tensor, dim: int, start: int, length: int) -> Tensor:
    dim %= t.ndim
    node = begin(_fill_backward, t)
    if node is not None:
        node.data = t.shape
    return finish(node, cut(t, dim, length))


def cut(t: Tensor, dim: int, length: int, every: int = 1) -> Tensor:
    """A view of fewer elements of a dimension. Where it starts makes no difference."""
    shape, steps = list(t.shape), list(get_steps(t))
    if length == shape[dim] and every == 1:
        return view(t, t.shape, t.steps)
    shape[dim], steps[dim] = length, steps[dim] * every
    return view(t, tuple(shape), tuple(steps))


def select(t: Tensor, dim: int) -> Tensor:
    dim %= t.ndim
    node = begin(_fill_backward, t)
    if node is not None:
        node.data = t.shape
    steps = get_steps(t)
    return finish(node, view(t, (*t.shape[:dim], *t.shape[dim + 1 :]), (*steps[:dim], *steps[dim + 1 :])))


def _split_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    """Joins the parts' gradients; those of unused parts are zeros."""
    whole = next(grad for grad in grads if grad is not None)
    for index, (shape, _, on_host) in enumerate(node.results):
        if grads[index] is None:
            grads[index] = make(shape, whole.dtype, on_host=on_host)
    return (make(node.data, whole.dtype, on_host=whole.storage.on_host),)


def split(t: Tensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    dim %= t.ndim
    length = t.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, max(length, 1), sizes)]
    node = begin(_split_backward, t)
    if node is not None:
        node.data = t.shape
    return tuple(finish_all(node, [cut(t, dim, size) for size in sizes]))


def chunk(t: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    return split(t, max(1, -(-t.shape[dim] // chunks)), dim)


def unbind(t: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    dim %= t.ndim
    node = begin(_split_backward, t)
    if node is not None:
        node.data = t.shape
    steps, rest = get_steps(t), (*t.shape[:dim], *t.shape[dim + 1 :])
    parts = [view(t, rest, (*steps[:dim], *steps[dim + 1 :])) for _ in range(t.shape[dim])]
    return tuple(finish_all(node, parts))


def unfold(t: Tensor, dim: int, size: int, step: int) -> Tensor:
    dim %= t.ndim
    node = begin(_fill_backward, t)
    if node is not None:
        node.data = t.shape
    steps = get_steps(t)
    shape = (*t.shape[:dim], (t.shape[dim] - size) // step + 1, *t.shape[dim + 1 :], size)
    return finish(node, view(t, shape, (*steps[:dim], steps[dim] * step, *steps[dim + 1 :], steps[dim])))


# --- copies -----------------------------------------------------------------------------------------------------------

contiguous_format, preserve_format = "contiguous", "preserve"


def _pass_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    return (grads[0],)


def clone(t: Tensor, memory_format: str = preserve_format) -> Tensor:
    node = begin(_pass_backward, t)
    if memory_format == contiguous_format:
        return finish(node, make(t.shape, t.dtype, on_host=t.storage.on_host))
    return finish(node, make_like(t))


def contiguous(t: Tensor, memory_format: str = contiguous_format) -> Tensor:
    return t if is_contiguous(t) else clone(t, contiguous_format)


def is_packed(t: Tensor) -> bool:
    """Without holes and without elements that share memory."""
    if is_contiguous(t):
        return True
    steps = get_steps(t)
    order = sorted(range(t.ndim), key=lambda dim: steps[dim])
    size = 1
    for dim in order:
        if t.shape[dim] != 1 and steps[dim] != size:
            return False
        size *= t.shape[dim]
    return True
