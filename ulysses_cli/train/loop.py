"""The training loop. One for every recipe: a feature is a value in Course or a chore, never a condition here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ulysses_cli.data.steps import Batching, Rows, StepPlan, plan_step, read_micro_batch
from ulysses_cli.train.agreement import compare_facts
from ulysses_cli.train.clock import part_of_step
from ulysses_cli.train.engine import Engine, Update
from ulysses_cli.train.groups import Groups
from ulysses_cli.train.stop import StopWishes

LONG_STEP_SECONDS = 10  # a step that takes longer can be left between its micro-steps


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step was."""

    plan: StepPlan
    loss: float
    update: Update
    micro_losses: tuple[float, ...]  # this rank's own


@dataclass(eq=False)
class Course:
    """A run on its way: what does not change, and the three numbers that do."""

    engine: Engine
    groups: Groups
    rows: Rows
    batching: Batching
    num_steps: int
    end: int  # rows of the whole run
    wishes: StopWishes
    before: Sequence[Callable[[Course], None]] = ()
    after: Sequence[Callable[[Course, StepResult], None]] = ()
    step: int = 0
    position: int = 0
    optimizer_steps: int = 0
    last_eval_step: int = -1
    step_seconds: float = 0.0  # of the step before, on this rank
    phase: str = ""


def train(course: Course) -> str:
    """-> why it ended; '' when all steps are done. Collective over all ranks."""
    while course.step < course.num_steps:
        plan = plan_step(course.rows, course.batching, course.position, course.end)
        reason, seconds = agree(course, plan)
        if reason:
            return reason
        for chore in course.before:
            chore(course)
        started = time.monotonic()
        result = run_step(
            course, plan, course.engine.learning_rate_at(course.step), may_leave=seconds >= LONG_STEP_SECONDS
        )
        if isinstance(result, str):
            return result
        course.step_seconds = time.monotonic() - started
        course.step += 1
        course.position = plan.next_position
        course.optimizer_steps += int(result.update.was_applied)
        for follow_up in course.after:
            follow_up(course, result)
    return ""


def agree(course: Course, plan: StepPlan) -> tuple[str, int]:
    """All ranks are about to do the same -> why all stop here, since one of them wishes it, and the seconds that the
    step before took on the slowest."""
    course.phase = "comparing plans"
    facts: dict[str, Any] = {"step": course.step, **plan.list_facts()}
    mine = (*course.wishes.read_flags(), int(course.step_seconds))
    *flags, seconds = compare_facts(facts, course.groups.host_group, *mine)
    return course.wishes.name(flags), seconds


def run_step(course: Course, plan: StepPlan, learning_rate: float, *, may_leave: bool = False) -> StepResult | str:
    """Every rank of the world runs the same number of micro-steps; the engine's collectives match by that. With
    `may_leave`, the same on all ranks, a wish to stop is heard between micro-steps too -> its reason: nothing of the
    step has happened to the weights."""
    engine, axis = course.engine, course.groups.sp_axis
    engine.set_learning_rate(learning_rate)
    losses = []
    for micro_step in range(plan.num_micro_steps):
        course.phase = f"micro-step {micro_step + 1} of {plan.num_micro_steps}"
        if may_leave and micro_step and (reason := course.wishes.agree(course.groups.host_group)):
            return reason
        with part_of_step("data"):
            batch = read_micro_batch(course.rows, plan, course.groups.dp_index, micro_step, axis.rank, axis.size)
        losses.append(engine.train_micro_step(batch, plan.num_targets))
    course.phase = "update"
    own = torch.stack(losses)
    total = engine.sum_over_ranks(own.sum()).item() / max(1, plan.num_targets)
    return StepResult(plan, total, engine.read_update(learning_rate), tuple(own.tolist()))


def every(period: int, chore: Callable[[Course], None]) -> Callable[[Course, StepResult | None], None]:
    """A chore of each `period`-th step; the last step's is done at the end of the run."""

    def due(course: Course, _: StepResult | None) -> None:
        if course.step % period == 0 and course.step < course.num_steps:
            chore(course)

    return due
