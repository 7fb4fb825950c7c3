"""Products of matrices, convolutions and triangular systems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from ulysses_cli.plan.sizes import views
from ulysses_cli.plan.sizes.autograd import Node, begin, finish
from ulysses_cli.plan.sizes.dtypes import DType
from ulysses_cli.plan.sizes.elementwise import add
from ulysses_cli.plan.sizes.tensor import (
    Shape,
    Tensor,
    UnknownOperator,
    find_view_steps,
    is_contiguous,
    list_steps,
    make,
    make_like,
)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """[..., n, k] x [..., k, m] without broadcasting: mm and bmm."""
    node = begin(_mm_backward, a, b)
    if node is not None:
        node.save(a if b._requires_grad else None, b if a._requires_grad else None)
        node.data = _is_column_major(a), _is_column_major(b)
    return finish(node, make((*a.shape[:-1], b.shape[-1]), a.dtype, on_host=a.storage.on_host))


def _mm_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    a, b = node.take()
    grad = grads[0]
    for_a = for_b = None
    if node.needs(1):
        for_b = _make_matrix((*a.shape[:-2], a.shape[-1], grad.shape[-1]), grad.dtype, node.data[1])
    if node.needs(0):
        for_a = _make_matrix((*grad.shape[:-1], b.shape[-2]), grad.dtype, node.data[0])
    return for_a, for_b


def _is_column_major(t: Tensor) -> bool:
    return t.ndim == 2 and t.steps is not None and t.steps == (1, t.shape[0])


def _make_matrix(shape: Shape, dtype: DType, is_column_major: bool) -> Tensor:
    """The gradient of a matrix lies in memory as the matrix does."""
    if not is_column_major:
        return make(shape, dtype)
    *lead, last = list_steps((*shape[:-2], shape[-1], shape[-2]))
    return make(shape, dtype, (*lead[:-1], last, lead[-1]))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """ATen/native/LinearAlgebra.cpp: _matmul_impl"""
    if a.ndim == 1 and b.ndim == 1:
        raise UnknownOperator("matmul of two vectors")
    if b.ndim == 1:
        return views.squeeze(matmul(a, views.unsqueeze(b, 1)), -1)
    if a.ndim == 1:
        return views.squeeze(matmul(views.unsqueeze(a, 0), b), -2)
    if a.ndim == 2 and b.ndim == 2:
        return mm(a, b)
    if b.ndim == 2 and _folds(a, b):
        rows = views.reshape(a, prod(a.shape[:-1]), a.shape[-1])
        return views.reshape(mm(rows, b), *a.shape[:-1], b.shape[-1])
    batch = views.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left = views.reshape(views.expand(a, *batch, *a.shape[-2:]), prod(batch), *a.shape[-2:])
    right = views.reshape(views.expand(b, *batch, *b.shape[-2:]), prod(batch), *b.shape[-2:])
    return views.reshape(mm(left, right), *batch, a.shape[-2], b.shape[-1])


def _folds(a: Tensor, b: Tensor) -> bool:
    """should_fold: the larger one requires a gradient, or is folded without a copy."""
    if b._requires_grad or a.ndim == 2:
        return True
    return not isinstance(find_view_steps(a, (prod(a.shape[:-1]), a.shape[-1])), bool)


def linear(t: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's own: with a bias one operator adds the product to it."""
    flipped = views.swap_last(weight)
    if bias is None:
        return matmul(t, flipped)
    if t.ndim == 2 or (t.ndim == 3 and is_contiguous(t)):
        rows = views.reshape(t, prod(t.shape[:-1]), t.shape[-1])
        return views.reshape(addmm(bias, rows, flipped), *t.shape[:-1], weight.shape[0])
    return add(matmul(t, flipped), bias)


def addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    node = begin(_addmm_backward, bias, a, b)
    if node is not None:
        node.save(a if b._requires_grad else None, b if a._requires_grad else None)
        node.data = _is_column_major(a), _is_column_major(b)
    return finish(node, make((a.shape[0], b.shape[1]), a.dtype, on_host=a.storage.on_host))


def _addmm_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    a, b = node.take()
    grad = grads[0]
    for_a = _make_matrix((grad.shape[0], b.shape[0]), grad.dtype, node.data[0]) if node.needs(1) else None
    for_b = _make_matrix((a.shape[1], grad.shape[1]), grad.dtype, node.data[1]) if node.needs(2) else None
    return grad if node.needs(0) else None, for_a, for_b


def einsum(equation: str, *operands: Any) -> Tensor:
    """Of two tensors, by one batched product (ATen/native/Linear.cpp: sumproduct_pair)."""
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], tuple | list) else operands
    left, _, wanted = equation.replace(" ", "").partition("->")
    names = left.split(",")
    if len(tensors) == 1:
        return permute_names(tensors[0], names[0], wanted)
    if len(tensors) != 2 or "." in left:
        raise UnknownOperator(f"einsum {equation}")
    (a, b), (own, other) = tensors, names
    batch = [n for n in wanted if n in own and n in other]
    rows = [n for n in own if n not in other and n in wanted]
    columns = [n for n in other if n not in own and n in wanted]
    inner = [n for n in own if n in other and n not in wanted]
    sizes = {**dict(zip(own, a.shape, strict=True)), **dict(zip(other, b.shape, strict=True))}

    def count(parts: list[str]) -> int:
        return prod(sizes[n] for n in parts)

    x = views.reshape(permute_names(a, own, [*batch, *rows, *inner]), count(batch), count(rows), count(inner))
    y = views.reshape(permute_names(b, other, [*batch, *inner, *columns]), count(batch), count(inner), count(columns))
    out = views.reshape(mm(x, y), *(sizes[n] for n in (*batch, *rows, *columns)))
    return permute_names(out, [*batch, *rows, *columns], wanted)


def permute_names(t: Tensor, names: Sequence[str], wanted: Sequence[str]) -> Tensor:
    order = [list(names).index(n) for n in wanted]
    return t if order == list(range(t.ndim)) else views.permute(t, order)


def convolve(t: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int], strides: Sequence[int]) -> Tensor:
    """conv1d and its kin, of [batch, channels, ...]."""
    node = begin(_convolve_backward, t, weight, bias)
    if node is not None:
        node.save(t, weight)
        node.data = None if bias is None else bias.shape
    spatial = [
        (size + 2 * around - kernel) // step + 1
        for size, kernel, around, step in zip(t.shape[2:], weight.shape[2:], padding, strides, strict=True)
    ]
    return finish(node, make((t.shape[0], weight.shape[0], *spatial), t.dtype, on_host=t.storage.on_host))


def _convolve_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    t, weight = node.take()
    return (
        make(t.shape, t.dtype) if node.needs(0) else None,
        make(weight.shape, weight.dtype) if node.needs(1) else None,
        make(node.data, weight.dtype) if node.data is not None and node.needs(2) else None,
    )


def conv(num_dims: int) -> Callable[..., Tensor]:
    """torch.nn.functional.conv1d and its kin"""

    def run(
        t: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:  # fmt: skip
        spread = [(value,) * num_dims if isinstance(value, int) else tuple(value) for value in (padding, stride)]
        return convolve(t, weight, bias, *spread)

    return run


def grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, **_: Any) -> Tensor:
    """torch._grouped_mm of [rows, k] x [groups, k, n]."""
    node = begin(_grouped_backward, a, b)
    if node is not None:
        node.save(a if b._requires_grad else None, b if a._requires_grad else None, offs)
        node.data = a.shape, b.shape, b.steps is not None and b.steps[-2] == 1
    return finish(node, make((a.shape[0], b.shape[-1]), a.dtype, on_host=a.storage.on_host))


def _grouped_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    node.take()
    a, b, is_column_major = node.data
    for_b = _make_matrix(b, grads[0].dtype, is_column_major) if node.needs(1) else None
    return make(a, grads[0].dtype) if node.needs(0) else None, for_b


def solve_triangular(a: Tensor, b: Tensor, **_: Any) -> Tensor:
    """torch.linalg.solve_triangular of batches of matrices"""
    node = begin(_solve_backward, a, b)
    out = make(b.shape, b.dtype, on_host=b.storage.on_host)
    if node is not None:
        node.save(a, out.detach())
    return finish(node, out)


def _solve_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    a, out = node.take()
    for_b = make(out.shape, out.dtype)
    for_a = None
    if node.needs(0):  # tril(-(grad @ result^T))
        for_a = make(a.shape, a.dtype)
        for_a = make_like(for_a)
        for_a = make_like(for_a)
    return for_a, for_b if node.needs(1) else None
