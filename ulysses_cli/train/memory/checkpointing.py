"""Activation checkpointing that saves attention's result: a layer saves its input and what passes through
`save_for_recompute`, and recomputes the cheap rest in the backward.

Takes a transformers model, whose layers support checkpointing. torch's non-reentrant checkpointing does the work; a
recomputation stops as soon as the last tensor that the backward needs is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ulysses_cli.train.memory.saved_results import DeviceStorage, ResultStorage, SavedResults

Mode = Literal["save_attention", "full"]


def list_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers that can be checkpointed, in the model's order. A layer inside another is recomputed with it."""
    layers: list[GradientCheckpointingLayer] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module not in inside:
            layers.append(module)
            inside.update(module.modules())
    return layers


def checkpoint_layers(
    model: nn.Module, mode: Mode, make_storage: Callable[[int], ResultStorage | None] | None = None
) -> int:
    """Checkpoints every layer of the model during training. Returns their number. `full` saves only the layer's input.

    `make_storage` makes the storage for each run of a layer; None keeps tensors on the device.
    """
    layers = list_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layers that can be checkpointed")
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = CheckpointedLayer(index, mode, make_storage or (lambda _: None))
    return len(layers)


class CheckpointedLayer:
    """Runs one layer. transformers calls it in place of the layer's forward."""

    def __init__(self, index: int, mode: Mode, make_storage: Callable[[int], ResultStorage | None]) -> None:
        self.index, self.mode, self.make_storage = index, mode, make_storage

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args)
        storage = self.make_storage(self.index)
        if self.mode == "save_attention":
            results = SavedResults(storage or DeviceStorage())
            forward = function

            def function(*inputs: Any) -> Any:
                return results.call(forward, *inputs)

        # These hooks get only the layer's inputs: inside, checkpointing uses its own hooks.
        hooks = saved_tensors_hooks(storage.store, storage.fetch) if storage else contextlib.nullcontext()
        with hooks:
            return checkpoint(function, *args, use_reentrant=False)
