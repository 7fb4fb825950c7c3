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
    """The trainable weights of a module while it is applied to tiles: twins that take each tile's gradient."""

    def __init__(self, module: nn.Module) -> None:
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                if parameter.requires_grad:
                    places.setdefault(parameter, []).append((owner, name))
        self._places = list(places.values())
        self.weights = list(places)

    @contextlib.contextmanager
    def collect(self) -> Iterator[list[Tensor]]:
        """Inside, the module computes with the twins. The list holds a sum for each weight, in their order, once a
        backward has run; each tile's gradient is let go as soon as it is added."""
        sums = [torch.empty(0) for _ in self.weights]
        twins = [weight.detach().requires_grad_() for weight in self.weights]
        for index, twin in enumerate(twins):
            twin.register_post_accumulate_grad_hook(_make_adder(sums, index))
        originals = list(self.weights)
        try:
            self._put(twins)
            yield sums
        finally:
            self._put(originals)
        for index, weight in enumerate(originals):
            if sums[index].shape != weight.shape:  # no tile used it
                sums[index] = torch.zeros_like(weight, dtype=_get_precision(weight))

    def _put(self, tensors: Sequence[Tensor]) -> None:
        for tensor, places in zip(tensors, self._places, strict=True):
            for owner, name in places:
                owner._parameters[name] = tensor  # a twin is no Parameter, and need not be


def _make_adder(sums: list[Tensor], index: int) -> Callable[[Tensor], None]:
    def add(twin: Tensor) -> None:
        grad, twin.grad = twin.grad, None
        if grad is None:
            return
        if sums[index].shape == twin.shape:
            sums[index].add_(grad)
        else:
            sums[index] = grad.to(_get_precision(grad))

    return add


def backward_tile(
    compute: Callable[[Tensor], Tensor], tokens: Tensor, find_slope: Callable[[Tensor], Tensor]
) -> Tensor:
    """A tile forward and backward -> the gradient of its tokens. `find_slope` turns the result into its gradient."""
    leaf = tokens.detach().requires_grad_()
    with torch.enable_grad():
        result = compute(leaf)
    torch.autograd.backward(result, find_slope(result.detach()))
    if leaf.grad is None:
        raise AssertionError("a tile's result does not depend on its tokens")
    return leaf.grad


def _get_precision(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
