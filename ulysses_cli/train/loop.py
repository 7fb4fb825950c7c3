"""The training loop, its state, and the reasons to stop before the last step: a signal, run.max_hours, run.max_cost.
If one rank has a reason, all stop.

One loop for every recipe: a feature is a value in TrainState or a hook, never a condition here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ulysses_cli.data.steps import Batching, Rows, StepPlan, plan_step, read_micro_batch
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.schedule import LOSS_MEASURE, MEASURES
from ulysses_cli.train.clock import part_of_step
from ulysses_cli.train.engine import Engine, Update
from ulysses_cli.train.processes.consistency import compare_facts
from ulysses_cli.train.processes.groups import Groups

SIGNAL = "a signal"
LIMITS = ("run.max_hours", "run.max_cost")
REASONS = (SIGNAL, *LIMITS)


def check_progress(reason: str, num_steps: int) -> None:
    """Refuses a start that a limit ended before it made a step: a scheduler would begin the same again and again. All
    ranks know the same reason and number."""
    if reason in LIMITS and not num_steps:
        text = "was over before this start made a step, so that there is nothing new to save"
        raise RecipeError([Problem(reason, text, f"set a larger {reason}")])


class StopConditions:
    """This rank's reasons to stop."""

    def __init__(
        self,
        max_hours: float | None = None,
        max_cost: float | None = None,
        usd_per_hour: float = 0.0,
        is_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self.max_hours = max_hours
        self.max_cost = max_cost
        self.usd_per_hour = usd_per_hour
        self.is_asked = is_asked
        self.hours_before = 0.0  # of the run that is resumed
        self.started = time.monotonic()

    @property
    def hours(self) -> float:
        return self.hours_before + (time.monotonic() - self.started) / 3600

    def read_flags(self) -> tuple[int, ...]:
        is_late = self.max_hours is not None and self.hours >= self.max_hours
        is_over_cost = self.max_cost is not None and self.hours * self.usd_per_hour >= self.max_cost
        return int(self.is_asked()), int(is_late), int(is_over_cost)

    def decide(self, group: dist.ProcessGroup) -> str:
        """Collective over all ranks, on the host. Returns the reason to stop that any rank has, or '' to continue."""
        return self.name(compare_facts({}, group, *self.read_flags()))

    @staticmethod
    def name(flags: Sequence[int]) -> str:
        return next((reason for reason, flag in zip(REASONS, flags, strict=True) if flag), "")


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step."""

    plan: StepPlan
    loss: float
    update: Update
    micro_losses: tuple[float, ...]  # this rank's own
    measures: dict[str, Any] = field(default_factory=dict)  # what the objective names beside the loss


@dataclass(eq=False)
class TrainState:
    """One rank's training run: fixed parts first, then counters that change with each step."""

    engine: Engine
    groups: Groups
    rows: Rows
    batching: Batching
    num_steps: int  # an early stop lowers it
    end: int  # rows of the whole run
    stop: StopConditions
    pre_step_hooks: Sequence[Callable[[TrainState], None]] = ()
    post_step_hooks: Sequence[Callable[[TrainState, StepResult], None]] = ()
    step: int = 0
    position: int = 0
    optimizer_steps: int = 0
    last_eval_step: int = -1
    last_sample_step: int = -1
    evaluated: dict[str, dict[int, float]] = field(  # by measure and step, lower is better; the same on all ranks
        default_factory=lambda: {name: {} for name in MEASURES}
    )
    measure: str | None = None  # run.keep_best
    step_seconds: float = 0.0  # of the previous step, on this rank
    phase: str = ""

    @property
    def measured(self) -> dict[int, float]:
        """By step, what the best model and early stopping go by; lower is better."""
        return self.evaluated[self.measure or LOSS_MEASURE]

    def describe(self) -> str:
        """Where the run is, for a failure's record; '' outside of a step."""
        return f"step {self.step + 1}, {self.phase}" if self.phase else ""


LONG_STEP_SECONDS = 10  # a step that takes longer can be left between its micro-steps


def train(state: TrainState) -> str:
    """Collective over all ranks. Returns why training stopped early, or '' when all steps are done."""
    while state.step < state.num_steps:
        plan = plan_step(state.rows, state.batching, state.position, state.end)
        reason, seconds = compare_plans(state, plan)
        if reason:
            return reason
        for hook in state.pre_step_hooks:
            hook(state)
        started = time.monotonic()
        learning_rate = state.engine.learning_rate_at(state.step)
        result = run_step(state, plan, learning_rate, may_leave=seconds >= LONG_STEP_SECONDS)
        if isinstance(result, str):
            return result
        state.step_seconds = time.monotonic() - started
        state.step += 1
        state.position = plan.next_position
        state.optimizer_steps += int(result.update.was_applied)
        for post_step_hook in state.post_step_hooks:
            post_step_hook(state, result)
    return ""


def compare_plans(state: TrainState, plan: StepPlan) -> tuple[str, int]:
    """Collective over all ranks: checks that all are about to run the same step. Returns the reason to stop here that
    any rank has, or '', and the previous step's seconds on the slowest rank."""
    state.phase = "comparing plans"
    facts: dict[str, Any] = {"step": state.step, **plan.list_facts()}
    local_flags = (*state.stop.read_flags(), int(state.step_seconds))
    *flags, seconds = compare_facts(facts, state.groups.host_group, *local_flags)
    return state.stop.name(flags), seconds


def run_step(state: TrainState, plan: StepPlan, learning_rate: float, *, may_leave: bool = False) -> StepResult | str:
    """Collective over all ranks: each runs the same number of micro-steps, so the engine's collectives match. With
    `may_leave`, the same on all ranks, stop conditions are checked between micro-steps too; the step then ends before
    its update and the reason is returned."""
    engine, axis = state.engine, state.groups.sp_axis
    engine.set_learning_rate(learning_rate)
    divisor, sums = engine.objective.count(plan), []
    for micro_step in range(plan.num_micro_steps):
        state.phase = f"micro-step {micro_step + 1} of {plan.num_micro_steps}"
        if may_leave and micro_step and (reason := state.stop.decide(state.groups.host_group)):
            return reason
        with part_of_step("data"):
            batch = read_micro_batch(state.rows, plan, state.groups.dp_index, micro_step, axis.rank, axis.size)
        sums.append(engine.train_micro_step(batch, divisor))
    state.phase = "update"
    local_sums = torch.stack(sums)
    loss, *measured = (engine.sum_over_ranks(local_sums.sum(0)) / (divisor or 1)).tolist()
    measures, own_losses = engine.objective.describe(measured), tuple(local_sums[:, 0].tolist())
    return StepResult(plan, loss, engine.read_update(learning_rate), own_losses, measures)


def every(period: int | None, hook: Callable[[TrainState], None]) -> Callable[[TrainState, StepResult | None], None]:
    """A post-step hook that runs `hook` each `period`-th step, or never where there is no period. After the last step
    it is the run's end that calls `hook`."""

    def run_if_due(state: TrainState, _: StepResult | None) -> None:
        if period and state.step % period == 0 and state.step < state.num_steps:
            hook(state)

    return run_if_due
