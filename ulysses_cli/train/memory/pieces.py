"""Runs embeddings and linear layers on pieces of a row where their kernels could not index all of it
(plan/rows/indexing.py). Gradients of weights are summed over pieces in float32 or better and returned as one gradient.

Layers inside tiles get few tokens and are left as they are. Takes no recipe and no group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ulysses_cli.plan.rows.indexing import split_rows
from ulysses_cli.train.memory.tiled_mlp import TiledBlock
from ulysses_cli.train.memory.tiling import WeightSums
from ulysses_cli.train.optimizer.shards import get_shape


def run_in_pieces(model: nn.Module) -> int:
    """Makes every embedding and linear layer that gets whole rows able to run in pieces. Returns their number. Call
    after tiles are made."""
    inside = {
        module
        for block in model.modules()
        if isinstance(getattr(vars(block).get("forward"), "__self__", None), TiledBlock)
        for module in block.modules()
    }
    found = [
        module
        for module in model.modules()
        if (isinstance(module, nn.Embedding) or type(module) is nn.Linear)
        and module not in inside
        and "forward" not in vars(module)
    ]
    for module in found:
        PiecedLayer(module)
    return len(found)


class PiecedLayer:
    """A layer whose forward is replaced. It takes indices [...] or hidden states [..., in], returns [..., out]."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.whole_forward: Callable[[Tensor], Tensor] = layer.forward
        self.width = get_shape(next(layer.parameters()))[0 if isinstance(layer, nn.Linear) else 1]
        layer.forward = self._run

    def compute_pieces(self, rows: Tensor, parts: list[slice]) -> Tensor:
        out: Tensor | None = None
        for part in parts:
            piece = self.whole_forward(rows[part])
            if out is None:
                out = piece.new_empty(rows.size(0), self.width)
            out[part] = piece
        if out is None:
            raise AssertionError("a layer of no tokens")
        return out

    def _run(self, tokens: Tensor) -> Tensor:
        is_linear = isinstance(self.layer, nn.Linear)
        rows = tokens.flatten(0, -2) if is_linear else tokens.flatten()
        dtype = tokens.dtype if is_linear else next(self.layer.parameters()).dtype
        parts = split_rows(rows.size(0), max(rows.nbytes, rows.size(0) * self.width * dtype.itemsize))
        if len(parts) == 1:
            return self.whole_forward(tokens)
        weights = WeightSums(self.layer)
        if torch.is_grad_enabled() and (tokens.requires_grad or weights.weights):
            out = _Pieces.apply(rows, self, weights, parts, *weights.weights)
        else:
            with torch.no_grad():
                out = self.compute_pieces(rows, parts)
        return out.view(*(tokens.shape[:-1] if is_linear else tokens.shape), self.width)


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, layer: PiecedLayer, weights: WeightSums, parts: list[slice], *_: nn.Parameter
    ) -> Tensor:
        ctx.layer, ctx.weights, ctx.parts = layer, weights, parts
        ctx.save_for_backward(rows)
        return layer.compute_pieces(rows, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        layer = ctx.layer.layer
        drows = torch.empty_like(rows) if isinstance(layer, nn.Linear) else None
        with ctx.weights.collect():
            for part in ctx.parts:
                if drows is not None:
                    drows[part] = ctx.weights.backward_linear(layer, rows[part], dout[part])
                else:
                    with torch.enable_grad():
                        piece = ctx.layer.whole_forward(rows[part])
                    torch.autograd.backward(piece, dout[part])
        sums = zip(ctx.weights.take_sums(), ctx.weights.weights, strict=True)
        dweights = [total.to(weight.dtype) for total, weight in sums]
        return drows if ctx.needs_input_grad[0] else None, None, None, None, *dweights
