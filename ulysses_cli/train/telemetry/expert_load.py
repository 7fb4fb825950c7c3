"""Counts the tokens that each expert gets in a step. Two numbers are made of it: the largest load over the mean one, of
the layer where it is highest, and the share of experts without a token.

A recomputed layer counts twice, which changes neither number; so does the padding of rows, which is routed too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class ExpertLoad:
    """Watches the experts of a model, which transformers calls with the tokens and the numbers of their experts."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        layers = [module for name, module in model.named_modules() if _are_experts(name, module)]
        self.sizes = [int(module.num_experts) for module in layers]
        self.counts = torch.zeros(len(layers), max(self.sizes, default=0), dtype=torch.int64, device=device)
        for layer, module in enumerate(layers):
            module.register_forward_pre_hook(partial(self._count, layer))

    def _count(self, layer: int, _: nn.Module, args: tuple[Any, ...]) -> None:
        chosen = args[1].detach().reshape(-1).long()
        self.counts[layer].scatter_add_(0, chosen, torch.ones_like(chosen))

    def reset(self) -> None:
        self.counts.zero_()

    def read(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Collective over all ranks, which have the same layers. Empty without experts."""
        return describe_load(sum_over_ranks(self.counts).cpu(), self.sizes) if self.sizes else {}


def describe_load(counts: Tensor, sizes: list[int]) -> dict[str, float]:
    """`counts`: tokens by layer and expert; a layer with fewer experts than others has zeros at the end."""
    loads = [layer[:size] for layer, size in zip(counts.double(), sizes, strict=True)]
    largest = max((float(load.max() / load.mean()) for load in loads if load.any()), default=0.0)
    idle = sum(int((load == 0).sum()) for load in loads)
    return {"expert_load": largest, "idle_experts": idle / sum(sizes)}


def _are_experts(name: str, module: nn.Module) -> bool:
    """peft puts its layers around the experts, which then are `experts.base_layer`."""
    last = [part for part in name.split(".") if part != "base_layer"][-1:]
    return last == ["experts"] and hasattr(module, "num_experts") and not hasattr(module, "base_layer")
