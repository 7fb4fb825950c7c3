"""Wraps DeepSpeed's engine for the loop: forward and backward of a micro-batch, an update, an evaluation. Copies
weights inside a replica (DeepSpeed's hpZ) without a wait of the host for each.  Holds the arithmetic of the loss:
ranks exchange sums, divided once by what the objective counts in the step. Takes no Recipe."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ulysses_cli.data.steps import MicroBatch, Numbers
from ulysses_cli.plan.rows.packing import IGNORE_INDEX
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.clock import part_of_step
from ulysses_cli.train.loss import Objective, Places
from ulysses_cli.train.optimizer.overlapped_optimizer import OverlappedOptimizer
from ulysses_cli.train.optimizer.states import reset_moments
from ulysses_cli.train.processes.groups import Groups

IS_FROZEN = "is_frozen"  # of a group of the optimizer: its learning rate stays 0


class OrderedCopies:
    """One rank's. `parameters`: of ZeRO-3. Nothing changes on a device that runs everything in order."""

    def __init__(self, parameters: Iterable[Any], accelerator: Any) -> None:
        self.accelerator = accelerator
        self.events: dict[Any, Any] = {}  # of each weight's last copy
        if accelerator.resolves_data_dependency():
            return
        # DeepSpeed asks this before it waits. Other threads, which fetch weights, get the device's own answer.
        self.copying = threading.local()
        self.own_answer, accelerator.resolves_data_dependency = accelerator.resolves_data_dependency, self.is_ordered
        for parameter in parameters:
            parameter.partition = partial(self.partition, parameter, parameter.partition)
            parameter.all_gather_coalesced = partial(self.gather, parameter.all_gather_coalesced)

    def is_ordered(self) -> bool:
        return getattr(self.copying, "is_ordered", False) or bool(self.own_answer())

    def partition(self, parameter: Any, own: Any, param_list: Any = None, **options: Any) -> None:
        """In place of a parameter's `partition`, which makes the copies that are missing."""
        released = [parameter] if param_list is None else list(param_list)
        before = [each.ds_secondary_tensor for each in released]
        self.copying.is_ordered = True
        try:
            own(param_list=released, **options)
        finally:
            self.copying.is_ordered = False
        made = [
            each
            for each, copy in zip(released, before, strict=True)
            if options.get("has_been_updated") or each.ds_secondary_tensor is not copy
        ]
        if made:
            event = self.accelerator.Event()
            event.record(self.accelerator.current_stream())
            self.events.update(dict.fromkeys(made, event))

    def gather(self, own: Any, params: Iterable[Any], **options: Any) -> Any:
        """In place of `all_gather_coalesced`, which DeepSpeed calls on the stream that gathers."""
        gathered = list(params)
        stream = self.accelerator.current_stream()
        for event in {self.events[each] for each in gathered if each in self.events}:
            stream.wait_event(event)
        return own(gathered, **options)


@dataclass(frozen=True)
class Update:
    """The effect of an optimizer step."""

    was_applied: bool
    grad_norm: float
    learning_rate: float
    overlapped_share: float | None = (
        None  # of the optimizer's groups on the host that may step before the backward's end
    )


class Engine:
    """One rank's part of the sharded model. `learning_rate_at` is a pure function of the step's number."""

    def __init__(
        self,
        wrapped: Any,
        groups: Groups,
        device: torch.device,
        learning_rate_at: Callable[[int], float],
        clean_up: Callable[[], None],
        end: Callable[[Any], None],
        overlapped_optimizer: OverlappedOptimizer | None = None,
    ) -> None:
        self.objective: Objective = wrapped.module.objective
        self.wrapped, self.groups, self.device = wrapped, groups, device
        self.overlapped_optimizer = overlapped_optimizer
        self.learning_rate_at, self.clean_up, self.end = learning_rate_at, clean_up, end

    def train_micro_step(self, batch: MicroBatch, divisor: float) -> Tensor:
        """Forward and backward. Returns this rank's sums of the objective, on the device.

        DeepSpeed averages gradients over all ranks; the step's loss is one sum over one count, so the average is undone
        here.
        """
        sums = self.wrapped(**self._load(batch))
        scale = self.groups.layout.world_size / (divisor or 1)
        self.wrapped.backward(sums[0] * scale, scale_wrt_gas=False)
        with part_of_step("optimizer"):
            self.wrapped.step()  # DeepSpeed counts micro-steps by itself and updates at the last one
        return sums.detach()

    def set_learning_rate(self, rate: float) -> None:
        for group in self.wrapped.optimizer.param_groups:
            group["lr"] = 0.0 if group.get(IS_FROZEN) else rate

    def read_update(self, learning_rate: float) -> Update:
        """After the last micro-step. A gradient that is not finite leaves the weights as they are."""
        self.clean_up()
        norm = self.wrapped.get_global_grad_norm()
        norm = float(norm) if norm is not None else math.nan
        was_applied = bool(self.wrapped.was_step_applied()) and math.isfinite(norm)
        return Update(
            was_applied,
            norm,
            learning_rate,
            self.overlapped_optimizer.read_share() if self.overlapped_optimizer else None,
        )

    def evaluate_micro_batch(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The same sharded forward as in training. Returns (losses, positions) of this slice's targets."""
        losses, loaded = self.compute_token_losses(batch)
        return losses, find_positions(loaded)

    @torch.no_grad()
    def compute_token_losses(self, batch: MicroBatch, *, is_measured: bool = False) -> tuple[Tensor, dict[str, Any]]:
        """Returns a loss for every target of this slice, measured where asked, and the slice's tensors on the
        device."""
        self.wrapped.eval()
        loaded = self._load(batch)
        losses = self.wrapped(**loaded, per_token=True, is_measured=is_measured)
        self.wrapped.train()
        release_gathered(self.wrapped)
        return losses, loaded

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Collective over all ranks: every rank holds other tokens."""
        values = values.to(self.device, torch.float64)
        dist.all_reduce(values)
        return values

    def reset_optimizer(self) -> None:
        """Sets moments and step count to what they are before the first step."""
        reset_moments(self.wrapped.optimizer)

    def close(self) -> None:
        """Ends the engine, of which nothing is alive when its callers have let go of it and cycles are collected."""
        self.end(self.wrapped)

    def _load(self, batch: MicroBatch) -> dict[str, Any]:
        arrays = {"input_ids": batch.input_ids, "positions": batch.positions, "labels": batch.labels}
        tensors: dict[str, Any] = {name: self._send(array) for name, array in arrays.items()}
        numbers = np.flatnonzero(batch.labels != IGNORE_INDEX)
        documents = make_documents(batch.lengths, self.device, order=batch.order, shared=batch.shared)
        answers = self.objective.load(batch, numbers, self._send)
        return {**tensors, "places": self._make_places(numbers), "documents": documents, "answers": answers}

    def _make_places(self, numbers: Numbers) -> Places:
        """Also on a rank without a target: its head runs for none."""
        has_gaps = len(numbers) > 0 and numbers[-1] - numbers[0] >= len(numbers)
        return Places(numbers, self._send(numbers) if has_gaps else None)  # type: ignore[arg-type]

    def _send(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        pinned = tensor.pin_memory() if self.device.type == "cuda" else tensor
        return pinned.to(self.device, non_blocking=True)


def find_positions(loaded: Mapping[str, Any]) -> Tensor:
    """Of a slice's targets."""
    places: Places = loaded["places"]
    positions: Tensor = loaded["positions"].flatten()[places.find(slice(0, len(places)))]
    return positions


def release_gathered(wrapped: Any) -> None:
    """After a forward without a backward ZeRO-3 still holds the weights that the backward would use first, and no
    longer counts them: the next step would gather as many again in addition."""
    # without an optimizer DeepSpeed has only what shards the weights
    offload = getattr(wrapped.optimizer, "parameter_offload", wrapped.optimizer)
    if not hasattr(offload, "get_param_coordinator"):
        return
    offload.get_param_coordinator()._clean_inflight_param_registry()
    for parameter in wrapped.module.parameters():
        if parameter.ds_status.name == "AVAILABLE" and not parameter.ds_persist:
            parameter.partition()
