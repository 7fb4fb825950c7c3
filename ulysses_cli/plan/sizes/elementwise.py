"""Operators whose result has an element for each element: what they allocate, what they save for the backward, and
what that allocates on its way (torch: derivatives.yaml, FunctionsManual.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ulysses_cli.plan.sizes import tensor, views
from ulysses_cli.plan.sizes.autograd import Node, begin, finish
from ulysses_cli.plan.sizes.tensor import (
    HOST,
    DType,
    Running,
    Tensor,
    TensorDevice,
    UnknownOperator,
    keep_order,
    make,
    make_like,
)

Saved = Callable[[Node, list[Any]], Sequence[Any]]


def find_dtype(*values: Any) -> DType:
    tensors = [v for v in values if isinstance(v, Tensor)]
    numbers = [v for v in values if not isinstance(v, Tensor) and v is not None]
    return tensor.find_result([(t.dtype, t.ndim) for t in tensors], numbers)


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
    return Tensor(t.shape, tensor.FLOAT32, t.storage, t.steps)


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
    held = [make_like(t, tensor.BOOL) for _ in range(node.data)]
    mask = combine(*held) if len(held) > 1 else held[0]
    return (_choose(mask, grads[0]),)


def to(t: Tensor, *args: Any, **named: Any) -> Tensor:
    """Tensor.to: another type, or another place."""
    dtype, device, copy = named.get("dtype"), named.get("device"), named.get("copy", False)
    for arg in args:
        if isinstance(arg, DType):
            dtype = arg
        elif isinstance(arg, Tensor):
            dtype, device = arg.dtype, arg.device
        elif isinstance(arg, TensorDevice | str):
            device = arg
    dtype = dtype or t.dtype
    on_host = t.storage.on_host if device is None else TensorDevice(device) == HOST
    if dtype is t.dtype and on_host == t.storage.on_host and not copy:
        return t
    node = begin(_cast_backward, t)
    if node is not None:
        node.data = t.dtype, t.storage.on_host
    steps = None if "memory_format" in named else keep_order([t], t.shape)
    return finish(node, make(t.shape, dtype, steps, on_host=on_host))


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
    return finish(node, combine(a, b))


def _multiply_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    a, b = node.take()
    grad = grads[0]
    for_b = combine(grad, a) if node.needs(1) else None
    for_a = combine(grad, b) if node.needs(0) else None
    return for_a, for_b


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
    return finish(
        node,
        combine(a, b, dtype=tensor.join(find_dtype(a, b), tensor.FLOAT16) if find_dtype(a, b).category < 2 else None),
    )


def _divide_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    a, b = node.take()
    grad = grads[0]
    for_a = for_b = None
    if node.needs(1):  # -grad * ((self / other) / other)
        negative = make_like(grad)
        once = combine(a, b)
        twice = combine(once, b)
        for_b = combine(negative, twice)
        del negative, once, twice
    if node.needs(0):
        for_a = combine(grad, b)
    return for_a, for_b


def _add_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    grad = grads[0]
    return grad, make_like(grad) if node.data and node.needs(1) else grad


def _sum_of(a: Any, b: Any, *, is_negative: bool) -> Tensor:
    if _is_number(b):
        return shift(a, b)
    if _is_number(a):
        return scale(b, a) if is_negative else shift(b, a)
    node = begin(_add_backward, a, b)
    if node is not None:
        node.data = is_negative
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
    found = [_share(a, b, grads[0]) if node.needs(at) else None for at in (1, 0)]
    return found[::-1]


def _share(a: Tensor, b: Tensor, grad: Tensor) -> Tensor:
    """where(a == b, grad / 2, grad), without the elements that lost"""
    half = make_like(grad)
    equal = combine(a, b, dtype=tensor.BOOL)
    found = combine(equal, half, grad, dtype=grad.dtype)
    lost = combine(a, b, dtype=tensor.BOOL)
    del lost
    return found


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
    found = [_choose(condition, grads[0]) if edge is not None else None for edge in reversed(node.edges)]
    return found[::-1]


def _choose(condition: Tensor, grad: Tensor) -> Tensor:
    """where(condition, grad, 0)"""
    zero = make((), grad.dtype, on_host=grad.storage.on_host)
    return combine(condition, grad, zero, dtype=grad.dtype)


def masked_fill(t: Tensor, mask: Tensor, value: Any) -> Tensor:
    node = begin(_masked_backward, t)
    if node is not None:
        node.save(mask)
    return finish(node, combine(t, mask, dtype=t.dtype))


def _masked_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    (mask,) = node.take()
    return (combine(grads[0], mask, dtype=grads[0].dtype),)


# --- in place ---------------------------------------------------------------------------------------------------------


def in_place(operator: Any) -> Callable[..., Tensor]:
    """`t.operator_(...)`: what the operator would make is not made. Where another tensor's gradient needs what stood in
    `t` before, that is copied first."""

    def run(t: Tensor, *args: Any, **named: Any) -> Tensor:
        original = t
        if operator in (multiply, divide) and Running.grad and isinstance(args[0], Tensor) and args[0]._requires_grad:
            original = make_like(t)
            original.node, original.index, original._requires_grad = t.node, t.index, t._requires_grad
        meter = Running.meter
        Running.meter = type(meter)()
        try:
            out = operator(original, *args, **named)
        finally:
            Running.meter = meter
        if out.node is not None and out is not t:
            t.node, t.index, t._requires_grad = out.node, out.index, True
            out.node.results = ((t.shape, t.dtype, t.storage.on_host),)
        return t

    return run


def overwrite(t: Tensor, *_: Any, **__: Any) -> Tensor:
    """Values change and nothing else."""
    return t


def copy_into(t: Tensor, other: Any, *_: Any, **__: Any) -> Tensor:
    """Tensor.copy_. Where `t` is a view, the whole tensor's gradient goes on without that part (copy_slice.cpp)."""
    if not isinstance(other, Tensor):
        return t
    if t.base is None:
        node = begin(_copy_backward, t, other)
        if node is not None:
            finish(node, t)
        return t
    base = t.base
    node = begin(_copy_slice_backward, base, other)
    if node is not None:
        node.data = t.shape, t.dtype
        finish(node, base)
    return t


def _copy_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    """Zeros for what was there before."""
    return make_like(grads[0]) if node.needs(0) else None, grads[0]


def _copy_slice_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    shape, dtype = node.data
    whole = make_like(grads[0])
    part = make(shape, dtype, on_host=whole.storage.on_host)
    before = make_like(part) if node.needs(0) else None
    del before
    return whole, part if node.needs(1) else None


# --- complex numbers --------------------------------------------------------------------------------------------------


def polar(absolute: Tensor, angle: Tensor) -> Tensor:
    return combine(absolute, angle, dtype=tensor.COMPLEX64)


def view_as_complex(t: Tensor) -> Tensor:
    node = begin(_real_backward, t)
    return finish(node, Tensor(t.shape[:-1], tensor.COMPLEX64, t.storage))


def view_as_real(t: Tensor) -> Tensor:
    node = begin(_complex_backward, t)
    return finish(node, Tensor((*t.shape, 2), tensor.FLOAT32, t.storage))


def _real_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    return (Tensor((*grads[0].shape, 2), tensor.FLOAT32, grads[0].storage),)


def _complex_backward(node: Node, grads: list[Any]) -> Sequence[Any]:
    return (Tensor(grads[0].shape[:-1], tensor.COMPLEX64, grads[0].storage),)
