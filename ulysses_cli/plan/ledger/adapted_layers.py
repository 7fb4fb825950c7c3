"""Layers of libraries, on sizes: bitsandbytes' linear layers in 4 or 8 bits (autograd/_functions.py, functional.py),
and peft's with LoRA or DoRA (tuners/lora/layer.py, dora.py), also of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ulysses_cli.plan.recipe.sections import Lora
from ulysses_cli.plan.sizes import nn, selection
from ulysses_cli.plan.sizes.autograd import Function
from ulysses_cli.plan.sizes.nn import Buffer, Dropout, Identity, Linear, ModuleDict, Parameter, SizedModule
from ulysses_cli.plan.sizes.tensor import FLOAT16, FLOAT32, INT8, INT32, UINT8, Tensor, make
from ulysses_cli.plan.sizes.views import raw_reshape

BLOCK, SCALE_BLOCK = 64, 256  # weights that share a scale, scales that share one of their own
NUM_CODES, NUM_SCALE_CODES = 16, 256


def quantize_layers(model: Any, kind: str) -> None:
    """As train/model/adapters.py: every linear layer but the head."""
    head = model.get_output_embeddings()
    for path, layer in list(model.named_modules()):
        if type(layer) is Linear and layer is not head:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, (LinearInt8 if kind == "int8" else LinearNf4)(layer))


class QuantizedLinear(Linear):
    """`weight` holds codes."""

    multiply: type[Function]

    def __init__(self, layer: Linear, codes: Tensor, **scales: Tensor) -> None:
        SizedModule.__init__(self)
        self.in_features, self.out_features, self.dtype = layer.in_features, layer.out_features, layer.weight.dtype
        self.weight, self._parameters["bias"] = Parameter(codes, requires_grad=False), layer.bias
        for name, scale in scales.items():
            setattr(self, name, Buffer(scale))

    def restore(self) -> Tensor:
        return make((self.out_features, self.in_features), self.dtype)

    def forward(self, t: Tensor) -> Tensor:
        product: Tensor = self.multiply.apply(t, self)
        return product


class MultiplyNf4(Function):
    """For many tokens: scales and weight are restored, then multiplied."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, layer: LinearNf4) -> Tensor:
        ctx.layer = layer
        scales = layer.restore_scales()
        product = nn.linear(t, layer.restore(), layer.bias)
        del scales
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        scales = ctx.layer.restore_scales()
        weight = ctx.layer.restore()
        del scales
        return nn.matmul(grad, weight), None


class MultiplyInt8(Function):
    """The product's sums are 32-bit whole numbers; they are scaled to float16, then cast."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, layer: LinearInt8) -> Tensor:
        ctx.layer = layer
        half = t if t.dtype is FLOAT16 else make(t.shape, FLOAT16)
        codes, scales = make(t.shape, INT8), make(t.shape[:-1], FLOAT32)
        del half
        sums = make((*t.shape[:-1], layer.out_features), INT32)
        half = make(sums.shape, FLOAT16)
        product = half if layer.dtype is FLOAT16 else make(sums.shape, layer.dtype)
        del codes, scales, sums
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        weight, scales = ctx.layer.restore(), make((ctx.layer.out_features,), FLOAT32)
        del scales
        rows = raw_reshape(grad, (grad.numel() // grad.shape[-1], grad.shape[-1]))
        product = nn.matmul(rows, weight)
        return raw_reshape(product, (*grad.shape[:-1], weight.shape[1])), None


class LinearNf4(QuantizedLinear):
    multiply = MultiplyNf4

    def __init__(self, layer: Linear) -> None:
        num_scales = -(-layer.weight.numel() // BLOCK)
        super().__init__(
            layer,
            make((-(-layer.weight.numel() // 2), 1), UINT8),
            scales=make((num_scales,), UINT8),
            code_table=make((NUM_CODES,), FLOAT32),
            outer_scales=make((-(-num_scales // SCALE_BLOCK),), FLOAT32),
            outer_table=make((NUM_SCALE_CODES,), FLOAT32),
            offset=make((), FLOAT32),
        )

    def restore_scales(self) -> Tensor:
        return make(self.scales.shape, FLOAT32)


class LinearInt8(QuantizedLinear):
    multiply = MultiplyInt8

    def __init__(self, layer: Linear) -> None:
        super().__init__(layer, make(layer.weight.shape, INT8), scales=make((layer.out_features,), FLOAT32))


NAME = "default"


def add_adapters(model: Any, lora: Lora, left_out: Sequence[str], expert_ranks: Mapping[str, int]) -> None:
    """Freezes the model, and puts an adapted layer in the place of each layer that the recipe names. `left_out`: ends
    of the names of layers that take no adapter. `expert_ranks`: ends of names of experts' weights that take one."""
    model.requires_grad_(False)
    head, targets = model.get_output_embeddings(), lora.target_modules
    for path, layer in list(model.named_modules()):
        is_named = layer is not head if isinstance(targets, str) else path.endswith(_list_ends(path, targets))
        if isinstance(layer, Linear) and is_named and not path.endswith(_list_ends(path, left_out)):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, LoraLinear(layer, lora))
    for name, rank in expert_ranks.items():  # one around the other
        owner, _, weight = name.rpartition(".")
        for path, experts in list(model.named_modules()):
            if path.endswith(f".{owner}"):
                parent, _, last = path.rpartition(".")
                setattr(model.get_submodule(parent), last, LoraExperts(experts, weight, rank))
    for name in lora.modules_to_save:
        for path, part in model.named_modules():
            if path.endswith(name):
                part.requires_grad_(True)


def _list_ends(path: str, targets: Sequence[str]) -> tuple[str, ...]:
    return tuple(target if target == path else f".{target}" for target in targets)


class LoraLinear(SizedModule):
    def __init__(self, base: Linear, lora: Lora) -> None:
        super().__init__()
        self.base_layer, self.in_features, self.out_features = base, base.in_features, base.out_features
        dtype = base.dtype if isinstance(base, QuantizedLinear) else base.weight.dtype
        drop = Dropout(lora.dropout) if lora.dropout else Identity()
        self.lora_dropout = ModuleDict({NAME: drop})
        self.lora_A = ModuleDict({NAME: Linear(base.in_features, lora.r, bias=False, dtype=dtype)})
        self.lora_B = ModuleDict({NAME: Linear(lora.r, base.out_features, bias=False, dtype=dtype)})
        self.lora_magnitude_vector = ModuleDict({NAME: Lengths(base)} if lora.use_dora else {})

    @property
    def weight(self) -> Parameter:
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        return self.base_layer.bias

    def forward(self, t: Any) -> Any:
        result = self.base_layer(t)
        if isinstance(self.base_layer, LinearNf4):
            result = result.clone()
        first, second, drop = (each[NAME] for each in (self.lora_A, self.lora_B, self.lora_dropout))
        t = t.to(first.weight.dtype)
        if NAME not in self.lora_magnitude_vector:
            return result + second(first(drop(t))) * 1.0
        base_result = result
        if self.training and isinstance(drop, Dropout):
            t, base_result = drop(t), None
        return result + self.lora_magnitude_vector[NAME](t, first, second, self.base_layer, base_result)


class LoraExperts(SizedModule):
    """peft's ParamWrapper, whose forward is this package's own (train/experts.py). In and out are swapped where
    weights lie as [experts, out, in]."""

    def __init__(self, base: Any, name: str, rank: int) -> None:
        super().__init__()
        self.base_layer, self.parameter_name, self.scaling = base, name, {NAME: 1.0}
        weight = getattr(self.get_base_layer(), name)
        self.num_experts, num_out, num_in = weight.shape
        if self.get_base_layer().is_transposed:
            num_in, num_out = num_out, num_in
        rank *= self.num_experts
        self.lora_dropout = ModuleDict({NAME: Identity()})
        self.lora_A = ModuleDict({NAME: Linear(num_in, rank, bias=False, dtype=weight.dtype)})
        self.lora_B = ModuleDict({NAME: Linear(rank, num_out, bias=False, dtype=weight.dtype)})

    def get_base_layer(self) -> Any:
        return self.base_layer.get_base_layer() if isinstance(self.base_layer, LoraExperts) else self.base_layer


class Lengths(SizedModule):
    """DoraLinearLayer: the length of each row of the adapted weight is trained too."""

    def __init__(self, base: Linear) -> None:
        super().__init__()
        self.weight = Parameter(make((base.out_features,), base.weight.dtype))

    def forward(self, t: Any, first: Linear, second: Linear, base: Linear, base_result: Any) -> Any:
        identity = make((first.weight.shape[1],) * 2, first.weight.dtype)
        product = second(first(identity)).T
        del identity
        lengths: Any = self.weight
        weight: Any = base.weight
        norm = selection.norm(weight + product.detach() * 1.0, dim=1).detach()
        scale = (lengths / norm).view(1, -1)
        result = second(first(t))
        if base_result is None:
            base_result = Linear.compute(t, weight, None)
        elif base.bias is not None:
            base_result = base_result - base.bias
        return (scale - 1) * base_result + scale * result * 1.0
