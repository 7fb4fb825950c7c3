"""torch.nn on sizes: modules and the layers that models are made of, with the products of matrices, convolutions and
triangular systems that they compute. Holds no values; a layer that is not here has no sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any, ClassVar

from ulysses_cli.plan.sizes import elementwise, selection, views
from ulysses_cli.plan.sizes.autograd import Node, begin, finish
from ulysses_cli.plan.sizes.elementwise import add
from ulysses_cli.plan.sizes.tensor import (
    FLOAT32,
    HOST,
    DType,
    Running,
    Shape,
    Tensor,
    UnknownOperator,
    find_view_steps,
    is_contiguous,
    list_steps,
    make,
    make_like,
)


def _count_product(a: Tensor, b: Tensor) -> None:
    """[..., n, k] x [..., k, m]; of groups of rows, each with its own matrix."""
    if Running.product is not None:
        Running.product(a, b, a.numel() * b.shape[-1])


def mm(a: Tensor, b: Tensor) -> Tensor:
    """[..., n, k] x [..., k, m] without broadcasting: mm and bmm."""
    _count_product(a, b)
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
    _count_product(a, b)
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
    _count_product(a, b)
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


class Parameter(Tensor):
    """A weight. It may have attributes of its own."""

    def __init__(self, data: Tensor, requires_grad: bool = True) -> None:
        super().__init__(data.shape, data.dtype, data.storage, data.steps)
        self.requires_grad = requires_grad and (data.dtype.is_floating_point or data.dtype.is_complex)

    __hash__ = Tensor.__hash__


class Buffer(Tensor):
    def __init__(self, data: Tensor, persistent: bool = True) -> None:
        super().__init__(data.shape, data.dtype, data.storage, data.steps)

    __hash__ = Tensor.__hash__


class SizedModule:
    training = True
    does_work = True
    # What calls a module in place of its forward, where an engine has hooks around each.
    call: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None] = None
    # What is told of each parameter that is read.
    read: ClassVar[Callable[[Any], None] | None] = None

    def __init__(self, *_: Any, **__: Any) -> None:
        self.__dict__.setdefault("_parameters", {})
        self.__dict__.setdefault("_buffers", {})
        self.__dict__.setdefault("_modules", {})
        self.__dict__.setdefault("_pre_hooks", [])
        self.__dict__.setdefault("_after_hooks", [])

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if isinstance(value, Parameter):
            own.pop(name, None)
            own["_parameters"][name] = value
        elif isinstance(value, Buffer):
            own["_buffers"][name] = value
        elif isinstance(value, SizedModule):
            own.pop(name, None)
            own["_modules"][name] = value
        elif name in own.get("_parameters", ()):
            own["_parameters"][name] = value
        elif name in own.get("_modules", ()):
            own["_modules"][name] = value
        elif name in own.get("_buffers", ()):
            own["_buffers"][name] = value
        else:
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        parameters = own.get("_parameters", ())
        if name in parameters:
            found = parameters[name]
            if SizedModule.read is not None and found is not None:
                SizedModule.read(found)
            return found
        for kind in ("_modules", "_buffers"):
            if name in own.get(kind, ()):
                return own[kind][name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")

    def __delattr__(self, name: str) -> None:
        for kind in ("_parameters", "_modules", "_buffers"):
            if name in self.__dict__[kind]:
                del self.__dict__[kind][name]
                return
        object.__delattr__(self, name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        for hook, takes_named in self._pre_hooks:
            changed = hook(self, args, named) if takes_named else hook(self, args)
            if changed is not None:
                args, named = changed if takes_named else (changed, named)
        run = SizedModule.call
        out = self.forward(*args, **named) if run is None else run(self, args, named)
        for hook, takes_named in self._after_hooks:
            changed = hook(self, args, named, out) if takes_named else hook(self, args, out)
            out = out if changed is None else changed
        return out

    def forward(self, *args: Any, **named: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def register_buffer(self, name: str, value: Tensor | None, persistent: bool = True) -> None:
        self._buffers[name] = value

    def register_parameter(self, name: str, value: Parameter | None) -> None:
        self._parameters[name] = value

    def add_module(self, name: str, module: SizedModule | None) -> None:
        self._modules[name] = module

    register_module = add_module

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool = False, **_: Any) -> None:
        self._pre_hooks.append((hook, with_kwargs))

    def register_forward_hook(self, hook: Callable[..., Any], *, with_kwargs: bool = False, **_: Any) -> None:
        self._after_hooks.append((hook, with_kwargs))

    def children(self) -> Iterator[SizedModule]:
        return iter({id(module): module for module in self._modules.values() if module is not None}.values())

    def named_children(self) -> Iterator[tuple[str, SizedModule]]:
        seen: set[int] = set()
        for name, module in self._modules.items():
            if module is not None and id(module) not in seen:
                seen.add(id(module))
                yield name, module

    def modules(self) -> Iterator[SizedModule]:
        return (module for _, module in self.named_modules())

    def named_modules(self, memo: set[int] | None = None, prefix: str = "") -> Iterator[tuple[str, SizedModule]]:
        """But for those that do no work and are in another one."""
        memo, waiting = set() if memo is None else memo, [(prefix, self)]
        while waiting:
            path, module = waiting.pop()
            if id(module) not in memo:
                memo.add(id(module))
                yield path, module
                inner = [each for each in module._modules.items() if each[1] is not None and each[1].does_work]
                waiting += [(f"{path}.{name}" if path else name, each) for name, each in reversed(inner)]

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Parameter]]:
        seen: set[int] = set()
        for path, module in self.named_modules(prefix=prefix) if recurse else [(prefix, self)]:
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{path}.{name}" if path else name, parameter

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
        for path, module in self.named_modules(prefix=prefix) if recurse else [(prefix, self)]:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield f"{path}.{name}" if path else name, buffer

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        return (buffer for _, buffer in self.named_buffers(recurse=recurse))

    def get_submodule(self, path: str) -> SizedModule:
        module: Any = self
        for name in filter(None, path.split(".")):
            module = getattr(module, name)
        found: SizedModule = module
        return found

    def train(self, mode: bool = True) -> SizedModule:
        for module in self.modules():
            module.__dict__["training"] = mode
        return self

    def eval(self) -> SizedModule:
        return self.train(False)

    def requires_grad_(self, value: bool = True) -> SizedModule:
        for parameter in self.parameters():
            parameter.requires_grad = value
        return self

    def to(self, *_: Any, **__: Any) -> SizedModule:
        return self

    def apply(self, function: Callable[[SizedModule], Any]) -> SizedModule:
        for module in self.modules():
            function(module)
        return self


class ModuleList(SizedModule):
    def __init__(self, modules: Iterable[SizedModule] = ()) -> None:
        super().__init__()
        for module in modules:
            self.append(module)

    def append(self, module: SizedModule) -> ModuleList:
        self._modules[str(len(self._modules))] = module
        return self

    def extend(self, modules: Iterable[SizedModule]) -> ModuleList:
        for module in modules:
            self.append(module)
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, key: Any) -> Any:
        items = list(self._modules.values())
        return ModuleList(items[key]) if isinstance(key, slice) else items[key]


class Sequential(ModuleList):
    def __init__(self, *modules: SizedModule) -> None:
        super().__init__(modules)

    def forward(self, t: Any) -> Any:
        for module in self:
            t = module(t)
        return t


class ModuleDict(SizedModule):
    def __init__(self, modules: dict[str, SizedModule] | None = None) -> None:
        super().__init__()
        self._modules.update(modules or {})

    def __getitem__(self, key: str) -> Any:
        return self._modules[key]

    def __setitem__(self, key: str, module: SizedModule) -> None:
        self._modules[key] = module

    def __contains__(self, key: str) -> bool:
        return key in self._modules

    def keys(self) -> Any:
        return self._modules.keys()

    def values(self) -> Any:
        return self._modules.values()

    def items(self) -> Any:
        return self._modules.items()


class ParameterList(SizedModule):
    def __init__(self, items: Iterable[Tensor] = ()) -> None:
        super().__init__()
        for number, each in enumerate(items):
            self._parameters[str(number)] = each if isinstance(each, Parameter) else Parameter(each)

    def __getitem__(self, key: int) -> Any:
        return self._parameters[str(key)]


def _make_weight(*shape: int, dtype: DType | None = None) -> Parameter:
    return Parameter(make(shape, dtype or Running.dtype or FLOAT32, on_host=Running.device == HOST))


class Linear(SizedModule):
    compute: ClassVar[Callable[..., Tensor]] = staticmethod(linear)

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = _make_weight(out_features, in_features, dtype=dtype)
        self._parameters["bias"] = _make_weight(out_features, dtype=dtype) if bias else None

    def forward(self, t: Tensor) -> Tensor:
        return Linear.compute(t, self.weight, self.bias)


class Embedding(SizedModule):
    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, **_: Any) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.weight = _make_weight(num_embeddings, embedding_dim)

    def forward(self, ids: Tensor) -> Tensor:
        return selection.embedding(ids, self.weight)


class LayerNorm(SizedModule):
    def __init__(
        self, shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True, **_: Any
    ) -> None:
        super().__init__()
        self.normalized_shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self._parameters["weight"] = _make_weight(*self.normalized_shape) if elementwise_affine else None
        self._parameters["bias"] = _make_weight(*self.normalized_shape) if elementwise_affine and bias else None

    def forward(self, t: Tensor) -> Tensor:
        return selection.layer_norm(t, self.normalized_shape, self.weight, self.bias)


class Conv1d(SizedModule):
    """Also of more dimensions: sizes follow the same rule in each."""

    num_dims: ClassVar[int] = 1

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1, bias: bool = True, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.groups = groups
        self.dilation = dilation
        self.kernel_size, self.stride, self.padding = (self._spread(n) for n in (kernel_size, stride, padding))
        self.weight = _make_weight(out_channels, in_channels // groups, *self.kernel_size)
        self._parameters["bias"] = _make_weight(out_channels) if bias else None

    def _spread(self, value: Any) -> tuple[int, ...]:
        return tuple(value) if isinstance(value, tuple | list) else (value,) * self.num_dims

    def forward(self, t: Tensor) -> Tensor:
        return convolve(t, self.weight, self.bias, self.padding, self.stride)


class Conv2d(Conv1d):
    num_dims = 2


class Conv3d(Conv1d):
    num_dims = 3


class Dropout(SizedModule):
    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__()
        self.p = p

    def forward(self, t: Tensor) -> Tensor:
        return selection.dropout(t, self.p, self.training)


class Identity(SizedModule):
    def forward(self, t: Any, *_: Any, **__: Any) -> Any:
        return t


def activation(compute: Callable[..., Tensor]) -> type[SizedModule]:
    class Activation(SizedModule):
        def forward(self, t: Tensor) -> Tensor:
            return compute(t)

    return Activation


SiLU, GELU, ReLU = (activation(compute) for compute in (elementwise.silu, elementwise.gelu, elementwise.relu))
Sigmoid, Tanh, Softplus = (
    activation(compute) for compute in (elementwise.sigmoid, elementwise.tanh, elementwise.softplus)
)


class Flatten(SizedModule):
    def forward(self, t: Tensor) -> Tensor:
        return views.flatten(t, 1)
