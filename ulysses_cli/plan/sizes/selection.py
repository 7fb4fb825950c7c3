"""Operators that reduce a dim (sums, means, norms, softmax, normalisation, dropout), and those that pick elements by
index, join tensors or repeat them. Each allocates, saves and frees what torch's does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ulysses_cli.plan.sizes import tensor, views
from ulysses_cli.plan.sizes.autograd import Node, begin, finish, finish_all
from ulysses_cli.plan.sizes.elementwise import (
    Saved,
    _make_float,
    _scale_backward,
    combine,
    copy_into,
    find_dtype,
    maximum,
    to,
)
from ulysses_cli.plan.sizes.tensor import DType, Running, Shape, Tensor, UnknownOperator, is_contiguous, make, make_like


def _read_dims(t: Tensor, dim: Any) -> list[int]:
    if dim is None or dim == ():
        return list(range(t.ndim))
    return [d % t.ndim for d in ((dim,) if isinstance(dim, int) else dim)] if t.ndim else []


def reduce_shape(t: Tensor, dim: Any, keepdim: bool) -> Shape:
    dims = _read_dims(t, dim)
    if keepdim:
        return tuple(1 if d in dims else size for d, size in enumerate(t.shape))
    return tuple(size for d, size in enumerate(t.shape) if d not in dims)


def _sum_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    """Expands the gradient, which stays a view."""
    shape, dtype, kept = node.data
    grad = grads[0]
    whole = views.expand(views.raw_reshape(grad, kept), shape)
    return (whole if grad.dtype is dtype else make_like(whole, dtype),)


def _mean_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    (whole,) = _sum_backward(node, grads)
    return (make_like(whole),)


def sum_over(t: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: DType | None = None) -> Tensor:
    return _reduce(t, dim, keepdim, dtype or (tensor.INT64 if t.dtype.category < 2 else t.dtype), _sum_backward)


def mean(t: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: DType | None = None) -> Tensor:
    return _reduce(t, dim, keepdim, dtype or t.dtype, _mean_backward)


def _reduce(t: Tensor, dim: Any, keepdim: bool, dtype: DType, run: Saved) -> Tensor:
    node = begin(run, t)
    if node is not None:
        node.data = t.shape, t.dtype, reduce_shape(t, dim, True)
    return finish(node, make(reduce_shape(t, dim, keepdim), dtype, on_host=t.storage.on_host))


def reduce_without_gradient(dtype: DType | None = None) -> Callable[..., Tensor]:
    def operator(t: Tensor, dim: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
        return make(reduce_shape(t, dim, keepdim), dtype or t.dtype, on_host=t.storage.on_host)

    return operator


def norm(t: Tensor, *args: Any, dim: Any = None, keepdim: bool = False, dtype: DType | None = None) -> Tensor:
    dim = args[1] if len(args) > 1 else dim
    node = begin(_norm_backward, t)
    out = make(reduce_shape(t, dim, keepdim), dtype or t.dtype, on_host=t.storage.on_host)
    if node is not None:
        node.save(t, out.detach())
        node.data = reduce_shape(t, dim, True)
    return finish(node, out)


def _norm_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    """self * (grad / norm), zero where the norm is"""
    t, _ = node.take()
    small = make(node.data, t.dtype)
    return (combine(t, small),)


def cumsum(t: Tensor, dim: int = 0, *, dtype: DType | None = None) -> Tensor:
    kind = dtype or (tensor.INT64 if t.dtype.category < 2 else t.dtype)
    node = begin(_cumsum_backward, t)
    return finish(node, make_like(t, kind))


def _cumsum_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    flipped = make_like(grads[0])
    summed = make_like(flipped)
    return (make_like(summed),)


def softmax(t: Tensor, dim: int = -1, _: Any = None, *, dtype: DType | None = None, **__: Any) -> Tensor:
    t = _make_float(t)
    if dtype is not None:
        t = to(t, dtype)
    node = begin(_softmax_backward, t)
    out = make(t.shape, dtype or t.dtype, on_host=t.storage.on_host) if is_contiguous(t) else make_like(t, dtype)
    if node is not None:
        node.save(out.detach())
        node.data = t.dtype
    return finish(node, out)


def _softmax_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    node.take()
    return (make_like(grads[0], node.data),)


def cross_entropy(t: Tensor, labels: Tensor, *, reduction: str = "mean", **_: Any) -> Tensor:
    """torch.nn.functional.cross_entropy of [N, classes]: log_softmax, then nll_loss"""
    if reduction != "none":
        raise UnknownOperator(f"cross_entropy with reduction {reduction}")
    chosen = softmax(t, -1)
    node = begin(_nll_backward, chosen)
    out = make(labels.shape, t.dtype, on_host=t.storage.on_host)
    total = make((), t.dtype, on_host=t.storage.on_host)
    if node is not None:
        node.save(chosen, labels, total)
    return finish(node, out)


def _nll_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    chosen, *_ = node.take()
    return (make_like(chosen),)


def logsumexp(t: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    node = begin(_logsumexp_backward, t)
    if node is not None:
        node.save(t)
    if Running.sees_kernels:  # all exponentials (ReduceOps.cpp: logsumexp_out_impl)
        Running.meter.add_temporary(t.nbytes)
    out = make(reduce_shape(t, dim, keepdim), t.dtype, on_host=t.storage.on_host)
    if node is not None:
        node.save(out.detach())
    return finish(node, out)


def _logsumexp_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    """grad * (self - result).exp()"""
    t, _ = node.take()
    shifted = make_like(t)
    exponential = make_like(shifted)
    return (combine(exponential, shifted),)


def layer_norm(
    t: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    node = begin(_layer_norm_backward, t, weight, bias)
    dims = 1 if isinstance(shape, int) else len(shape)
    lead = (*t.shape[:-dims], *(1,) * dims)
    out = make(t.shape, t.dtype, on_host=t.storage.on_host)
    kind = tensor.FLOAT32 if t.dtype.itemsize < 4 else t.dtype
    centre, spread = make(lead, kind), make(lead, kind)
    if node is not None:
        node.save(t, centre, spread, weight)
        node.data = [None if p is None else (p.shape, p.dtype) for p in (weight, bias)]
    return finish(node, out)


def _layer_norm_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    t, *_ = node.take()
    found = [make(t.shape, t.dtype) if node.needs(0) else None]
    for at, part in enumerate(node.data, 1):
        found.append(make(*part) if part is not None and node.needs(at) else None)
    return found


def dropout(t: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """With a mask of one byte per element, as on a GPU (native_dropout)."""
    if not p or not training:
        return t
    node = begin(_dropout_backward, t)
    out, mask = make_like(t), make_like(t, tensor.BOOL)
    if node is not None:
        node.save(mask)
    return finish(node, out)


def _dropout_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    (mask,) = node.take()
    return (combine(grads[0], mask, dtype=grads[0].dtype),)


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
    indices = make(shape, tensor.INT64, on_host=t.storage.on_host)
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
            if k.dtype is tensor.BOOL:
                raise UnknownOperator("a mask as an index, whose result depends on data")
            chosen.append(k)
            dims.append(dim)
            dim += 1
        elif isinstance(k, list | tuple):
            chosen.append(make((len(k),), tensor.INT64, on_host=True))
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
    return make((*t.shape, num_classes), tensor.INT64, on_host=t.storage.on_host)


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
