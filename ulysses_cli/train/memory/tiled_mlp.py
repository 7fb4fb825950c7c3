"""MLPs in tiles of tokens, dense and mixture-of-experts: their wide intermediate results exist for one tile at a time.

Blocks are found by what they are made of. A block runs once in the forward and once, tile by tile, in the backward: in
a layer that is computed again, the recomputation stops before it. Knows no recipe and no group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ulysses_cli.train.memory.checkpointing import list_layers
from ulysses_cli.train.memory.saved_results import keep
from ulysses_cli.train.memory.tiling import WeightSums, backward_tile, check_is_whole, split_tokens

# A layer that has one of these after its MLP needs the MLP's output again in the backward.
NORMS_AFTER = ("post_feedforward_layernorm", "post_mlp_layernorm")


def tile_mlps(
    model: nn.Module, count_tiles: Callable[[int], int], gather_whole: Callable[[nn.Module], None] | None = None
) -> int:
    """Run the MLP of every layer in tiles -> how many were found. `count_tiles` gets this rank's tokens.

    `gather_whole` is told of each block: all of its weights are to be gathered at once, before it runs, and not by
    its parts. With that, no collective happens inside a block, and ranks may have other numbers of tokens and tiles.
    """
    found = 0
    for layer in list_layers(model):
        for block in layer.children():
            if hasattr(block, "down_proj") or hasattr(block, "experts"):
                if getattr(block, "jitter_noise", 0):
                    raise ValueError(f"{type(block).__name__} adds noise to its input in place: it cannot run in tiles")
                TiledBlock(block, count_tiles, keeps_output=any(hasattr(layer, name) for name in NORMS_AFTER))
                found += 1
                if gather_whole is not None:
                    gather_whole(block)
    return found


class _DoesMoreError(Exception):
    """A block's result is not that of its `down_proj`."""


class TiledBlock:
    """A block whose forward is taken over. `keeps_output`: its recomputation gets the output back."""

    def __init__(self, block: nn.Module, count_tiles: Callable[[int], int], *, keeps_output: bool = False) -> None:
        self.block, self.count_tiles, self.keeps_output = block, count_tiles, keeps_output
        self.whole_forward: Callable[[Tensor], Any] = block.forward
        last = getattr(block, "down_proj", None)
        self.last: nn.Linear | None = last if type(last) is nn.Linear else None
        self.num_results = 0  # a block that returns a tuple gets one back, of which only the first is more than None
        block.forward = self._run

    def compute(self, tokens: Tensor) -> Tensor:
        """[N, H] -> [N, H]."""
        result = self.whole_forward(tokens[None])
        if isinstance(result, tuple):
            self.num_results, result = len(result), result[0]
        return result[0]

    def backward_tile(self, weights: WeightSums, tokens: Tensor, slope: Tensor) -> Tensor:
        """[N, H] and the gradient of the result -> the gradient of the tokens. The result of a linear layer at the end
        is not needed for that, and not computed."""
        last = self.last
        if last is not None:
            random_state = _get_random_state(tokens.device)
            try:
                return backward_tile(
                    self._compute_before_last, tokens, lambda wide: weights.backward_linear(last, wide, slope)
                )
            except _DoesMoreError:
                self.last = None
                _set_random_state(random_state, tokens.device)
        return backward_tile(self.compute, tokens, lambda _: slope)

    def _compute_before_last(self, tokens: Tensor) -> Tensor:
        """What the last linear layer is given, [N, I]."""
        if self.last is None:
            raise AssertionError("no last linear layer")
        seen: list[Tensor] = []

        def give_back(wide: Tensor) -> Tensor:
            seen.append(wide)
            return wide

        whole, self.last.forward = self.last.forward, give_back
        try:
            result = self.whole_forward(tokens[None])
        finally:
            self.last.forward = whole
        if len(seen) != 1 or result is not seen[0]:
            raise _DoesMoreError
        return result[0]

    def compute_tiles(self, hidden: Tensor, parts: list[slice]) -> Tensor:
        tokens = hidden.detach().flatten(0, 1)
        out = torch.empty_like(tokens)
        for part in parts:
            out[part] = self.compute(tokens[part])
        return out.view(hidden.shape)

    def _run(self, hidden: Tensor) -> Any:
        num_tokens = hidden.size(0) * hidden.size(1)
        parts = split_tokens(num_tokens, self.count_tiles(num_tokens))
        if len(parts) == 1:
            return self.whole_forward(hidden)
        weights = WeightSums(self.block)
        check_is_whole(self.block, "a tiled MLP")
        if torch.is_grad_enabled() and (hidden.requires_grad or weights.weights):
            if not hidden.requires_grad and hasattr(weights.weights[0], "ds_id"):
                raise RuntimeError(
                    "a tiled MLP's input needs no gradient, so that ZeRO-3 would reduce its weights' gradients before "
                    "they are there: call the model's enable_input_require_grads()"
                )
            entered = _Entry.apply(hidden, self, weights, parts, *weights.weights)
            out = _Exit.apply(entered, self, parts)
        else:
            with torch.no_grad():
                out = self.compute_tiles(hidden, parts)
        return (out, *[None] * (self.num_results - 1)) if self.num_results else out


class _Entry(torch.autograd.Function):
    """Remembers the tokens. Its backward, which receives the gradient of the block's output, is the block's. It comes
    before the computation so that a recomputation, which ends with the last tensor to be saved, ends here."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, block: TiledBlock, weights: WeightSums, parts: list[slice], *_: nn.Parameter
    ) -> Tensor:
        ctx.block, ctx.weights, ctx.parts = block, weights, parts
        ctx.random_state = _get_random_state(hidden.device)
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        tokens, dout = hidden.detach().flatten(0, 1), dout.flatten(0, 1)
        dtokens = torch.empty_like(tokens)
        devices = [hidden.device] if hidden.device.type == "cuda" else []
        with torch.random.fork_rng(devices), ctx.weights.collect():
            _set_random_state(ctx.random_state, hidden.device)
            for part in ctx.parts:
                dtokens[part] = ctx.block.backward_tile(ctx.weights, tokens[part], dout[part])
        sums = ctx.weights.take_sums()
        dweights: list[Tensor] = []
        while sums:
            dweights.append(sums.pop(0).to(ctx.weights.weights[len(dweights)].dtype))
        return dtokens.view(hidden.shape) if ctx.needs_input_grad[0] else None, None, None, None, *dweights


class _Exit(torch.autograd.Function):
    """Computes the output, tile by tile; the backward hands the gradient through to the entry."""

    @staticmethod
    def forward(ctx: Any, entered: Tensor, block: TiledBlock, parts: list[slice]) -> Tensor:
        if not block.keeps_output:
            return block.compute_tiles(entered, parts)
        return keep(lambda: (block.compute_tiles(entered, parts),))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return dout, None, None


def _get_random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    """Dropout must fall as it fell in the forward."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
