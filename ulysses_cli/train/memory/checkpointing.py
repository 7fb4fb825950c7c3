"""Activation checkpointing that saves attention's result: a layer saves its input and what passes through
`save_for_recompute`, and recomputes the cheap rest in the backward, in order, until the last tensor that is needed.
Takes a transformers model; torch's non-reentrant checkpointing does the work. A storage decides where tensors wait.
A dispatch mode over all operators cannot do this: under ZeRO-3 the two runs of a layer execute different operators."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


class ResultStorage(Protocol):
    """Stores the tensors of one run of one layer. Each is fetched once."""

    def store(self, tensor: Tensor) -> Any: ...

    def fetch(self, stored: Any) -> Tensor: ...


class DeviceStorage:
    """Leaves tensors on their device."""

    def store(self, tensor: Tensor) -> Tensor:
        return tensor.detach()

    def fetch(self, stored: Tensor) -> Tensor:
        return stored


class SavedResults:
    """The results of one run of a layer, in the order in which its forward made them."""

    def __init__(self, storage: ResultStorage) -> None:
        self._storage = storage
        self._results: deque[list[Any]] = deque()
        self._has_run = False

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs the layer: its first call saves results, its second gets them."""
        token = _current.set(self)
        try:
            return function(*args)
        finally:
            self._has_run = True
            _current.reset(token)

    def save(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if self._has_run:
            if not self._results:
                raise RuntimeError("a layer asks again for results that its recomputation has had")
            return tuple(self._storage.fetch(stored) for stored in self._results.popleft())
        results = compute()
        self._results.append([self._storage.store(result) for result in results])
        return results


_current: ContextVar[SavedResults | None] = ContextVar("saved_results", default=None)


def is_saving_results() -> bool:
    """Whether this is inside a layer that saves results and will be recomputed."""
    return _current.get() is not None and torch.is_grad_enabled()


def save_for_recompute(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Returns `compute()`. Inside a layer that saves results, its recomputation gets them without computing."""
    results = _current.get()
    return compute() if results is None else results.save(compute)


def compute_and_save(compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Returns `compute(*tensors)`, which autograd differentiates. Inside a layer that saves results, the result is
    saved and the layer's recomputation gets it; the backward then computes it once more for what autograd needs."""
    if not is_saving_results():
        return compute(*tensors)
    result: Tensor = _SavedResult.apply(compute, *tensors)
    return result


class _SavedResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.compute = compute
        ctx.save_for_backward(*tensors)
        return save_for_recompute(lambda: (compute(*tensors),))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [part.detach().requires_grad_(need) for part, need in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            result = ctx.compute(*inputs)
        grads = iter(torch.autograd.grad(result, [part for part in inputs if part.requires_grad], grad))
        return None, *(next(grads) if need else None for need in needed)


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
    model: nn.Module, mode: Mode, make_storage: Callable[[int], ResultStorage | None] | None = None, num_saved: int = 0
) -> int:
    """Checkpoints the layers of the model during training but for the last `num_saved`. Returns their number. `full`
    saves only the layer's input.

    `make_storage` makes the storage for each run of a layer; None keeps tensors on the device.
    """
    layers = list_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layers that can be checkpointed")
    layers = layers[: max(0, len(layers) - num_saved)]
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
