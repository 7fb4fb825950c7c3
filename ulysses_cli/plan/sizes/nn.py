"""torch.nn on sizes: modules, and the layers that models are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from ulysses_cli.plan.sizes import elementwise, products, reductions, selection, views
from ulysses_cli.plan.sizes.dtypes import FLOAT32, HOST, DType
from ulysses_cli.plan.sizes.tensor import Running, Tensor, make


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
        return (module for _, module in self.named_children())

    def named_children(self) -> Iterator[tuple[str, SizedModule]]:
        seen: set[int] = set()
        for name, module in self._modules.items():
            if module is not None and id(module) not in seen:
                seen.add(id(module))
                yield name, module

    def modules(self) -> Iterator[SizedModule]:
        return (module for _, module in self.named_modules())

    def named_modules(self, memo: set[int] | None = None, prefix: str = "") -> Iterator[tuple[str, SizedModule]]:
        memo = set() if memo is None else memo
        if id(self) in memo:
            return
        memo.add(id(self))
        yield prefix, self
        for name, module in self._modules.items():
            if module is not None:
                yield from module.named_modules(memo, f"{prefix}.{name}" if prefix else name)

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
    compute: ClassVar[Callable[..., Tensor]] = staticmethod(products.linear)

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
        return reductions.layer_norm(t, self.normalized_shape, self.weight, self.bias)


class Conv1d(SizedModule):
    """Also of more dimensions: sizes follow the same rule in each."""

    num_dims: ClassVar[int] = 1

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1, bias: bool = True, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_channels, self.out_channels, self.groups, self.dilation = in_channels, out_channels, groups, dilation
        self.kernel_size, self.stride, self.padding = (self._spread(n) for n in (kernel_size, stride, padding))
        self.weight = _make_weight(out_channels, in_channels // groups, *self.kernel_size)
        self._parameters["bias"] = _make_weight(out_channels) if bias else None

    def _spread(self, value: Any) -> tuple[int, ...]:
        return tuple(value) if isinstance(value, tuple | list) else (value,) * self.num_dims

    def forward(self, t: Tensor) -> Tensor:
        return products.convolve(t, self.weight, self.bias, self.padding, self.stride)


class Conv2d(Conv1d):
    num_dims = 2


class Conv3d(Conv1d):
    num_dims = 3


class Dropout(SizedModule):
    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__()
        self.p = p

    def forward(self, t: Tensor) -> Tensor:
        return reductions.dropout(t, self.p, self.training)


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
