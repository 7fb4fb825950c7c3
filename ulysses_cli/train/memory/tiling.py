"""A module applied to tiles of tokens, one after another: its intermediate results exist for one tile at a time.

Takes any module that treats tokens one by one. Gradients of its weights are summed over tiles in float32 or better
and leave as one gradient, so that whoever reduces them does it once. No collective happens between tiles.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn


def split_tokens(num_tokens: int, num_tiles: int) -> list[slice]:
    """At most `num_tiles` parts of nearly equal size, none of them empty."""
    num_tiles = max(1, min(num_tiles, num_tokens))
    bounds = [num_tokens * tile // num_tiles for tile in range(num_tiles + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]


def check_is_whole(module: nn.Module, what: str) -> None:
    """Under ZeRO-3 a module that is not gathered as a whole would gather its parts anew for each tile, and ranks with
    other numbers of tiles would wait for each other forever."""
    is_sharded = any(hasattr(parameter, "ds_id") for parameter in module.parameters())
    if is_sharded and next(module.children(), None) is not None and not getattr(module, "_z3_leaf", False):
        raise RuntimeError(
            f"{what} ({type(module).__name__}) is not gathered as a whole: mark it as a ZeRO-3 leaf module before the "
            "engine is made"
        )


class WeightSums:
    """The trainable weights of a module while it is applied to tiles, and the sums of their gradients."""

    def __init__(self, module: nn.Module) -> None:
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                if parameter.requires_grad:
                    places.setdefault(parameter, []).append((owner, name))
        self._places = list(places.values())
        self.weights = list(places)
        self._twins: list[Tensor] = []
        self._sums: dict[int, Tensor] = {}

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Inside, the module computes with twins of its weights, whose gradients are added up after each tile's
        backward and let go."""
        self._twins = [weight.detach().requires_grad_() for weight in self.weights]
        for twin in self._twins:
            twin.register_post_accumulate_grad_hook(self._take_gradient)
        try:
            self._put(self._twins)
            yield
        finally:
            self._put(self.weights)
            self._twins = []

    def take_sums(self) -> list[Tensor]:
        """Of all tiles, in the order of the weights; zero where no tile used one."""
        found = [self._sums.pop(at, None) for at in range(len(self.weights))]
        return [
            torch.zeros_like(weight, dtype=_get_precision(weight)) if total is None else total
            for total, weight in zip(found, self.weights, strict=True)
        ]

    def backward_linear(self, linear: nn.Linear, inputs: Tensor, slope: Tensor) -> Tensor:
        """A plain linear layer's backward by hand: [N, in] and [N, out] -> the gradient of its inputs. Its result is
        not needed for that, and the sum takes the product as it is made."""
        for at, twin in enumerate(self._twins):
            if twin is linear.weight:
                total = self._sums.get(at)
                if total is not None and total.dtype == slope.dtype:
                    total.addmm_(slope.mT, inputs)
                else:
                    self._add(at, slope.mT @ inputs)
            elif twin is linear.bias:
                self._add(at, slope.sum(0, dtype=_get_precision(slope)))
        return slope @ linear.weight.detach()

    def _take_gradient(self, twin: Tensor) -> None:
        grad, twin.grad = twin.grad, None
        if grad is not None:
            self._add(next(at for at, other in enumerate(self._twins) if other is twin), grad)

    def _add(self, at: int, grad: Tensor) -> None:
        if at in self._sums:
            self._sums[at].add_(grad)
        else:
            self._sums[at] = grad.to(_get_precision(grad))

    def _put(self, tensors: Sequence[Tensor]) -> None:
        for tensor, places in zip(tensors, self._places, strict=True):
            for owner, name in places:
                owner._parameters[name] = tensor  # a twin is no Parameter, and need not be


def backward_tile(
    compute: Callable[[Tensor], Tensor], tokens: Tensor, give_slope: Callable[[Tensor], Tensor]
) -> Tensor:
    """A tile forward and backward -> the gradient of its tokens. `give_slope` turns the result into its gradient."""
    leaf = tokens.detach().requires_grad_()
    with torch.enable_grad():
        result = compute(leaf)
    torch.autograd.backward(result, give_slope(result.detach()))
    if leaf.grad is None:
        raise AssertionError("a tile's result does not depend on its tokens")
    return leaf.grad


def _get_precision(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
