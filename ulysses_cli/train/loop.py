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
    """-> why it ended; '' when all steps are done. Collective over all ranks."""
    while state.step < state.num_steps:
        plan = plan_step(state.rows, state.batching, state.position, state.end)
        reason, seconds = agree(state, plan)
        if reason:
            return reason
        for hook in state.before:
            hook(state)
        started = time.monotonic()
        result = run_step(
            state,
            plan,
            state.engine.learning_rate_at(state.step),
            may_leave=seconds >= LONG_STEP_SECONDS,
        )
        if isinstance(result, str):
            return result
        state.step_seconds = time.monotonic() - started
        state.step += 1
        state.position = plan.next_position
        state.optimizer_steps += int(result.update.was_applied)
        for follow_up in state.after:
            follow_up(state, result)
    return ""


def agree(state: TrainState, plan: StepPlan) -> tuple[str, int]:
    """All ranks are about to do the same -> why all stop here, since one of them wishes it, and the seconds that the
    step before took on the slowest."""
    state.phase = "comparing plans"
    facts: dict[str, Any] = {"step": state.step, **plan.list_facts()}
    mine = (*state.stop.read_flags(), int(state.step_seconds))
    *flags, seconds = compare_facts(facts, state.groups.host_group, *mine)
    return state.stop.name(flags), seconds


def run_step(state: TrainState, plan: StepPlan, learning_rate: float, *, may_leave: bool = False) -> StepResult | str:
    """Every rank of the world runs the same number of micro-steps; the engine's collectives match by that. With
    `may_leave`, the same on all ranks, a wish to stop is heard between micro-steps too -> its reason: nothing of the
    step has happened to the weights."""
    engine, axis = state.engine, state.groups.sp_axis
    engine.set_learning_rate(learning_rate)
    losses = []
    for micro_step in range(plan.num_micro_steps):
        state.phase = f"micro-step {micro_step + 1} of {plan.num_micro_steps}"
        if may_leave and micro_step and (reason := state.stop.agree(state.groups.host_group)):
            return reason
        with part_of_step("data"):
            batch = read_micro_batch(state.rows, plan, state.groups.dp_index, micro_step, axis.rank, axis.size)
        losses.append(engine.train_micro_step(batch, plan.num_targets))
    state.phase = "update"
    own = torch.stack(losses)
    total = engine.sum_over_ranks(own.sum()).item() / max(1, plan.num_targets)
    return StepResult(plan, total, engine.read_update(learning_rate), tuple(own.tolist()))


def every(period: int, hook: Callable[[TrainState], None]) -> Callable[[TrainState, StepResult | None], None]:
    """A hook of each `period`-th step; the last step's is done at the end of the run."""

    def due(state: TrainState, _: StepResult | None) -> None:
        if state.step % period == 0 and state.step < state.num_steps:
            hook(state)

    return due
