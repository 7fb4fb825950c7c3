"""Assembles a run from process groups, a resolved plan and rows: engine, train state and checkpoint context. `train`,
`verify`, `bench` and the tests all use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ulysses_cli.data.batching import make_batching
from ulysses_cli.data.steps import Batching, Rows
from ulysses_cli.plan.resolved import RunPlan
from ulysses_cli.train.assembly.build import Built, build
from ulysses_cli.train.assembly.parts import REAL_PARTS, Parts
from ulysses_cli.train.attention.kernels.workload import measure_mix
from ulysses_cli.train.checkpoint.format import CheckpointContext
from ulysses_cli.train.guard.stop_conditions import StopConditions
from ulysses_cli.train.objective import Objective
from ulysses_cli.train.processes.consistency import gather_values
from ulysses_cli.train.processes.groups import Groups
from ulysses_cli.train.processes.randomness import seed_all
from ulysses_cli.train.train_state import TrainState


@dataclass(frozen=True)
class RunLength:
    """The number of steps, and the position in the stream of rows where the run ends."""

    num_steps: int
    end: int


@dataclass(frozen=True, eq=False)
class AssembledRun:
    """One rank's run before its first step."""

    plan: RunPlan
    built: Built
    state: TrainState
    context: CheckpointContext


def assemble_run(
    plan: RunPlan,
    groups: Groups,
    device: torch.device,
    rows: Rows,
    length: RunLength | int,
    *,
    eval_rows: Rows | None = None,
    batching: Batching | None = None,
    stop: StopConditions | None = None,
    parts: Parts = REAL_PARTS,
    report: Callable[[str], None] = lambda _: None,
    swap_folder: Path | None = None,
    objective: Objective | None = None,
) -> AssembledRun:
    """Collective over all ranks. A `length` that is a number of steps takes as many rows as they need. All ranks draw
    the model from one seed and train with seeds of their own."""
    batching = batching or make_batching(plan.recipe, plan.shape, plan.resolved)
    if isinstance(length, int):
        length = RunLength(length, length * batching.rows_per_step)
    settings = plan.recipe.run
    generates = bool(settings.sample_prompts or settings.eval_suite)
    seed_all(settings.seed)
    built = build(
        plan, groups, device, length.num_steps,
        parts=parts, report=report, mix=measure_mix(rows, eval_rows, generates=generates),
        swap_folder=swap_folder, objective=objective,
    )  # fmt: skip
    state = TrainState(built.engine, groups, rows, batching, length.num_steps, length.end, stop or StopConditions())
    context = CheckpointContext(
        built.module,
        built.engine.wrapped.optimizer,
        groups.rank,
        plan.layout.world_size,
        wait=lambda: dist.barrier(group=groups.host_group),
        gather=lambda value: gather_values(value, groups.host_group),
    )
    seed_all(settings.seed + groups.rank)
    return AssembledRun(plan, built, state, context)
