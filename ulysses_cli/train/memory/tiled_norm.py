"""Runs norms in tiles of tokens. transformers' norms compute in float32 and save whole float32 rows for the backward,
the largest tensors of a long row. In tiles only the input is saved, in its own dtype, and each tile is recomputed.

Norms are recognised by their weights and signature. Takes no recipe and no group.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ulysses_cli.train.memory.tiling import WeightSums, backward_tile, return_always, split_tokens
from ulysses_cli.train.optimizer.shards import get_shape


def tile_norms(model: nn.Module, count_tiles: Callable[[int], int]) -> int:
    """Makes every norm of the model run in tiles. Returns their number. `count_tiles` takes this rank's tokens."""
    norms = [module for module in model.modules() if _is_norm(module)]
    for norm in norms:
        TiledNorm(norm, count_tiles)
    return len(norms)


def _is_norm(module: nn.Module) -> bool:
    """Takes one tensor, has no submodules, no weights but vectors, and no buffers that depend on other tokens. A fused
    one (train/elementwise/) keeps no float32 rows, so it needs no tiles."""
    if getattr(module, "is_fused", False):
        return False
    if next(module.children(), None) is not None or next(module.buffers(recurse=False), None) is not None:
        return False
    shapes = [get_shape(weight) for weight in module.parameters(recurse=False)]
    if not shapes or any(len(shape) != 1 for shape in shapes):
        return False
    return len(inspect.signature(module.forward).parameters) == 1


class TiledNorm:
    """A norm whose forward is replaced. It processes vectors of the last dimension independently."""

    def __init__(self, norm: nn.Module, count_tiles: Callable[[int], int]) -> None:
        self.norm, self.count_tiles = norm, count_tiles
        self.whole_forward: Callable[[Tensor], Tensor] = norm.forward
        norm.forward = self._run

    def compute_tiles(self, hidden: Tensor, dim: int, parts: list[slice]) -> Tensor:
        out: Tensor | None = None
        for part in parts:
            tile = self.whole_forward(cut(hidden, dim, part))
            if out is None:
                out = torch.empty_like(hidden, dtype=tile.dtype)
            cut(out, dim, part).copy_(tile)
        if out is None:
            raise AssertionError("a norm of no tokens")
        return out

    def _run(self, hidden: Tensor) -> Tensor:
        if any(get_shape(weight) != hidden.shape[-1:] for weight in self.norm.parameters()):
            return self.whole_forward(hidden)  # its vectors lie in another dimension
        dim = max(range(hidden.dim() - 1), key=hidden.size)  # of tokens: heads may come before or after them
        parts = split_tokens(hidden.size(dim), self.count_tiles(hidden.size(dim) * (hidden.size(0) if dim else 1)))
        if len(parts) == 1:
            return self.whole_forward(hidden)
        weights = WeightSums(self.norm)
        if torch.is_grad_enabled() and (hidden.requires_grad or weights.weights):
            return _Tiles.apply(hidden, self, weights, dim, parts, *weights.weights)
        with torch.no_grad():
            return self.compute_tiles(hidden, dim, parts)


def cut(tensor: Tensor, dim: int, part: slice) -> Tensor:
    return tensor.narrow(dim, part.start, part.stop - part.start)


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, norm: TiledNorm, weights: WeightSums, dim: int, parts: list[slice], *_: nn.Parameter
    ) -> Tensor:
        ctx.norm, ctx.weights, ctx.dim, ctx.parts = norm, weights, dim, parts
        ctx.save_for_backward(hidden)
        return norm.compute_tiles(hidden, dim, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        dhidden = torch.empty_like(hidden)
        with ctx.weights.collect():
            for part in ctx.parts:
                tile, grad = cut(hidden, ctx.dim, part), cut(dout, ctx.dim, part)
                (dtile,) = backward_tile(ctx.norm.whole_forward, [tile], return_always(grad))
                cut(dhidden, ctx.dim, part).copy_(dtile)
        sums = zip(ctx.weights.take_sums(), ctx.weights.weights, strict=True)
        dweights = [total.to(weight.dtype) for total, weight in sums]
        return dhidden if ctx.needs_input_grad[0] else None, None, None, None, None, *dweights
