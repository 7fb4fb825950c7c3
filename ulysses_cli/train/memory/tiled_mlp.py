"""Runs MLPs in tiles of tokens, dense and mixture-of-experts: their wide intermediate results exist for one tile at a
time. Blocks are recognised by their submodules, and experts that their layer itself routes tokens to by their name.

A block runs once in the forward and once, tile by tile, in the backward: the recomputation of a checkpointed layer
stops before it. Takes no recipe and no group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ulysses_cli.train.memory.checkpointing import list_layers
from ulysses_cli.train.memory.saved_results import save_for_recompute
from ulysses_cli.train.memory.tiling import WeightSums, backward_tile, check_is_whole, split_tokens

# A layer that has one of these after its MLP needs the MLP's output again in the backward.
NORMS_AFTER = ("post_feedforward_layernorm", "post_mlp_layernorm", "post_norm2", "post_ffn_norm")
SHARED_BLOCK = "shared_transformer"
LAST_LINEARS = ("down_proj", "fc2", "c_proj", "w2", "output_linear")  # by which a dense MLP is recognised


def tile_mlps(
    model: nn.Module, count_tiles: Callable[[int], int], gather_whole: Callable[[nn.Module], None] | None = None
) -> int:
    """Makes the MLP of every layer run in tiles. Returns their number. `count_tiles` takes this rank's tokens.

    `gather_whole` is called with each block: all of its weights must be gathered at once, before it runs, and not one
    submodule at a time. Then no collective happens inside a block, and numbers of tokens and tiles may differ by rank.
    """
    num_blocks = 0
    for layer in list_layers(model):
        for owner, block in _list_parts(layer):
            if is_block(owner, block):
                if getattr(block, "jitter_noise", 0):
                    raise ValueError(f"{type(block).__name__} adds noise to its input in place: it cannot run in tiles")
                is_needed = owner is not layer or any(hasattr(layer, name) for name in NORMS_AFTER)
                TiledBlock(block, count_tiles, saves_output=is_needed)
                num_blocks += 1
                if gather_whole is not None:
                    gather_whole(block)
    return num_blocks


def _list_parts(layer: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """The parts of a layer, and those of a block that it shares with others, behind which it has a mixer of its own
    (modeling_zamba2.py: Zamba2HybridLayer), each with the module that it is a part of."""
    for owner in (layer, getattr(layer, SHARED_BLOCK, None)):
        if owner is not None:
            yield from ((owner, child) for child in owner.children())


def is_block(layer: nn.Module, child: nn.Module) -> bool:
    """Whether this part of a layer is an MLP, or experts beside one, which get indices and weights with their tokens
    (modeling_gemma4.py: Gemma4TextDecoderLayer.forward)."""
    are_beside = child is getattr(layer, "experts", None)
    return are_beside or hasattr(child, "experts") or get_last_linear(child) is not None


def get_last_linear(block: nn.Module) -> nn.Module | None:
    """Experts that stand beside an MLP have a tensor of that name, and are no MLP."""
    found = (getattr(block, name, None) for name in LAST_LINEARS)
    return next((each for each in found if isinstance(each, nn.Module)), None)


class _NotLastError(Exception):
    """A block's result is not that of its last linear layer."""


class TiledBlock:
    """A block whose forward is replaced. It takes hidden states [..., H], and may take more tensors with a row for each
    token. `saves_output`: the layer's recomputation gets the saved output."""

    def __init__(self, block: nn.Module, count_tiles: Callable[[int], int], *, saves_output: bool = False) -> None:
        self.block, self.count_tiles, self.saves_output = block, count_tiles, saves_output
        self.whole_forward: Callable[..., Any] = block.forward
        last = get_last_linear(block)
        self.last: nn.Linear | None = last if type(last) is nn.Linear else None
        self.num_results = 0  # of a block that returns a tuple; all but its first element become None
        self.constants: tuple[Any, ...] = ()  # what it takes besides tensors, such as the layer's number
        block.forward = self._run
        block.register_forward_pre_hook(_need_gradient)

    def compute(self, *tile: Tensor) -> Tensor:
        """Takes what the block takes for these tokens, returns [N, H]."""
        result = self.whole_forward(*tile, *self.constants)
        if isinstance(result, tuple):
            self.num_results, result = len(result), result[0]
        return result.flatten(0, -2)

    def backward_tile(self, weights: WeightSums, tile: Sequence[Tensor], grad_output: Tensor) -> list[Tensor]:
        """Takes what the block takes for these tokens and the gradient of the result [N, H], returns the gradients of
        all but indices. Does not compute the result of a last linear layer: its backward does not need it."""
        last = self.last
        if last is not None:
            random_state = _get_random_state(grad_output.device)
            try:
                return backward_tile(
                    self._compute_before_last, tile, lambda wide: weights.backward_linear(last, wide, grad_output)
                )
            except _NotLastError:
                self.last = None
                _set_random_state(random_state, grad_output.device)
        return backward_tile(self.compute, tile, lambda _: grad_output)

    def _compute_before_last(self, *tile: Tensor) -> Tensor:
        """The input of the last linear layer, [N, I]."""
        if self.last is None:
            raise AssertionError("no last linear layer")
        inputs: list[Tensor] = []

        def return_input(wide: Tensor) -> Tensor:
            inputs.append(wide)
            return wide

        linear_forward, self.last.forward = self.last.forward, return_input
        try:
            result = self.whole_forward(*tile, *self.constants)
        finally:
            self.last.forward = linear_forward
        if len(inputs) != 1 or result is not inputs[0]:
            raise _NotLastError
        return result.flatten(0, -2)

    def compute_tiles(self, inputs: Sequence[Tensor], parts: list[slice]) -> Tensor:
        out = inputs[0].new_empty(inputs[0].shape)
        rows = out.flatten(0, -2)
        for part, tile in _walk_tiles(inputs, parts):
            rows[part] = self.compute(*tile)
        return out

    def _run(self, *args: Any) -> Any:
        """Tensors come first."""
        inputs = tuple(each for each in args if isinstance(each, Tensor))
        self.constants = args[len(inputs) :]
        hidden = inputs[0]
        num_tokens = math.prod(hidden.shape[:-1])
        parts = split_tokens(num_tokens, self.count_tiles(num_tokens))
        if len(parts) == 1:
            return self.whole_forward(*args)
        weights = WeightSums(self.block)
        check_is_whole(self.block, "a tiled MLP")
        differentiates = any(each.requires_grad for each in inputs)
        if torch.is_grad_enabled() and (differentiates or weights.weights):
            entered = _Entry.apply(self, weights, parts, len(inputs), *inputs, *weights.weights)
            out = _Exit.apply(entered, self, parts, [each.detach() for each in inputs[1:]])
        else:
            with torch.no_grad():
                out = self.compute_tiles(inputs, parts)
        return (out, *[None] * (self.num_results - 1)) if self.num_results else out


def _walk_tiles(inputs: Sequence[Tensor], parts: list[slice]) -> Iterator[tuple[slice, list[Tensor]]]:
    """These tokens of tensors [..., width], with as many dimensions. Rows of a batch lie one behind another."""
    rows = [each.detach().flatten(0, -2) for each in inputs]
    for part in parts:
        yield part, [row[part][(None,) * (each.dim() - 2)] for row, each in zip(rows, inputs, strict=True)]


def _need_gradient(block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Called before a block with its inputs, and before DeepSpeed's own hooks. Behind a frozen embedding, with nothing
    trained between, the inputs of a trained block need no gradient. ZeRO-3 would then reduce the gradients of its
    weights before they are computed."""
    tensors = [each for each in inputs if isinstance(each, Tensor)]
    is_trained = any(weight.requires_grad for weight in block.parameters())
    if not is_trained or not torch.is_grad_enabled() or any(each.requires_grad for each in tensors):
        return None
    return _Anchor.apply(inputs[0], torch.empty(0, requires_grad=True)), *inputs[1:]


class _Anchor(torch.autograd.Function):
    """Makes a tensor need a gradient, and drops that gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, _: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, dhidden: Tensor) -> tuple[None, None]:
        return None, None


class _Entry(torch.autograd.Function):
    """Saves the tokens. Its backward receives the gradient of the block's output and runs the block's backward. It
    comes before the computation so that a recomputation, which stops at the last saved tensor, stops here."""

    @staticmethod
    def forward(
        ctx: Any, block: TiledBlock, weights: WeightSums, parts: list[slice], num_inputs: int, *tensors: Tensor
    ) -> Tensor:
        hidden, inputs = tensors[0], tensors[:num_inputs]
        ctx.block, ctx.weights, ctx.parts = block, weights, parts
        ctx.random_state = _get_random_state(hidden.device)
        ctx.save_for_backward(*inputs)
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        inputs, dout = ctx.saved_tensors, dout.flatten(0, -2)
        grads = [each.new_empty(each.shape) if each.is_floating_point() else None for each in inputs]
        rows = [grad.flatten(0, -2) for grad in grads if grad is not None]
        devices = [dout.device] if dout.device.type == "cuda" else []
        with torch.random.fork_rng(devices), ctx.weights.collect():
            _set_random_state(ctx.random_state, dout.device)
            for part, tile in _walk_tiles(inputs, ctx.parts):
                dtile = ctx.block.backward_tile(ctx.weights, tile, dout[part])
                for row in reversed(rows):
                    row[part] = dtile.pop().flatten(0, -2)
        sums = ctx.weights.take_sums()
        dweights: list[Tensor] = []
        while sums:
            dweights.append(sums.pop(0).to(ctx.weights.weights[len(dweights)].dtype))
        needed = ctx.needs_input_grad[4:]
        dinputs = [grad if need else None for grad, need in zip(grads, needed, strict=False)]
        return None, None, None, None, *dinputs, *dweights


class _Exit(torch.autograd.Function):
    """Computes the output, tile by tile. Its backward passes the gradient on to the entry."""

    @staticmethod
    def forward(ctx: Any, entered: Tensor, block: TiledBlock, parts: list[slice], others: list[Tensor]) -> Tensor:
        inputs = (entered, *others)
        if not block.saves_output:
            return block.compute_tiles(inputs, parts)
        return save_for_recompute(lambda: (block.compute_tiles(inputs, parts),))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return dout, None, None, None


def _get_random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    """Dropout must draw the same masks as in the forward."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
