"""Runs embeddings, linear layers and torch's own layer norms on pieces of a row where their kernels could not index all
of it (plan/rows/indexing.py). Gradients of weights are summed over pieces in float32 or better and returned as one.

Layers inside tiles get few tokens and are left as they are. Takes no recipe and no group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ulysses_cli.plan.rows.indexing import EMBEDDING, LAYER_NORM, LINEAR, runs_in_pieces, split_rows
from ulysses_cli.train.memory.tiled_mlp import TiledBlock
from ulysses_cli.train.memory.tiling import WeightSums, backward_tile, return_always


def run_in_pieces(model: nn.Module, num_tokens: int, dtype: torch.dtype, in_tiles: Collection[nn.Module] = ()) -> int:
    """Makes every layer that cannot take so many tokens of this dtype at once able to run in pieces. Returns their
    number. Call after tiles are made, and before layers get other forwards. `in_tiles`: layers that get tiles in
    another way."""
    inside = {
        module
        for block in model.modules()
        if isinstance(getattr(vars(block).get("forward"), "__self__", None), TiledBlock)
        for module in block.modules()
    }.union(in_tiles)
    pieced = [
        PiecedLayer(module, operators)
        for module in model.modules()
        if module not in inside and "forward" not in vars(module) and (operators := find_operators(module))
    ]
    needed = [layer for layer in pieced if runs_in_pieces(num_tokens * layer.widest * dtype.itemsize, *layer.operators)]
    for layer in needed:
        layer.replace_forward()
    return len(needed)


def find_operators(module: nn.Module) -> tuple[str, ...]:
    """The census's names of what the layer runs on all of its tokens, or none."""
    if isinstance(module, nn.Embedding):
        return EMBEDDING
    if type(module) is nn.Linear:
        return LINEAR
    return LAYER_NORM if hasattr(module, "normalized_shape") else ()  # OLMo's calls torch's, and has no weights


class PiecedLayer:
    """A layer whose forward can be replaced. It takes indices [...] or hidden states [..., in], returns [..., out]."""

    def __init__(self, layer: Any, operators: tuple[str, ...]) -> None:
        self.layer, self.operators = layer, operators
        self.whole_forward: Callable[[Tensor], Tensor] = layer.forward
        self.takes_indices = operators is EMBEDDING
        if self.takes_indices:
            self.width = self.widest = layer.embedding_dim
        elif operators is LINEAR:
            self.width, self.widest = layer.out_features, max(layer.in_features, layer.out_features)
        else:
            self.width = self.widest = layer.normalized_shape[-1]

    def replace_forward(self) -> None:
        self.layer.forward = self._run

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
        rows = tokens.flatten() if self.takes_indices else tokens.flatten(0, -2)
        dtype = self.layer.weight.dtype if self.takes_indices else tokens.dtype
        num_bytes = rows.size(0) * self.widest * dtype.itemsize
        parts = split_rows(rows.size(0), num_bytes, *self.operators)
        if len(parts) == 1:
            return self.whole_forward(tokens)
        weights = WeightSums(self.layer)
        if torch.is_grad_enabled() and (tokens.requires_grad or weights.weights):
            out = _Pieces.apply(rows, self, weights, parts, *weights.weights)
        else:
            with torch.no_grad():
                out = self.compute_pieces(rows, parts)
        return out.view(*(tokens.shape if self.takes_indices else tokens.shape[:-1]), self.width)


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
        layer, weights = ctx.layer, ctx.weights
        drows = None if layer.takes_indices else torch.empty_like(rows)
        with weights.collect():
            for part in ctx.parts:
                if drows is None:
                    with torch.enable_grad():
                        piece = layer.whole_forward(rows[part])
                    torch.autograd.backward(piece, dout[part])
                elif layer.operators is LINEAR:
                    drows[part] = weights.backward_linear(layer.layer, rows[part], dout[part])
                else:
                    (drows[part],) = backward_tile(layer.whole_forward, [rows[part]], return_always(dout[part]))
        sums = zip(ctx.weights.take_sums(), ctx.weights.weights, strict=True)
        dweights = [total.to(weight.dtype) for total, weight in sums]
        return drows if ctx.needs_input_grad[0] else None, None, None, None, *dweights
