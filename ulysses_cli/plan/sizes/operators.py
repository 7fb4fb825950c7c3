"""Operators that make new tensors: what they allocate, what they save for the backward, and what that allocates on its
way (torch: derivatives.yaml, FunctionsManual.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from ulysses_cli.plan.sizes import dtypes, views
from ulysses_cli.plan.sizes.autograd import Node, begin, finish, finish_all
from ulysses_cli.plan.sizes.dtypes import Device, DType
from ulysses_cli.plan.sizes.tensor import (
    HOST,
    Shape,
    State,
    Tensor,
    UnknownOperator,
    is_contiguous,
    keep_order,
    make,
    make_like,
)

Saved = Callable[[Node, list[Any]], Sequence[Any]]


def find_dtype(*values: Any) -> DType:
    tensors = [v for v in values if isinstance(v, Tensor)]
    numbers = [v for v in values if not isinstance(v, Tensor) and v is not None]
    return dtypes.find_result([(t.dtype, t.ndim) for t in tensors], numbers)


def combine(*tensors: Tensor, dtype: DType | None = None) -> Tensor:
    """A new tensor: the result of an elementwise operator."""
    first = tensors[0]
    dtype = dtype or find_dtype(*tensors)
    if all(t.shape == first.shape and t.steps is None for t in tensors):
        return make(first.shape, dtype, on_host=first.storage.on_host)
    shape = views.broadcast_shapes(*(t.shape for t in tensors))
    on_host = all(t.storage.on_host for t in tensors)
    return make(shape, dtype, keep_order(tensors, shape), on_host=on_host)


# --- elementwise, of one tensor ---------------------------------------------------------------------------------------

# C++ frees what a formula makes on its way when the formula ends, and so do these functions. The gradients of several
# inputs are computed in the order of torch's names for them: `other` before `self`.


def _times_saved(node: Node, grads: list[Any]) -> Sequence[Any]:
    """grad * saved, or a kernel of both."""
    (saved,) = node.take()
    return (combine(grads[0], saved, dtype=grads[0].dtype),)


def _through_chain(node: Node, grads: list[Any]) -> Sequence[Any]:
    """As _times_saved, behind a chain of `data` tensors of which each is made of the one before."""
    (saved,) = node.take()
    links = [saved]
    for _ in range(node.data):
        links.append(make_like(links[-1]))
    return (combine(grads[0], links[-1], dtype=grads[0].dtype),)


def _scaled_first(node: Node, grads: list[Any]) -> Sequence[Any]:
    """rsqrt: -0.5 * grad * result ** 3"""
    (saved,) = node.take()
    scaled = make_like(grads[0])
    power = make_like(saved)
    return (combine(scaled, power, dtype=grads[0].dtype),)


def save_input(run: Saved, data: Any = None) -> Callable[..., Tensor]:
    def operator(t: Tensor, *_: Any, **__: Any) -> Tensor:
        t = _make_float(t)
        node = begin(run, t)
        if node is not None:
            node.save(t)
            node.data = data
        return finish(node, make_like(t))

    return operator


def save_result(run: Saved, data: Any = None) -> Callable[..., Tensor]:
    def operator(t: Tensor, *_: Any, **__: Any) -> Tensor:
        t = _make_float(t)
        node = begin(run, t)
        out = make_like(t)
        if node is not None:
            node.save(out.detach())
            node.data = data
        return finish(node, out)

    return operator


def _make_float(t: Tensor) -> Tensor:
    """Functions of integers compute in float32; the operator casts as it reads."""
    if t.dtype.category >= 2:
        return t
    return Tensor(t.shape, dtypes.FLOAT32, t.storage, t.steps)


def _scale_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    return (make_like(grads[0]),)


def scale(t: Tensor, *numbers: Any, **_: Any) -> Tensor:
    """Times a number, or minus it: saves nothing."""
    node = begin(_scale_backward, t)
    return finish(node, make_like(t, find_dtype(t, *numbers)))


def shift(t: Tensor, number: Any = 0) -> Tensor:
    """Plus a number."""
    node = begin(views._pass_backward, t)
    return finish(node, make_like(t, find_dtype(t, number)))


def without_gradient(dtype: DType | None = None) -> Callable[..., Tensor]:
    """Of comparisons and of roundings."""

    def operator(t: Tensor, *others: Any, **_: Any) -> Tensor:
        tensors = [t, *(other for other in others if isinstance(other, Tensor))]
        return combine(*tensors, dtype=dtype or find_dtype(t, *others))

    return operator


sigmoid = save_result(_times_saved)
tanh = save_result(_times_saved)
exp = save_result(_times_saved)
rsqrt = save_result(_scaled_first)
sqrt = save_result(_through_chain, 1)  # grad / (2 * result)
silu = save_input(_times_saved)
gelu = save_input(_times_saved)
relu = save_result(_times_saved)
softplus = save_input(_times_saved)
log = save_input(_times_saved)
absolute = save_input(_through_chain, 1)
sine = save_input(_through_chain, 1)
cosine = save_input(_through_chain, 2)  # grad * -sin
expm1 = save_result(_through_chain, 1)
log1p = save_input(_through_chain, 1)


def power(t: Any, exponent: Any) -> Tensor:
    if not isinstance(t, Tensor):  # number ** tensor saves its result; grad * (result * log)
        return save_result(_through_chain, 1)(exponent)
    if isinstance(exponent, Tensor):
        raise UnknownOperator("a tensor to the power of a tensor")
    node = begin(_power_backward, t)
    if node is not None:
        node.save(t)
    return finish(node, make_like(t, find_dtype(t, exponent)))


def _power_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    """grad * (exponent * self ** (exponent - 1))"""
    (t,) = node.take()
    powered = make_like(t)
    scaled = make_like(powered)
    return (combine(grads[0], scaled),)


def square(t: Tensor) -> Tensor:
    return power(t, 2)


def clamp(t: Tensor, *bounds: Any, **named: Any) -> Tensor:
    node = begin(_clamp_backward, t)
    if node is not None:
        node.save(t)
        node.data = len([b for b in (*bounds, *named.values()) if b is not None])
    return finish(node, make_like(t))


def _clamp_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    """where(bounds hold, grad, 0)"""
    (t,) = node.take()
    held = [make_like(t, dtypes.BOOL) for _ in range(node.data)]
    mask = combine(*held) if len(held) > 1 else held[0]
    del held
    return (combine(mask, grads[0], dtype=grads[0].dtype),)


def to(t: Tensor, *args: Any, **named: Any) -> Tensor:
    """Tensor.to: another type, or another place."""
    dtype, device, copy = named.get("dtype"), named.get("device"), named.get("copy", False)
    for arg in args:
        if isinstance(arg, DType):
            dtype = arg
        elif isinstance(arg, Tensor):
            dtype, device = arg.dtype, arg.device
        elif isinstance(arg, Device | str):
            device = arg
    dtype = dtype or t.dtype
    on_host = t.storage.on_host if device is None else Device(device) == HOST
    if dtype is t.dtype and on_host == t.storage.on_host and not copy:
        return t
    node = begin(_cast_backward, t)
    if node is not None:
        node.data = t.dtype, t.storage.on_host
    return finish(node, make(t.shape, dtype, keep_order([t], t.shape), on_host=on_host))


def _cast_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    dtype, on_host = node.data
    grad = grads[0]
    if grad.dtype is dtype and grad.storage.on_host == on_host:
        return (grad,)
    return (make(grad.shape, dtype, keep_order([grad], grad.shape), on_host=on_host),)


# --- elementwise, of two tensors --------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor)


def multiply(a: Any, b: Any) -> Tensor:
    if _is_number(b):
        return scale(a, b)
    if _is_number(a):
        return scale(b, a)
    node = begin(_multiply_backward, a, b)
    if node is not None:
        node.save(a if b._requires_grad else None, b if a._requires_grad else None)
        node.data = a.dtype, b.dtype
    return finish(node, combine(a, b))


def _multiply_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    a, b = node.take()
    grad = grads[0]
    for_b = _to_type(combine(grad, a), node.data[1]) if node.needs(1) else None
    for_a = _to_type(combine(grad, b), node.data[0]) if node.needs(0) else None
    return for_a, for_b


def _to_type(t: Tensor, dtype: DType) -> Tensor:
    return t if t.dtype is dtype else make_like(t, dtype)


def divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Tensor:
    if rounding_mode is not None:
        return without_gradient()(*((a, b) if isinstance(a, Tensor) else (b, a)))
    if _is_number(b):
        return scale(_make_float(a), float(b))
    if _is_number(a):  # number / tensor: torch takes the reciprocal first
        node = begin(_scaled_first, b)
        out = make_like(_make_float(b))
        if node is not None:
            node.save(out.detach())
        return finish(node, out) if a == 1 else scale(finish(node, out), a)
    node = begin(_divide_backward, a, b)
    if node is not None:
        node.save(a if b._requires_grad else None, b)
        node.data = a.dtype, b.dtype
    return finish(node, combine(a, b, dtype=dtypes.join(find_dtype(a, b), dtypes.FLOAT16) if find_dtype(a, b).category < 2 else None))


def _divide_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    a, b = node.take()
    grad = grads[0]
    for_a = for_b = None
    if node.needs(1):  # -grad * ((self / other) / other)
        negative = make_like(grad)
        once = combine(a, b)
        twice = combine(once, b)
        for_b = _to_type(combine(negative, twice), node.data[1])
        del negative, once, twice
    if node.needs(0):
        for_a = _to_type(combine(grad, b), node.data[0])
    return for_a, for_b


def _add_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    grad, (types, is_negative) = grads[0], node.data
    second = _to_type(make_like(grad) if is_negative else grad, types[1]) if node.needs(1) else None
    return _to_type(grad, types[0]) if node.needs(0) else None, second


def _sum_of(a: Any, b: Any, *, is_negative: bool) -> Tensor:
    if _is_number(b):
        return shift(a, b)
    if _is_number(a):
        return scale(b, a) if is_negative else shift(b, a)
    node = begin(_add_backward, a, b)
    if node is not None:
        node.data = (a.dtype, b.dtype), is_negative
    return finish(node, combine(a, b))


def add(a: Any, b: Any, *, alpha: Any = 1) -> Tensor:
    return _sum_of(a, b, is_negative=False)


def subtract(a: Any, b: Any, *, alpha: Any = 1) -> Tensor:
    return _sum_of(a, b, is_negative=True)


def maximum(a: Tensor, b: Any) -> Tensor:
    node = begin(_maximum_backward, a, b)
    if node is not None:
        node.save(a, b)
    return finish(node, combine(a, b))


def _maximum_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    a, b = node.take()
    mask = combine(a, b, dtype=dtypes.BOOL)
    found = [combine(grads[0], mask, dtype=grads[0].dtype) if node.needs(at) else None for at in (1, 0)]
    return found[::-1]


def where(condition: Tensor, a: Any = None, b: Any = None) -> Tensor:
    if a is None:
        raise UnknownOperator("torch.where of a condition alone, whose result depends on data")
    tensors = [t if isinstance(t, Tensor) else None for t in (a, b)]
    node = begin(_where_backward, *tensors)
    if node is not None:
        node.save(condition)
    return finish(node, combine(condition, *(t for t in tensors if t is not None), dtype=find_dtype(a, b)))


def _where_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    (condition,) = node.take()
    return [combine(condition, grads[0], dtype=grads[0].dtype) if edge is not None else None for edge in node.edges]


def masked_fill(t: Tensor, mask: Tensor, value: Any) -> Tensor:
    node = begin(_where_backward, t)
    if node is not None:
        node.save(mask)
    return finish(node, combine(t, mask, dtype=t.dtype))


# --- in place ---------------------------------------------------------------------------------------------------------


def in_place(operator: Callable[..., Tensor], saves_result: bool = False) -> Callable[..., Tensor]:
    """`t.operator_(...)`: what the operator would make is not made."""

    def run(t: Tensor, *args: Any, **named: Any) -> Tensor:
        meter = State.meter
        before, State.meter = meter, type(meter)()
        try:
            out = operator(t, *args, **named)
        finally:
            State.meter = before
        if out.node is None:
            return t
        t.node, t.index, t._requires_grad = out.node, out.index, True
        out.node.results = ((t.shape, t.dtype, t.storage.on_host),)
        return t

    return run


def overwrite(t: Tensor, *_: Any, **__: Any) -> Tensor:
    """Values change and nothing else."""
    return t


def copy_into(t: Tensor, other: Any, *_: Any, **__: Any) -> Tensor:
    """Tensor.copy_: the gradient goes to what was copied."""
    if isinstance(other, Tensor) and State.grad and other._requires_grad:
        node = begin(_cast_backward, other)
        if node is not None:
            node.data = other.dtype, other.storage.on_host
            finish(node, t)
    return t


# --- sums -------------------------------------------------------------------------------------------------------------


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
    is_fused = State.acts_as_gpu and dtype is dtypes.FLOAT32 and t.dtype.itemsize == 2  # one kernel casts
    if dtype is not None and not is_fused:
        t = to(t, dtype)
    node = begin(_softmax_backward, t)
    out = make(t.shape, dtype or t.dtype, on_host=t.storage.on_host) if is_contiguous(t) else make_like(t, dtype)
    if node is not None:
        node.save(out.detach())
        node.data = t.dtype
    return finish(node, out)


def _softmax_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    (out,) = node.take()
    return (make_like(grads[0], node.data),)


def logsumexp(t: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    node = begin(_logsumexp_backward, t)
    if node is not None:
        node.save(t)
    if State.acts_as_gpu:  # all exponentials (ReduceOps.cpp: logsumexp_out_impl)
        State.meter.add_temporary(t.nbytes)
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
    return (zeros if State.acts_as_gpu else make_like(zeros),)


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
        node.save(index)
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
    return (zeros if State.acts_as_gpu else make_like(zeros),)


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
    if isinstance(value, Tensor) and State.grad and value._requires_grad:
        raise UnknownOperator("an assignment to a part of a tensor, with gradients")


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
        node.data = dim, [(t.shape[dim], t.dtype) for t in tensors]
    shape = list(first.shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    return finish(node, make(shape, find_dtype(*tensors), on_host=first.storage.on_host))


def _concatenate_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    dim, parts = node.data
    return [
        _to_type(views.cut(grads[0], dim, size), dtype) if edge is not None else None
        for edge, (size, dtype) in zip(node.edges, parts, strict=True)
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
    return finish(node, make([n * size for n, size in zip(counts, padded, strict=True)], t.dtype, on_host=t.storage.on_host))


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


# --- products ---------------------------------------------------------------------------------------------------------


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
    return make(shape, dtype, (1, shape[0]) if is_column_major else None)


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
    return not isinstance(views.find_view_steps(a, (prod(a.shape[:-1]), a.shape[-1])), bool)


def linear(t: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's own: with a bias one operator adds the product to it."""
    flipped = views.swap_last(weight)
    if bias is None:
        return matmul(t, flipped)
    if t.ndim == 2 or (t.ndim == 3 and is_contiguous(t)):
        rows = views.reshape(t, prod(t.shape[:-1]), t.shape[-1])
        return views.reshape(_addmm(bias, rows, flipped), *t.shape[:-1], weight.shape[0])
    return add(matmul(t, flipped), bias)


def _addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
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
        node.data = a.shape, b.shape
    return finish(node, make((a.shape[0], b.shape[-1]), a.dtype, on_host=a.storage.on_host))


def _grouped_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    node.take()
    a, b = node.data
    return (
        make(a, grads[0].dtype) if node.needs(0) else None,
        make(b, grads[0].dtype) if node.needs(1) else None,
    )


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
    for_a = make(a.shape, a.dtype) if node.needs(0) else None
    return for_a, for_b if node.needs(1) else None


# --- complex numbers --------------------------------------------------------------------------------------------------


def polar(absolute: Tensor, angle: Tensor) -> Tensor:
    return combine(absolute, angle, dtype=dtypes.COMPLEX64)


def view_as_complex(t: Tensor) -> Tensor:
    node = begin(_real_backward, t)
    return finish(node, Tensor(t.shape[:-1], dtypes.COMPLEX64, t.storage))


def view_as_real(t: Tensor) -> Tensor:
    node = begin(_complex_backward, t)
    return finish(node, Tensor((*t.shape, 2), dtypes.FLOAT32, t.storage))


def _real_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    return (Tensor((*grads[0].shape, 2), dtypes.FLOAT32, grads[0].storage),)


def _complex_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    return (Tensor(grads[0].shape[:-1], dtypes.COMPLEX64, grads[0].storage),)


# --- norms, dropout ---------------------------------------------------------------------------------------------------


def layer_norm(t: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
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
