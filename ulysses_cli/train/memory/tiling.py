"""Applies a module to tiles of tokens, one after another: its intermediate results exist for one tile at a time. Norms
run so, too: they would save whole float32 rows for the backward.  Takes any module that processes tokens
independently, no recipe and no group. Gradients of its weights are summed over tiles in float32 or better and
returned as one gradient. No collective happens between tiles."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ulysses_cli.train.optimizer.shards import get_shape


def split_tokens(num_tokens: int, num_tiles: int) -> list[slice]:
    """Splits tokens into at most `num_tiles` parts of nearly equal size, none of them empty."""
    num_tiles = max(1, min(num_tiles, num_tokens))
    bounds = [num_tokens * tile // num_tiles for tile in range(num_tiles + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]


def check_is_whole(module: nn.Module, name: str) -> None:
    """Under ZeRO-3 a module that is not gathered as a whole would gather its parts again for each tile, and ranks with
    different numbers of tiles would wait for each other forever."""
    is_sharded = any(hasattr(parameter, "ds_id") for parameter in module.parameters())
    if is_sharded and next(module.children(), None) is not None and not getattr(module, "_z3_leaf", False):
        raise RuntimeError(
            f"{name} ({type(module).__name__}) is not gathered as a whole: mark it as a ZeRO-3 leaf module before the "
            "engine is made"
        )


class WeightSums:
    """The trainable weights of a module while it is applied to tiles, and the sums of their gradients."""

    def __init__(self, module: nn.Module) -> None:
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for submodule in module.modules():
            for name, parameter in submodule.named_parameters(recurse=False):
                if parameter.requires_grad:
                    places.setdefault(parameter, []).append((submodule, name))
        self._places = list(places.values())
        self.weights = list(places)
        self._detached: list[Tensor] = []
        self._sums: dict[int, Tensor] = {}

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Inside, the module computes with detached copies of its weights. Their gradients are added up after each
        tile's backward and freed."""
        self._detached = [weight.detach().requires_grad_() for weight in self.weights]
        for weight in self._detached:
            weight.register_post_accumulate_grad_hook(self._take_gradient)
        linears = self._list_summing_linears()
        try:
            self._set_weights(self._detached)
            for linear in linears:
                linear.forward = _make_summing_forward(self, linear)
            yield
        finally:
            for linear in linears:
                del linear.forward
            self._set_weights(self.weights)
            self._detached = []

    def _list_summing_linears(self) -> list[nn.Linear]:
        """Plain linear layers with trained weights, where the device adds a product to a float32 sum as it makes it.
        Otherwise each tile's gradient is written in the model's dtype and added in a pass of its own: 12 bytes of
        traffic for each weight and tile."""
        found = {submodule for places in self._places for submodule, _ in places}
        return [
            linear
            for linear in found
            if type(linear) is nn.Linear
            and linear.weight.requires_grad
            and "forward" not in vars(linear)
            and adds_in_product(linear.weight.device, linear.weight.dtype)
        ]

    def take_sums(self) -> list[Tensor]:
        """The sums over all tiles, in the order of the weights; zero for a weight that no tile used."""
        sums = [self._sums.pop(index, None) for index in range(len(self.weights))]
        return [
            torch.zeros_like(weight, dtype=_get_precision(weight)) if total is None else total
            for total, weight in zip(sums, self.weights, strict=True)
        ]

    def backward_linear(self, linear: nn.Linear, inputs: Tensor, grad_output: Tensor) -> Tensor:
        """A plain linear layer's backward without its forward. Takes inputs [N, in] and the output's gradient [N, out],
        returns the gradient of the inputs. The product is added to the weight's sum directly."""
        for index, weight in enumerate(self._detached):
            if weight is linear.weight:
                self._add_product(index, grad_output.mT, inputs)
            elif weight is linear.bias:
                self._add(index, grad_output.sum(0, dtype=_get_precision(grad_output)))
        return grad_output @ linear.weight.detach()

    def _add_product(self, index: int, left: Tensor, right: Tensor) -> None:
        total = self._sums.get(index)
        if total is not None and total.dtype == left.dtype:
            total.addmm_(left, right)
        elif left.dtype == _get_precision(left) or not adds_in_product(left.device, left.dtype):
            self._add(index, left @ right)
        elif total is None:
            self._sums[index] = torch.mm(left, right, out_dtype=torch.float32)
        else:
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)

    def _take_gradient(self, weight: Tensor) -> None:
        grad, weight.grad = weight.grad, None
        if grad is not None:
            self._add(next(index for index, other in enumerate(self._detached) if other is weight), grad)

    def _add(self, index: int, grad: Tensor) -> None:
        if index in self._sums:
            self._sums[index].add_(grad)
        else:
            self._sums[index] = grad.to(_get_precision(grad))

    def _set_weights(self, tensors: Sequence[Tensor]) -> None:
        for tensor, places in zip(tensors, self._places, strict=True):
            for submodule, name in places:
                submodule._parameters[name] = tensor  # a detached weight is no Parameter, and need not be


def backward_tile(
    compute: Callable[..., Tensor], inputs: Sequence[Tensor], compute_grad: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Runs a tile forward and backward. Takes what `compute` takes for its tokens, and returns the gradients of it, but
    of no indices. `compute_grad` takes the tile's result, returns the gradient of it."""
    leaves = [each.detach().requires_grad_(each.is_floating_point()) for each in inputs]
    with torch.enable_grad():
        result = compute(*leaves)
    torch.autograd.backward(result, compute_grad(result.detach()))
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    if len(grads) != sum(leaf.requires_grad for leaf in leaves):
        raise AssertionError("a tile's result does not depend on its tokens")
    return grads


def return_always(grad: Tensor) -> Callable[[Tensor], Tensor]:
    """A gradient of a tile's result that is known without the result."""
    return lambda _: grad


class _SummingLinear(torch.autograd.Function):
    """A linear layer whose backward adds its weight's gradient to the sums and returns none."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weights: WeightSums, linear: nn.Linear) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weights, ctx.linear = weights, linear
        return functional.linear(inputs, linear.weight, linear.bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors
        rows, grads = inputs.flatten(0, -2), dout.flatten(0, -2)
        return ctx.weights.backward_linear(ctx.linear, rows, grads).view(inputs.shape), None, None


def _make_summing_forward(weights: WeightSums, linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    def run(inputs: Tensor) -> Tensor:
        if not inputs.requires_grad:  # autograd would not call the backward
            return functional.linear(inputs, linear.weight, linear.bias)
        return _SummingLinear.apply(inputs, weights, linear)

    return run


@cache
def adds_in_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a GPU adds a product of two tensors of this dtype to a float32 sum as it makes it: torch's addmm with
    out_dtype. It is tried on small numbers that bfloat16 holds exactly. Other devices have no such product."""
    if device.type != "cuda" or dtype == torch.float32:
        return device.type == "cuda"
    total = torch.full((16, 16), 1.0, device=device)
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
        first = torch.mm(ones, ones, out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all() & (first == 16).all()) and first.dtype == torch.float32


def _get_precision(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


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
        ctx.norm = norm
        ctx.weights = weights
        ctx.dim = dim
        ctx.parts = parts
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
