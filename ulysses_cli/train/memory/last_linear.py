"""Lets the recomputation of a checkpointed layer stop before the product of the layer's last linear layer: that
layer's backward needs its input and its weight, and not its result.

torch's own linear layer saves both before it computes. DeepSpeed replaces it under ZeRO-3 with one that saves them
after, so a recomputation, which stops at the last saved tensor, would compute the product too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ulysses_cli.train.memory.checkpointing import list_layers
from ulysses_cli.train.memory.tiled_mlp import get_last_linear


class ShardedLinear(NamedTuple):
    """DeepSpeed's linear layer (runtime/zero/linear.py): what stands for torch's, and its autograd function."""

    replacement: Callable[..., Tensor]
    function: Any


def save_before_last_products(model: nn.Module, sharded: ShardedLinear) -> int:
    """Replaces the forward of the last linear layer of every MLP. Returns their number. Call once layers are
    checkpointed, and not where MLPs run in tiles: those compute no last product twice."""
    lasts = [get_last_linear(block) for layer in list_layers(model) for block in layer.children()]
    found = [last for last in lasts if type(last) is nn.Linear and "forward" not in vars(last)]
    for last in found:
        _EarlyLinear(last, sharded)
    return len(found)


class _EarlyLinear:
    """A linear layer whose forward is replaced where DeepSpeed's linear layer would run."""

    def __init__(self, linear: Any, sharded: ShardedLinear) -> None:
        self.linear, self.sharded = linear, sharded
        linear.forward = self._run

    def _run(self, inputs: Tensor) -> Tensor:
        weight, bias = self.linear.weight, self.linear.bias
        if functional.linear is not self.sharded.replacement or not torch.is_grad_enabled():
            return functional.linear(inputs, weight, bias)
        place = _Saved.apply(inputs, weight, bias, self.sharded.function)
        result: Tensor = _Product.apply(place, inputs.detach(), self.linear, self.sharded.function)
        return result


class _Saved(torch.autograd.Function):
    """Saves what DeepSpeed's linear layer saves and has its backward. Its result holds the product's place: it has the
    product's shape and the memory of one number."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, function: Any) -> Tensor:
        function.setup_context(ctx, (inputs, weight, bias), None)
        ctx.function = function
        return inputs.new_zeros(()).expand(*inputs.shape[:-1], weight.size(0))

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.function.backward(ctx, dout), None


class _Product(torch.autograd.Function):
    """Computes the product. Its backward passes the gradient on to what was saved."""

    @staticmethod
    def forward(ctx: Any, place: Tensor, inputs: Tensor, linear: nn.Linear, function: Any) -> Tensor:
        bias = None if linear.bias is None else linear.bias.detach()
        product: Tensor = function.forward(inputs, linear.weight.detach(), bias)
        return product

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return dout, None, None, None
