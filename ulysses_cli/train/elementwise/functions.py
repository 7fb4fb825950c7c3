"""The autograd functions of the operators. Each saves its inputs in the model's dtype and nothing in float32, except
one number for each row of a norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ulysses_cli.train.elementwise import operators


class Normalize(torch.autograd.Function):
    """`norm` holds the weight: under ZeRO-3 the backward finds it there once it is gathered again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, norm: nn.Module, eps: float, kind: str, way: str) -> Tensor:
        hidden = hidden.contiguous()
        out, rstd = operators.normalize(hidden, weight, eps, kind, way)
        ctx.save_for_backward(hidden, rstd)
        ctx.norm, ctx.kind, ctx.way = norm, kind, way
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        hidden, rstd = ctx.saved_tensors
        dhidden, dweight = operators.normalize_backward(dout, hidden, ctx.norm.weight.detach(), rstd, ctx.kind, ctx.way)
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        return dhidden if needs_input else None, dweight if needs_weight else None, None, None, None, None


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, cos: Tensor, sin: Tensor, way: str) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.way = way
        return operators.rotate(hidden, cos, sin, way)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return operators.rotate_backward(dout, cos, sin, ctx.way), None, None, None


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates: Tensor, values: Tensor, way: str) -> Tensor:
        ctx.save_for_backward(gates, values)
        ctx.way = way
        return operators.gate(gates, values, way)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gates, values = ctx.saved_tensors
        return *operators.gate_backward(dout, gates, values, ctx.way), None
