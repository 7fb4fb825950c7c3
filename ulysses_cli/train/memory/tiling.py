"""Applies a module to tiles of tokens, one after another: its intermediate results exist for one tile at a time.

Takes any module that processes tokens independently. Gradients of its weights are summed over tiles in float32 or
better and returned as one gradient, so that they are reduced over ranks once. No collective happens between tiles.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn


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
        try:
            self._set_weights(self._detached)
            yield
        finally:
            self._set_weights(self.weights)
            self._detached = []

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
                total = self._sums.get(index)
                if total is not None and total.dtype == grad_output.dtype:
                    total.addmm_(grad_output.mT, inputs)
                else:
                    self._add(index, grad_output.mT @ inputs)
            elif weight is linear.bias:
                self._add(index, grad_output.sum(0, dtype=_get_precision(grad_output)))
        return grad_output @ linear.weight.detach()

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
    compute: Callable[[Tensor], Tensor], tokens: Tensor, compute_grad: Callable[[Tensor], Tensor]
) -> Tensor:
    """Runs a tile forward and backward. Returns the gradient of its tokens. `compute_grad` takes the tile's result,
    returns the gradient of it."""
    leaf = tokens.detach().requires_grad_()
    with torch.enable_grad():
        result = compute(leaf)
    torch.autograd.backward(result, compute_grad(result.detach()))
    if leaf.grad is None:
        raise AssertionError("a tile's result does not depend on its tokens")
    return leaf.grad


def _get_precision(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
