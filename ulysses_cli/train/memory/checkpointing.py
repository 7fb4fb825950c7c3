"""Activation checkpointing that keeps attention's result: a layer's input and what passes through `kept.keep` stay, the
cheap rest is computed again in the backward.

Takes a transformers model, whose layers already know how to be checkpointed. torch's non-reentrant checkpointing does
the work; it stops as soon as the last tensor that the backward needs is there.
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

Mode = Literal["keep_attention", "full"]


def list_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers that can be computed again, in the model's order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpoint_layers(
    model: nn.Module, mode: Mode, make_storage: Callable[[int], ResultStorage | None] | None = None
) -> int:
    """Checkpoint every layer of the model while it trains -> their number. `full` keeps the layer's input only.

    `make_storage` gives each run of a layer the place where what it keeps waits; None is the device.
    """
    layers = list_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layers that can be checkpointed")
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = Region(index, mode, make_storage or (lambda _: None))
    return len(layers)


class Region:
    """How one layer is run: what transformers calls in place of the layer's forward."""

    def __init__(self, index: int, mode: Mode, make_storage: Callable[[int], ResultStorage | None]) -> None:
        self.index, self.mode, self.make_storage = index, mode, make_storage

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args)
        storage = self.make_storage(self.index)
        if self.mode == "keep_attention":
            kept = SavedResults(storage or DeviceStorage())
            run = function

            def function(*inputs: Any) -> Any:
                return kept.call(run, *inputs)

        # These hooks see the layer's inputs alone: inside, checkpointing has its own.
        hooks = saved_tensors_hooks(storage.store, storage.fetch) if storage else contextlib.nullcontext()
        with hooks:
            return checkpoint(function, *args, use_reentrant=False)
