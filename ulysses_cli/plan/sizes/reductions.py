"""Sums, means and norms, softmax, normalisation and dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ulysses_cli.plan.sizes import dtypes, views
from ulysses_cli.plan.sizes.autograd import Node, begin, finish
from ulysses_cli.plan.sizes.dtypes import DType
from ulysses_cli.plan.sizes.elementwise import Saved, _make_float, combine, to
from ulysses_cli.plan.sizes.tensor import (
    Running,
    Shape,
    Tensor,
    UnknownOperator,
    is_contiguous,
    make,
    make_like,
)


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
    return _reduce(t, dim, keepdim, dtype or (dtypes.INT64 if t.dtype.category < 2 else t.dtype), _sum_backward)


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
    kind = dtype or (dtypes.INT64 if t.dtype.category < 2 else t.dtype)
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
    kind = dtypes.FLOAT32 if t.dtype.itemsize < 4 else t.dtype
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
    out, mask = make_like(t), make_like(t, dtypes.BOOL)
    if node is not None:
        node.save(mask)
    return finish(node, out)


def _dropout_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    (mask,) = node.take()
    return (combine(grads[0], mask, dtype=grads[0].dtype),)
