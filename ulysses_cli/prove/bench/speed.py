"""Times steps of the training loop on a rank, with the meter and clock of a real run. Each row is one document."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ulysses_cli.plan.flops import compute_model_flops
from ulysses_cli.plan.ledger.zero.swapping import compute_swap_need
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import settle
from ulysses_cli.prove.ranks.interleaving import Interleaving
from ulysses_cli.prove.rows import FullRows
from ulysses_cli.train.assembly.run import assemble_run
from ulysses_cli.train.hooks.metrics import Meter
from ulysses_cli.train.loop import train
from ulysses_cli.train.optimizer.swap_folder import open_folder
from ulysses_cli.train.processes.consistency import gather_values
from ulysses_cli.train.processes.device import StartError
from ulysses_cli.train.processes.groups import make_groups

GROUP_TIMEOUT = timedelta(days=1)  # the process that started the ranks ends them at its own time limit


@dataclass(frozen=True)
class Timed:
    """Measurements of the timed steps; peaks are those of the fullest rank. `seconds`: of each timed step by its
    number; `parts`: seconds of the parts of one warm-up step; `first_loss`: before any update."""

    seconds: dict[int, float]
    tokens_per_step: int
    flops_per_step: float  # of the model, per rank; recomputed operations do not count
    peak_tflops: float | None
    peak_memory_bytes: int | None
    host_peak_memory_bytes: int
    first_loss: float
    parts: dict[str, float] = field(default_factory=dict)
    communication_share: float | None = None

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.seconds.values())

    @property
    def seconds_per_token(self) -> dict[int, float]:
        return {step: seconds / self.tokens_per_step for step, seconds in self.seconds.items()}

    def get_share(self, part: str) -> float | None:
        total = sum(self.parts.values())
        return self.parts.get(part, 0.0) / total if total else None

    def describe(self) -> dict[str, Any]:
        tflops = self.flops_per_step / self.step_seconds / 1e12
        values: dict[str, Any] = {
            "tokens_per_second": self.tokens_per_step / self.step_seconds,
            "step_seconds": self.step_seconds,
            "slowest_seconds": max(self.seconds.values()),
            "tflops": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
            "peak_memory_bytes": self.peak_memory_bytes,
            "host_peak_memory_bytes": self.host_peak_memory_bytes,
            "communication_share": self.communication_share,
            "exchange_share": self.get_share("exchange"),
            "unhidden_offload_share": self.get_share("offload"),
            "first_loss": self.first_loss,
            "part_seconds": self.parts or None,
        }
        return {name: value for name, value in values.items() if value is not None}


def time_steps(
    device: torch.device,
    interleaving: Interleaving,
    recipe: Recipe,
    shape: ModelShape,
    levers: Levers,
    peak_tflops: float | None,
    num_warmup: int,
    num_steps: int,
    swap_folder: Path | None = None,
) -> Timed:
    """Collective over all ranks. `swap_folder`: made here where levers use a disk; the caller removes it when all ranks
    have ended."""
    plan = settle(recipe, shape, levers)
    groups = make_groups(plan.layout, GROUP_TIMEOUT)
    if swap_folder is not None:
        problem = open_folder(swap_folder, Path(recipe.run.output_dir), *compute_swap_need(recipe, shape, levers))
        if problem := next(filter(None, gather_values(problem, groups.host_group)), ""):
            raise StartError(problem)
    rows = FullRows(recipe.data.max_length, shape.vocab_size)
    state = assemble_run(plan, groups, device, rows, num_warmup + num_steps, swap_folder=swap_folder).state
    lines: list[dict[str, Any]] = []
    meter = Meter(partial(compute_model_flops, shape), peak_tflops, lines.append)
    state.pre_step_hooks = (lambda _: interleaving.wait_for_turn(groups.host_group), meter.start)
    state.post_step_hooks = (meter.record, lambda *_: interleaving.pass_turn())
    train(state)
    clocked = next((line for line in lines if "step_parts" in line), {})
    return Timed(
        seconds={line["step"]: line["step_seconds"] for line in lines[num_warmup:] if "step_parts" not in line},
        tokens_per_step=lines[-1]["tokens"],
        flops_per_step=lines[-1]["tflops"] * lines[-1]["step_seconds"] * 1e12,
        peak_tflops=peak_tflops,
        peak_memory_bytes=max((line["peak_memory_bytes"] or 0 for line in lines), default=0) or None,
        host_peak_memory_bytes=max(line["host_peak_memory_bytes"] for line in lines),
        first_loss=lines[0]["loss"],
        parts=clocked.get("step_parts", {}),
        communication_share=clocked.get("communication_share"),
    )
