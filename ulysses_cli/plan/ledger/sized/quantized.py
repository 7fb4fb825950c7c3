"""bitsandbytes' layers on sizes: a frozen base in 4 or 8 bits (bitsandbytes: autograd/_functions.py, functional.py)."""

from __future__ import annotations

from typing import Any

from ulysses_cli.plan.sizes import products
from ulysses_cli.plan.sizes.autograd import Function
from ulysses_cli.plan.sizes.dtypes import FLOAT16, FLOAT32, INT8, INT32, UINT8
from ulysses_cli.plan.sizes.nn import Buffer, Linear, Parameter, SizedModule
from ulysses_cli.plan.sizes.tensor import Tensor, make
from ulysses_cli.plan.sizes.views import raw_reshape

BLOCK, SCALE_BLOCK = 64, 256  # weights that share a scale, scales that share one of their own
NUM_CODES, NUM_SCALE_CODES = 16, 256


def quantize_layers(model: Any, kind: str) -> None:
    """As train/assembly/quantized_base.py: every linear layer but the head."""
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
        product = products.linear(t, layer.restore(), layer.bias)
        del scales
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        scales = ctx.layer.restore_scales()
        weight = ctx.layer.restore()
        del scales
        return products.matmul(grad, weight), None


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
        product = products.matmul(rows, weight)
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
