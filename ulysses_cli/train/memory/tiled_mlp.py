"""Runs MLPs in tiles of tokens, dense and mixture-of-experts, lets a layer's recomputation stop before its last
linear layer, and runs embeddings and linear layers on pieces of a row that their kernels could not index.

Blocks are recognised by their submodules. A block runs once in the forward and once, tile by tile, in the backward.
Gradients of weights are summed in float32 or better. Takes no recipe and no group."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ulysses_cli.plan.levers import LAST_LINEARS, NORMS_AFTER
from ulysses_cli.plan.rows.indexing import EMBEDDING, LAYER_NORM, LINEAR, runs_in_pieces, split_rows
from ulysses_cli.train.memory.checkpointing import list_layers, save_for_recompute
from ulysses_cli.train.memory.tiling import WeightSums, backward_tile, check_is_whole, return_always, split_tokens

SHARED_BLOCK = "shared_transformer"


def tile_mlps(
    model: nn.Module, count_tiles: Callable[[int], int], gather_whole: Callable[[nn.Module], None] | None = None
) -> int:
    """Makes the MLP of every layer run in tiles. Returns their number. `count_tiles` takes this rank's tokens.

    `gather_whole` is called with each block: all of its weights must be gathered at once, before it runs, and not one
    submodule at a time. Then no collective happens inside a block, and numbers of tokens and tiles may differ by rank.
    """
    num_blocks = 0
    for layer in list_layers(model):
        for owner, block in list_blocks(layer):
            if getattr(block, "jitter_noise", 0):
                raise ValueError(f"{type(block).__name__} adds noise to its input in place: it cannot run in tiles")
            is_needed = owner is not layer or any(hasattr(layer, name) for name in NORMS_AFTER)
            TiledBlock(block, count_tiles, saves_output=is_needed)
            num_blocks += 1
            if gather_whole is not None:
                gather_whole(block)
    return num_blocks


def list_blocks(layer: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """A layer's MLPs, and those of a block that it shares with others, behind which it has a mixer of its own
    (modeling_zamba2.py: Zamba2HybridLayer), each with the module that it is a part of. Experts beside an MLP, which get
    indices and weights with their tokens, are one, too (modeling_gemma4.py: Gemma4TextDecoderLayer.forward)."""
    for owner in filter(None, (layer, getattr(layer, SHARED_BLOCK, None))):
        for child in owner.children():
            are_beside = child is getattr(owner, "experts", None)
            if are_beside or hasattr(child, "experts") or get_last_linear(child) is not None:
                yield owner, child


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
        block.register_forward_pre_hook(need_gradient)

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


def need_gradient(block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
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
