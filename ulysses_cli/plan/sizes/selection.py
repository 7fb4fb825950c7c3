"""Operators that pick elements by index, and those that join or repeat tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ulysses_cli.plan.sizes import dtypes, views
from ulysses_cli.plan.sizes.autograd import Node, begin, finish, finish_all
from ulysses_cli.plan.sizes.elementwise import _scale_backward, copy_into, find_dtype, maximum
from ulysses_cli.plan.sizes.reductions import reduce_shape
from ulysses_cli.plan.sizes.tensor import (
    Running,
    Shape,
    Tensor,
    UnknownOperator,
    make,
    make_like,
)

# --- indices ----------------------------------------------------------------------------------------------------------


def topk(t: Tensor, k: int, dim: int = -1, **_: Any) -> Sequence[Tensor]:
    shape = list(t.shape)
    shape[dim] = k
    return _select_values(t, tuple(shape), dim)


def sort(t: Tensor, dim: int = -1, **_: Any) -> Sequence[Tensor]:
    return _select_values(t, t.shape, dim)


def _select_values(t: Tensor, shape: Shape, dim: int) -> Sequence[Tensor]:
    node = begin(_select_backward, t)
    values = make(shape, t.dtype, on_host=t.storage.on_host)
    indices = make(shape, dtypes.INT64, on_host=t.storage.on_host)
    if node is not None:
        node.save(indices)
        node.data = t.shape
    finish_all(node, [values, indices])
    return Selected((values, indices))


class Selected(tuple[Tensor, Tensor]):
    """Values and where they stood."""

    values = property(lambda self: self[0])
    indices = property(lambda self: self[1])


def _select_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    """zeros, into which a gradient is written"""
    node.take()
    zeros = make(node.data, grads[0].dtype)
    return (make_like(zeros),)


def largest(t: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    """Tensor.max and .min"""
    if dim is None:
        return make((), t.dtype, on_host=t.storage.on_host)
    if isinstance(dim, Tensor):
        return maximum(t, dim)
    return _select_values(t, reduce_shape(t, dim, keepdim), dim)


def gather(t: Tensor, dim: int, index: Tensor, **_: Any) -> Tensor:
    node = begin(_select_backward, t)
    if node is not None:
        node.save(t, index)
        node.data = t.shape
    return finish(node, make(index.shape, t.dtype, on_host=t.storage.on_host))


def take_rows(t: Tensor, indices: tuple[Any, ...], dims: Sequence[int]) -> Tensor:
    """t[..., index, ...] with tensors as indices of neighbouring dimensions."""
    shape = views.broadcast_shapes(*(index.shape for index in indices))
    node = begin(_take_backward, t)
    if node is not None:
        node.save(*indices)
        node.data = t.shape
    whole = (*t.shape[: dims[0]], *shape, *t.shape[dims[-1] + 1 :])
    return finish(node, make(whole, t.dtype, on_host=t.storage.on_host))


def _take_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    """zeros, to which a gradient is added at the indices"""
    node.take()
    zeros = make(node.data, grads[0].dtype)
    return (make_like(zeros),)


def index(t: Tensor, key: Any) -> Tensor:
    """t[key]"""
    keys = list(key) if isinstance(key, tuple) else [key]
    used = sum(1 for k in keys if k is not None and k is not Ellipsis)
    if Ellipsis in [k if k is Ellipsis else 0 for k in keys]:
        at = next(i for i, k in enumerate(keys) if k is Ellipsis)
        keys[at : at + 1] = [slice(None)] * (t.ndim - used)
    chosen: list[Tensor] = []
    dims: list[int] = []
    dim = 0
    for k in keys:
        if k is None:
            t = views.unsqueeze(t, dim)
            dim += 1
        elif isinstance(k, slice):
            every = k.step or 1
            length = len(range(*k.indices(t.shape[dim])))
            if length != t.shape[dim] or every != 1:
                t = _slice(t, dim, length, every)
            dim += 1
        elif isinstance(k, Tensor) and k.ndim:
            if k.dtype is dtypes.BOOL:
                raise UnknownOperator("a mask as an index, whose result depends on data")
            chosen.append(k)
            dims.append(dim)
            dim += 1
        elif isinstance(k, list | tuple):
            chosen.append(make((len(k),), dtypes.INT64, on_host=True))
            dims.append(dim)
            dim += 1
        else:
            t = views.select(t, dim)
    if not chosen:
        return t
    if dims != list(range(dims[0], dims[-1] + 1)):
        raise UnknownOperator("indices of dimensions that are no neighbours")
    return take_rows(t, tuple(chosen), dims)


def _slice(t: Tensor, dim: int, length: int, every: int) -> Tensor:
    node = begin(views._fill_backward, t)
    if node is not None:
        node.data = t.shape
    return finish(node, views.cut(t, dim, length, every))


def assign(t: Tensor, key: Any, value: Any) -> None:
    """t[key] = value"""
    if not isinstance(value, Tensor) or not Running.grad or not (value._requires_grad or t._requires_grad):
        return
    part = index(t, key)
    if part.storage is not t.storage:
        raise UnknownOperator("an assignment by indices, with gradients")
    part.base = t if t.base is None else t.base
    copy_into(part, value)


def embedding(ids: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    """torch.nn.functional.embedding"""
    node = begin(_embedding_backward, weight)
    if node is not None:
        node.save(ids)
        node.data = weight.shape
    return finish(node, make((*ids.shape, weight.shape[1]), weight.dtype, on_host=weight.storage.on_host))


def _embedding_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    node.take()
    return (make(node.data, grads[0].dtype),)


def one_hot(t: Tensor, num_classes: int) -> Tensor:
    return make((*t.shape, num_classes), dtypes.INT64, on_host=t.storage.on_host)


# --- joins ------------------------------------------------------------------------------------------------------------


def concatenate(tensors: Sequence[Tensor], dim: int = 0, **_: Any) -> Tensor:
    tensors = [t for t in tensors if t.shape != (0,)]
    first = tensors[0]
    dim %= first.ndim
    node = begin(_concatenate_backward, *tensors)
    if node is not None:
        node.data = dim, [t.shape[dim] for t in tensors]
    shape = list(first.shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    return finish(node, make(shape, find_dtype(*tensors), on_host=first.storage.on_host))


def _concatenate_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    dim, parts = node.data
    return [
        views.cut(grads[0], dim, size) if edge is not None else None
        for edge, size in zip(node.edges, parts, strict=True)
    ]


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    first = tensors[0]
    dim %= first.ndim + 1
    node = begin(_stack_backward, *tensors)
    if node is not None:
        node.data = dim
    shape = (*first.shape[:dim], len(tensors), *first.shape[dim:])
    return finish(node, make(shape, find_dtype(*tensors), on_host=first.storage.on_host))


def _stack_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    return [views.select(grads[0], node.data) if edge is not None else None for edge in node.edges]


def repeat(t: Tensor, *counts: Any) -> Tensor:
    counts = views.read_sizes(counts)
    padded = (1,) * (len(counts) - t.ndim) + t.shape
    node = begin(_repeat_backward, t)
    if node is not None:
        node.data = t.shape
    return finish(
        node, make([n * size for n, size in zip(counts, padded, strict=True)], t.dtype, on_host=t.storage.on_host)
    )


def _repeat_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    return (make(node.data, grads[0].dtype),)


def repeat_interleave(t: Tensor, repeats: Any, dim: int | None = None, **_: Any) -> Tensor:
    """With a number: expand, clone, flatten (ATen/native/Repeat.cpp)."""
    if isinstance(repeats, Tensor):
        raise UnknownOperator("repeat_interleave by a tensor, whose result depends on data")
    dim = 0 if dim is None else dim % t.ndim
    wide = views.unsqueeze(t, dim + 1)
    wide = views.expand(wide, *t.shape[: dim + 1], repeats, *t.shape[dim + 1 :])
    return views.flatten(views.clone(wide, views.contiguous_format), dim, dim + 1)


def pad(t: Tensor, widths: Sequence[int], *_: Any, **__: Any) -> Tensor:
    shape = list(t.shape)
    for at in range(len(widths) // 2):
        shape[-1 - at] += widths[2 * at] + widths[2 * at + 1]
    node = begin(_pad_backward, t)
    if node is not None:
        node.data = t.shape
    return finish(node, make(shape, t.dtype, on_host=t.storage.on_host))


def _pad_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    return (make(node.data, grads[0].dtype),)


def roll(t: Tensor, *_: Any, **__: Any) -> Tensor:
    node = begin(_scale_backward, t)
    return finish(node, make_like(t))


def triangle(t: Tensor, *_: Any, **__: Any) -> Tensor:
    """tril, triu"""
    node = begin(_scale_backward, t)
    return finish(node, make(t.shape, t.dtype, on_host=t.storage.on_host))
