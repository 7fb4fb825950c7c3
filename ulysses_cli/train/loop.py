"""The training loop. One for every recipe: a feature is a value in TrainState or a hook, never a condition here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ulysses_cli.data.steps import StepPlan, plan_step, read_micro_batch
from ulysses_cli.train.processes.consistency import compare_facts
from ulysses_cli.train.telemetry.clock import part_of_step
from ulysses_cli.train.train_state import StepResult, TrainState

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
    loss, *measured = (engine.sum_over_ranks(local_sums.sum(0)) / max(1, divisor)).tolist()
    measures, own_losses = engine.objective.describe(measured), tuple(local_sums[:, 0].tolist())
    return StepResult(plan, loss, engine.read_update(learning_rate), own_losses, measures)


def every(period: int, hook: Callable[[TrainState], None]) -> Callable[[TrainState, StepResult | None], None]:
    """A post-step hook that runs `hook` each `period`-th step. The last step's run is left to completion.finish."""

    def run_if_due(state: TrainState, _: StepResult | None) -> None:
        if state.step % period == 0 and state.step < state.num_steps:
            hook(state)

    return run_if_due
