"""Measures each optimizer step and emits one line of metrics for it; counts steps whose loss or gradient is not
finite and names their rows. The engine has not applied such steps. Numbers only; report/ shows them."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ulysses_cli.data.steps import NO_ROW
from ulysses_cli.plan.speed import COMMUNICATION
from ulysses_cli.plan.units import format_count
from ulysses_cli.train.clock import Clock
from ulysses_cli.train.experts import find_experts
from ulysses_cli.train.loop import StepResult, TrainState
from ulysses_cli.train.processes.consistency import compare_facts, gather_values

SAMPLED_FIRST, SAMPLED_EVERY = 3, 20


class Meter:
    """Times steps, and the parts of sampled steps. `count_flops` takes the lengths of a step's documents, the number of
    its targets, and how many tokens each document shares; it returns the model's FLOPs."""

    def __init__(
        self,
        count_flops: Callable[[list[int], int, list[int]], float],
        peak_tflops: float | None,
        emit: Callable[[Any], None],
    ) -> None:
        self.count_flops, self.peak_tflops, self.emit = count_flops, peak_tflops, emit
        self.clock: Clock | None = None
        self.load: ExpertLoad | None = None
        self.started = 0.0

    def start(self, state: TrainState) -> None:
        """A pre-step hook."""
        step = state.step + 1
        self.clock, self.load = None, self.load or ExpertLoad(state.engine.wrapped.module, state.engine.device)
        self.load.reset()
        if step == SAMPLED_FIRST or step % SAMPLED_EVERY == 0:
            self.clock = Clock(state.engine.device)
            self.clock.start()
        self.started = time.perf_counter()

    def record(self, state: TrainState, result: StepResult) -> None:
        """A post-step hook. Collective over all ranks: peaks are the largest of any rank."""
        parts = self.clock.stop() if self.clock is not None else None
        seconds = time.perf_counter() - self.started
        device = state.engine.device
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peak, host = compare_facts({}, state.groups.host_group, peak, host)
        plan, world = result.plan, state.groups.layout.world_size
        lengths, shared = ([each for row in rows for each in row] for rows in (plan.lengths, plan.shared))
        flops = self.count_flops(lengths, plan.num_targets, shared)
        tflops = flops / seconds / world / 1e12
        line: dict[str, Any] = {
            "step": state.step,
            "epoch": round(plan.epoch, 6),
            "loss": result.loss,
            **result.measures,
            "grad_norm": result.update.grad_norm,
            "learning_rate": result.update.learning_rate,
            "tokens": plan.num_tokens,
            "supervised_tokens": plan.num_targets,
            "step_seconds": seconds,
            "tokens_per_second": plan.num_tokens / seconds,
            "tokens_per_second_per_gpu": plan.num_tokens / seconds / world,
            "tflops": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
            "peak_memory_bytes": peak or None,
            "host_peak_memory_bytes": host,
            "communication_share": None,
        }
        if result.update.overlapped_share is not None:
            line["early_optimizer_share"] = result.update.overlapped_share
        if not result.update.was_applied:
            line["applied"] = False
        if self.load is not None:
            line |= self.load.read(state.engine.sum_over_ranks)
        if parts is not None:
            total = sum(parts.values())
            line["communication_share"] = sum(parts[name] for name in COMMUNICATION) / total if total else 0.0
            line["step_parts"] = parts
        self.emit(line)


class ExpertLoad:
    """Counts the tokens that each expert gets in a step: transformers calls experts with the tokens and the numbers of
    their experts. Two numbers are made of it: the largest load over the mean one, of the layer where it is highest, and
    the share of experts without a token. A recomputed layer counts twice, which changes neither; so does the padding of
    rows, which is routed too."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        layers = list(find_experts(model).values())
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


class BadStepsError(RuntimeError):
    """More steps without a finite loss and gradient than run.max_bad_steps."""


class BadSteps:
    """A post-step hook."""

    def __init__(self, limit: int, warn: Callable[[str], None]) -> None:
        self.limit, self.warn = limit, warn
        self.count = 0

    def check(self, state: TrainState, result: StepResult) -> None:
        """Collective over all ranks after a bad step: whether a step was applied is the same on all ranks."""
        if result.update.was_applied:
            return
        self.count += 1
        shares = result.plan.shares[state.groups.dp_index]
        local_rows = [
            result.plan.rows[member]
            for micro_step, loss in enumerate(result.micro_losses)
            if not math.isfinite(loss)
            for member in shares[micro_step]
            if member != NO_ROW
        ]
        bad_rows = sorted({row for rows in gather_values(local_rows, state.groups.host_group) for row in rows})
        names = ", ".join(map(str, bad_rows or result.plan.rows))
        facts = f"loss {result.loss:.4g}, gradient norm {result.update.grad_norm:.4g}, rows {names}"
        self.warn(f"step {state.step} was not applied: {facts}")
        if self.count > self.limit:
            raise BadStepsError(
                f"{format_count(self.count, 'step without a finite loss and gradient')}, "
                f"{self.limit} allowed (run.max_bad_steps); the last: {facts}"
            )
