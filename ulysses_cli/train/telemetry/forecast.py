"""The ledger's prediction for a run: levers with their reasons, the predicted peak, warnings when it may not fit."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ulysses_cli.plan.hardware import GIB, Gpu
from ulysses_cli.plan.ledger.job import make_job
from ulysses_cli.plan.levers import get_key
from ulysses_cli.plan.planner.host_bound import find_host_bound
from ulysses_cli.plan.planner.lever_choice import LeverChoice
from ulysses_cli.plan.resolved import RunPlan
from ulysses_cli.plan.speed import PACKED_KERNELS, explain_packed
from ulysses_cli.train.processes.core_speed import measure_core_milliseconds
from ulysses_cli.train.telemetry.record import Record

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True)
class Forecast:
    """`gpu` is None where ranks compute on a CPU: no lever is turned on automatically there."""

    choice: LeverChoice
    gpu: Gpu | None
    is_known_gpu: bool

    @property
    def peak_tflops(self) -> float | None:
        return self.gpu.tflops if self.gpu is not None and self.is_known_gpu else None

    def list_levers(self) -> dict[str, Any]:
        reasons = self.choice.reasons
        return {
            get_key(name): {"value": value, "reason": reasons.get(name, "as the recipe says")}
            for name, value in vars(self.choice.levers).items()
        }

    def list_prediction(self) -> dict[str, Any] | None:
        fit = self.choice.fit
        return None if fit is None else {"peak_memory_bytes": fit.gpu_peak_bytes, **vars(fit)}

    def report_to(self, record: Record) -> None:
        if self.gpu is None:
            return
        for name, reason in self.choice.reasons.items():
            record.report(f"memory.{get_key(name)}: {getattr(self.choice.levers, name)}, {reason}")
        if num_layers := self.choice.levers.offloaded_layers:
            record.report(
                f"host memory for what {num_layers} layers save is page-locked in the first step, which takes longer"
            )
        fit = self.choice.fit
        if fit is not None and fit.verdict != "fits":
            record.warn(f"the ledger says {fit.verdict.replace('_', ' ')}{self.format_peak()}")
        if not any("expandable_segments:True" in os.environ.get(name, "") for name in ALLOCATOR_SETTINGS):
            record.report("expandable segments are off: the allocator loses memory to fragments at long rows")

    def explain_host(self, plan: RunPlan) -> list[str]:
        """What to know where the GPU would wait for this machine's processor; [] where it does not, or is unknown."""
        if self.gpu is None or not self.is_known_gpu:
            return []
        costs = self.gpu.host
        costs = replace(costs, core_speed=costs.yardstick / measure_core_milliseconds())
        job = make_job(plan.recipe, plan.shape, plan.levers, gpus_per_node=self.gpu.gpus_per_node)
        bound = find_host_bound(job, replace(self.gpu, host=costs))
        return [] if bound is None else [f"steps are limited {bound.explain()[0]}", bound.explain()[1]]

    def explain_attention(self, plan: RunPlan, kernels: Collection[str], lengths: Sequence[int]) -> list[str]:
        """What the run's kernels cost where a package has a faster one; [] where none has, or it is unknown.
        `lengths`: of the documents in a typical row."""
        if self.gpu is None or not self.is_known_gpu or not set(kernels) & set(PACKED_KERNELS) or not sum(lengths):
            return []
        job = make_job(plan.recipe, plan.shape, plan.levers, gpus_per_node=self.gpu.gpus_per_node)
        as_long = max(
            1, sum(length * length for length in lengths) // sum(lengths)
        )  # equal ones with as much attention
        words = explain_packed(replace(job, document_tokens=as_long), self.gpu)
        return [f"attention: {words}"] if words else []

    def format_peak(self) -> str:
        fit = self.choice.fit
        return f" (predicted {fit.gpu_peak_bytes / GIB:.2f} of {fit.gpu_capacity_bytes / GIB:.2f})" if fit else ""
