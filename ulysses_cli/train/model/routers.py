"""The routers of a mixture of experts: finds them, names their layers for adapters to leave out, and freezes them.
Takes a model and no recipe."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

ROUTER_NAMES = ("gate", "router")  # a gate that is no router stands beside no experts


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """By name, in the order of layers: transformers puts a router beside the experts that it chooses from."""
    found: dict[str, nn.Module] = {}
    for path, block in model.named_modules():
        children = dict(block.named_children())
        if "experts" in children:
            found |= {f"{path}.{name}": children[name] for name in ROUTER_NAMES if name in children}
    return found


def list_router_layers(model: nn.Module) -> list[str]:
    """The linear layers of all routers, as peft names layers that take no adapter: by the last two parts of a path."""
    found = {
        ".".join(f"{path}.{name}".rstrip(".").split(".")[-2:])
        for path, router in find_routers(model).items()
        for name, layer in router.named_modules()
        if isinstance(layer, nn.Linear)
    }
    return sorted(found)


def list_router_weights(model: nn.Module) -> list[nn.Parameter]:
    return [weight for router in find_routers(model).values() for weight in router.parameters() if weight.requires_grad]


def freeze_routers(weights: Iterable[nn.Parameter]) -> None:
    """Their gradients become zero, before anything sums them or measures their norm. They stay among the trained
    weights, so that checkpoints and exports hold them, in a group of the optimizer whose learning rate is 0."""
    for weight in weights:
        weight.register_hook(torch.zeros_like)
