"""The names that code finds in torch: functions, methods of tensors, modules. A name that is not here has no sizes."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from functools import wraps
from math import inf, pi, prod
from typing import Any, ClassVar

from ulysses_cli.plan.sizes import autograd, elementwise, nn, selection, views
from ulysses_cli.plan.sizes import tensor as dtypes
from ulysses_cli.plan.sizes.autograd import checkpoint, grad_mode
from ulysses_cli.plan.sizes.tensor import (
    BOOL,
    FLOAT32,
    HOST,
    INT32,
    INT64,
    DType,
    Running,
    Tensor,
    TensorDevice,
    UnknownOperator,
    make,
    make_like,
)


class Unknown:
    """A name of which nothing is known. Files may decorate with it, inherit from it and annotate with it; a model that
    calls it while it runs is refused."""

    running = False

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **named: Any) -> Any:
        if Unknown.running:
            raise UnknownOperator(self.__name__)
        is_decorated = len(args) == 1 and not named and callable(args[0]) and not isinstance(args[0], Unknown)
        return args[0] if is_decorated else self

    def __getattr__(self, name: str) -> Unknown:
        if name.startswith(("__", "is_")):  # what files ask of any object
            raise AttributeError(name)
        return Unknown(f"{self.__name__}.{name}")

    def __getitem__(self, _: Any) -> Unknown:
        return self

    __or__ = __ror__ = __getitem__

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return ()

    def __enter__(self) -> Unknown:
        return self

    def __exit__(self, *_: object) -> None: ...


class Namespace(types.ModuleType):
    """A module of the stand-in."""

    def __init__(self, name: str, **names: Any) -> None:
        super().__init__(name)
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(f"{self.__name__}.{name}")


# --- new tensors ------------------------------------------------------------------------------------------------------


def _is_host(device: Any) -> bool:
    return (Running.device if device is None else TensorDevice(device)) == HOST


def create(
    *sizes: Any, dtype: DType | None = None, device: Any = None, requires_grad: bool = False, **_: Any
) -> Tensor:
    """empty, zeros, ones, rand, randn"""
    t = make(views.read_sizes(sizes), dtype or Running.dtype or FLOAT32, on_host=_is_host(device))
    return t.requires_grad_() if requires_grad else t


def full(size: Any, value: Any, *, dtype: DType | None = None, device: Any = None, **_: Any) -> Tensor:
    found = (
        dtype or (Running.dtype if isinstance(value, float) else None) or dtypes.DEFAULTS[dtypes.find_category(value)]
    )
    return make((size,) if isinstance(size, int) else tuple(size), found, on_host=_is_host(device))


def arange(*bounds: Any, dtype: DType | None = None, device: Any = None, **_: Any) -> Tensor:
    start, end, step = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    is_float = any(isinstance(b, float) for b in (start, end, step))
    count = max(0, -int(-(end - start) // step))
    return make((count,), dtype or ((Running.dtype or FLOAT32) if is_float else INT64), on_host=_is_host(device))


def linspace(start: Any, end: Any, steps: int, *, dtype: DType | None = None, device: Any = None, **_: Any) -> Tensor:
    return make((steps,), dtype or FLOAT32, on_host=_is_host(device))


def tensor(data: Any, *, dtype: DType | None = None, device: Any = None, **_: Any) -> Tensor:
    if isinstance(data, Tensor):
        return data.detach()
    shape, first = [], data
    while isinstance(first, list | tuple):
        shape.append(len(first))
        if not first:
            break
        first = first[0]
    first = 0.0 if isinstance(first, list | tuple | Tensor) else first
    found = (
        dtype or (Running.dtype if isinstance(first, float) else None) or dtypes.DEFAULTS[dtypes.find_category(first)]
    )
    return make(shape, found, on_host=_is_host(device))


def create_like(
    t: Tensor, *, dtype: DType | None = None, device: Any = None, memory_format: Any = None, **_: Any
) -> Tensor:
    if device is not None and (TensorDevice(device) == HOST) != t.storage.on_host:
        return make(t.shape, dtype or t.dtype, on_host=TensorDevice(device) == HOST)
    return (
        make(t.shape, dtype or t.dtype, on_host=t.storage.on_host)
        if memory_format == "contiguous"
        else make_like(t, dtype)
    )


def create_of(t: Tensor, *sizes: Any, dtype: DType | None = None, device: Any = None, **_: Any) -> Tensor:
    """Tensor.new_empty and its kin"""
    on_host = t.storage.on_host if device is None else TensorDevice(device) == HOST
    return make(views.read_sizes(sizes), dtype or t.dtype, on_host=on_host)


def new_full(t: Tensor, size: Any, value: Any, **named: Any) -> Tensor:
    return create_of(t, tuple(size), **named)


def histc(t: Tensor, bins: int = 100, **_: Any) -> Tensor:
    return make((bins,), t.dtype, on_host=t.storage.on_host)


def searchsorted(t: Tensor, values: Tensor, *, out_int32: bool = False, **_: Any) -> Tensor:
    return make(values.shape, INT32 if out_int32 else INT64, on_host=t.storage.on_host)


def read_value(t: Tensor) -> Any:
    """Tensor.item: the numbers of tensors without values are 1, their truth values False."""
    return False if t.dtype is BOOL else 1.0 if t.dtype.is_floating_point else 1


def refuse(name: str) -> Callable[..., Any]:
    def run(*_: Any, **__: Any) -> Any:
        raise UnknownOperator(f"{name}, whose result depends on data")

    return run


def checked_view(t: Tensor, *sizes: Any, **named: Any) -> Tensor:
    return views.view_as(t, *sizes)


def as_type(dtype: DType) -> Callable[..., Tensor]:
    return lambda t, *_, **__: elementwise.to(t, dtype)


def change_type(t: Tensor, dtype: Any = None, **_: Any) -> Tensor:
    return elementwise.to(t, dtype if isinstance(dtype, DType) else getattr(dtype, "dtype", FLOAT32))


class NoGrad:
    """A context and a decorator."""

    enabled = False

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self._function is not None:
            with grad_mode(self.enabled):
                return self._function(*args, **named)
        function = args[0]

        @wraps(function)
        def run(*args: Any, **named: Any) -> Any:
            with grad_mode(self.enabled):
                return function(*args, **named)

        return run

    def __enter__(self) -> None:
        self._before, Running.grad = Running.grad, self.enabled

    def __exit__(self, *_: object) -> None:
        Running.grad = self._before


class EnableGrad(NoGrad):
    enabled = True


class Nothing:
    """A context that changes nothing, as autocast does where it is off."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def __call__(self, function: Any) -> Any:
        return function


class CustomOperator:
    """torch.library.custom_op: its sizes are those of what is registered as its fake. `inside`: what it takes and gives
    back besides, by the operator's name."""

    found: ClassVar[dict[str, CustomOperator]] = {}
    inside: ClassVar[dict[str, Callable[..., int]]] = {}

    def __init__(self, name: str) -> None:
        self.name = name
        self._fake: Callable[..., Any] = refuse(f"{name} without a fake")
        CustomOperator.found[name] = self

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        self._fake = fake
        return fake

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., Any]) -> None:
        run = self._fake

        class Own(autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                out = run(*args)
                setup_context(ctx, args, out)
                return out

        Own.backward = staticmethod(backward)
        self._fake = Own.apply

    def __call__(self, *args: Any, **named: Any) -> Any:
        found = self._fake(*args, **named)
        if self.name in self.inside:
            Running.meter.add_temporary(self.inside[self.name](*args, **named))
        return found


def define_operator(name: str, function: Any = None, **_: Any) -> Any:
    """torch.library.custom_op, a function and a decorator."""
    return CustomOperator(name) if function is not None else lambda _: CustomOperator(name)


def pass_over(*_: Any, **__: Any) -> Any:
    """Registers nothing: a decorator, too."""
    return lambda function: function


class FloatInfo:
    def __init__(self, dtype: DType) -> None:
        self.max, self.eps, self.tiny = 3e38, 1e-3, 1e-38
        self.min = -self.max


class Size(tuple[int, ...]):
    def numel(self) -> int:
        return prod(self)


def run_backward(t: Tensor, gradient: Tensor | None = None, **_: Any) -> None:
    autograd.backward([t], [make(t.shape, t.dtype, on_host=t.storage.on_host) if gradient is None else gradient])


def compute_grads(outputs: Any, inputs: Any, grad_outputs: Any = None, **_: Any) -> tuple[Tensor | None, ...]:
    """torch.autograd.grad"""
    roots = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    given = [grad_outputs] if isinstance(grad_outputs, Tensor) else list(grad_outputs or [None] * len(roots))
    grads = [make(t.shape, t.dtype) if grad is None else grad for t, grad in zip(roots, given, strict=True)]
    del given, grad_outputs
    wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    return tuple(autograd.backward(roots, grads, wanted))


compare = elementwise.without_gradient(BOOL)
rounded = elementwise.without_gradient()
FUNCTIONS: dict[str, Callable[..., Any]] = {
    # one tensor
    "sigmoid": elementwise.sigmoid, "tanh": elementwise.tanh, "exp": elementwise.exp, "rsqrt": elementwise.rsqrt,
    "sqrt": elementwise.sqrt, "relu": elementwise.relu, "log": elementwise.log, "abs": elementwise.absolute,
    "sin": elementwise.sine, "cos": elementwise.cosine, "expm1": elementwise.expm1, "log1p": elementwise.log1p,
    "neg": elementwise.scale, "pow": elementwise.power, "clamp": elementwise.clamp, "clip": elementwise.clamp,
    "clamp_min": elementwise.clamp, "clamp_max": elementwise.clamp, "floor": rounded, "ceil": rounded, "round": rounded,
    "logical_not": compare, "bitwise_not": rounded, "isnan": compare, "isinf": compare, "isfinite": compare,
    # two
    "mul": elementwise.multiply, "multiply": elementwise.multiply, "div": elementwise.divide,
    "divide": elementwise.divide,
    "true_divide": elementwise.divide, "add": elementwise.add, "sub": elementwise.subtract,
    "maximum": elementwise.maximum,
    "minimum": elementwise.maximum, "where": elementwise.where,
    "masked_fill": elementwise.masked_fill, "greater": compare,
    "gt": compare, "lt": compare, "ge": compare, "le": compare, "eq": compare, "ne": compare, "logical_and": compare,
    "logical_or": compare, "floor_divide": rounded, "remainder": rounded, "bitwise_and": rounded,
    "bitwise_or": rounded,
    # sums
    "sum": selection.sum_over, "mean": selection.mean, "max": selection.largest, "min": selection.largest,
    "amax": selection.reduce_without_gradient(), "amin": selection.reduce_without_gradient(),
    "all": selection.reduce_without_gradient(BOOL), "any": selection.reduce_without_gradient(BOOL),
    "argmax": selection.reduce_without_gradient(INT64), "argmin": selection.reduce_without_gradient(INT64),
    "square": elementwise.square, "norm": selection.norm, "cumsum": selection.cumsum, "softmax": selection.softmax,
    "log_softmax": selection.softmax, "logsumexp": selection.logsumexp, "histc": histc,
    # indices
    "topk": selection.topk, "sort": selection.sort, "gather": selection.gather, "one_hot": selection.one_hot,
    "searchsorted": searchsorted,
    "nonzero": refuse("nonzero"), "unique": refuse("unique"), "masked_select": refuse("masked_select"),
    "bincount": refuse("bincount"),
    # views and copies
    "reshape": views.reshape, "flatten": views.flatten, "unflatten": views.unflatten, "transpose": views.transpose,
    "swapaxes": views.transpose, "permute": views.permute, "movedim": views.movedim, "unsqueeze": views.unsqueeze,
    "squeeze": views.squeeze, "split": views.split, "chunk": views.chunk, "unbind": views.unbind,
    "narrow": views.narrow, "clone": views.clone, "cat": selection.concatenate, "concat": selection.concatenate,
    "concatenate": selection.concatenate, "stack": selection.stack, "repeat_interleave": selection.repeat_interleave,
    "roll": selection.roll, "tril": selection.triangle, "triu": selection.triangle, "flip": selection.roll,
    "broadcast_tensors": views.broadcast_tensors, "t": views.swap_last,
    # products
    "logaddexp": rounded, "addmm": nn.addmm,
    "matmul": nn.matmul, "mm": nn.mm, "bmm": nn.mm, "einsum": nn.einsum,
    "_grouped_mm": nn.grouped_mm, "polar": elementwise.polar, "view_as_complex": elementwise.view_as_complex,
    "view_as_real": elementwise.view_as_real,
}  # fmt: skip
METHODS: dict[str, Callable[..., Any]] = {
    **{name: FUNCTIONS[name] for name in FUNCTIONS if name not in ("concat", "cat", "stack", "einsum", "where")},
    "to": elementwise.to, "type": change_type, "type_as": lambda t, other: elementwise.to(t, other.dtype),
    "float": as_type(FLOAT32), "double": as_type(dtypes.FLOAT64), "half": as_type(dtypes.FLOAT16),
    "bfloat16": as_type(dtypes.BFLOAT16), "int": as_type(INT32), "long": as_type(INT64), "bool": as_type(BOOL),
    "cpu": lambda t: elementwise.to(t, device="cpu"), "cuda": lambda t, *_, **__: elementwise.to(t, device="meta"),
    "view": checked_view, "view_as": lambda t, other: views.reshape(t, other.shape), "expand": views.expand,
    "expand_as": lambda t, other: views.expand(t, other.shape), "unfold": views.unfold, "repeat": selection.repeat,
    "contiguous": views.contiguous, "new_empty": create_of, "new_zeros": create_of, "new_ones": create_of,
    "new_full": new_full, "item": read_value, "tolist": refuse("tolist"), "numpy": refuse("numpy"),
    "backward": run_backward,
    "where": lambda t, condition, other: elementwise.where(condition, t, other),
    "__getitem__": selection.index, "__setitem__": selection.assign,
    "__add__": elementwise.add, "__radd__": elementwise.add, "__sub__": elementwise.subtract,
    "__rsub__": lambda t, other: elementwise.subtract(other, t), "__mul__": elementwise.multiply,
    "__rmul__": elementwise.multiply, "__truediv__": elementwise.divide,
    "__rtruediv__": lambda t, other: elementwise.divide(other, t), "__neg__": elementwise.scale,
    "__pow__": elementwise.power, "__rpow__": lambda t, other: elementwise.power(other, t),
    "__matmul__": nn.matmul, "__floordiv__": rounded, "__mod__": rounded, "__invert__": rounded,
    "__and__": rounded, "__or__": rounded, "__xor__": rounded, "__gt__": compare, "__lt__": compare,
    "__ge__": compare, "__le__": compare, "__eq__": compare, "__ne__": compare, "__abs__": elementwise.absolute,
    "copy_": elementwise.copy_into,
}  # fmt: skip
IN_PLACE = {
    "add": elementwise.add, "sub": elementwise.subtract, "mul": elementwise.multiply, "div": elementwise.divide,
    "clamp": elementwise.clamp, "masked_fill": elementwise.masked_fill, "exp": elementwise.exp, "log": elementwise.log,
    "pow": elementwise.power, "tanh": elementwise.tanh, "neg": elementwise.scale, "sigmoid": elementwise.sigmoid,
    "square": elementwise.square,
}  # fmt: skip
OVERWRITES = (
    "addcmul_", "addmm_",
    "zero_", "fill_", "normal_", "uniform_", "scatter_", "scatter_add_", "index_add_", "index_copy_", "index_put_",
    "log_normal_", "random_", "trunc_normal_", "__ior__", "__iand__",
)  # fmt: skip


def _add_methods() -> None:
    for name, method in METHODS.items():
        setattr(Tensor, name, method)
    for name, operator in IN_PLACE.items():
        setattr(Tensor, f"{name}_", elementwise.in_place(operator))
    for name, short in (("__iadd__", "add"), ("__isub__", "sub"), ("__imul__", "mul"), ("__itruediv__", "div")):
        setattr(Tensor, name, elementwise.in_place(IN_PLACE[short]))
    for name in OVERWRITES:
        setattr(Tensor, name, elementwise.overwrite)
    Tensor.mT = Tensor.T = property(views.swap_last)  # type: ignore[attr-defined]


_add_methods()


def make_torch() -> dict[str, Namespace]:
    """The modules of the stand-in by their names."""
    functional = Namespace(
        "torch.nn.functional", linear=lambda t, weight, bias=None: nn.Linear.compute(t, weight, bias),
        silu=elementwise.silu, gelu=elementwise.gelu, relu=elementwise.relu, sigmoid=elementwise.sigmoid,
        softplus=elementwise.softplus, softmax=selection.softmax, log_softmax=selection.softmax,
        dropout=selection.dropout, embedding=selection.embedding, pad=selection.pad, one_hot=selection.one_hot,
        layer_norm=selection.layer_norm, tanh=elementwise.tanh, cross_entropy=selection.cross_entropy,
        conv1d=nn.conv(1), conv2d=nn.conv(2),
        glu=lambda t, dim=-1: elementwise.multiply(*views.chunk(t, 2, dim)),
    )  # fmt: skip
    layers = {
        name: value for name, value in vars(nn).items() if isinstance(value, type) and issubclass(value, nn.SizedModule)
    }
    modules = Namespace(
        "torch.nn",
        **layers,
        functional=functional,
        Module=nn.SizedModule,
        Parameter=nn.Parameter,
        Buffer=nn.Buffer,
        init=Unknown("torch.nn.init"),
    )
    gradients = Namespace(
        "torch.autograd", Function=autograd.Function, grad=compute_grads,
        backward=lambda t, grad=None, **_: run_backward(t, grad),
        function=Namespace("torch.autograd.function", once_differentiable=lambda f: f, Function=autograd.Function),
        graph=Namespace("torch.autograd.graph", saved_tensors_hooks=autograd.SavedHooks),
    )  # fmt: skip
    linalg = Namespace("torch.linalg", vector_norm=selection.norm, solve_triangular=nn.solve_triangular)
    compiler = Namespace(
        "torch.compiler", is_compiling=lambda: False, disable=lambda f=None, **_: f if f is not None else (lambda g: g),
        is_exporting=lambda: False,
    )  # fmt: skip
    library = Namespace(
        "torch.library", custom_op=define_operator,
        register_autograd=pass_over, register_fake=pass_over, triton_op=define_operator, wrap_triton=lambda f: f,
    )  # fmt: skip
    utils = Namespace(
        "torch.utils", checkpoint=Namespace("torch.utils.checkpoint", checkpoint=checkpoint),
        flop_counter=Namespace("torch.utils.flop_counter", register_flop_formula=lambda *_: lambda f: f),
    )  # fmt: skip
    distributed = Namespace("torch.distributed", all_to_all_single=lambda *_, **__: None)
    torch = Namespace(
        "torch", library=library, utils=utils, distributed=distributed,
        **FUNCTIONS, **dtypes.BY_NAME, **{name: dtypes.ALIASES[name] for name in dtypes.ALIASES},
        Tensor=Tensor, dtype=DType, device=TensorDevice, Size=Size, inf=inf, pi=pi,
        **dict.fromkeys(
            ("LongTensor", "FloatTensor", "IntTensor", "BoolTensor", "HalfTensor", "BFloat16Tensor"), Tensor
        ),
        empty=create, zeros=create, ones=create, rand=create, randn=create, full=full, arange=arange,
        linspace=linspace, tensor=tensor, as_tensor=tensor,
        eye=lambda n, m=None, **named: create(n, m or n, **named),
        empty_like=create_like, zeros_like=create_like, ones_like=create_like, rand_like=create_like,
        randn_like=create_like, full_like=lambda t, _, **named: create_like(t, **named),
        no_grad=NoGrad, enable_grad=EnableGrad, inference_mode=NoGrad, is_grad_enabled=lambda: Running.grad,
        autocast=Nothing, is_autocast_enabled=lambda *_: False, finfo=FloatInfo,
        promote_types=dtypes.join, result_type=elementwise.find_dtype, is_tensor=lambda t: isinstance(t, Tensor),
        is_floating_point=lambda t: t.dtype.is_floating_point, contiguous_format=views.contiguous_format,
        preserve_format=views.preserve_format, nn=modules, autograd=gradients, compiler=compiler, linalg=linalg,
        get_rng_state=lambda: None, set_rng_state=lambda _: None,
        random=Namespace("torch.random", fork_rng=Nothing),
        get_default_dtype=lambda: Running.dtype or FLOAT32, are_deterministic_algorithms_enabled=lambda: False,
        __version__="2.13.0",
    )  # fmt: skip
    found = [
        torch, modules, functional, gradients, gradients.function, gradients.graph, linalg, compiler, library, utils,
        utils.checkpoint, utils.flop_counter, distributed,
    ]  # fmt: skip
    return {each.__name__: each for each in found}


Shapes = Sequence[int]
