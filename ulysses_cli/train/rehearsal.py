"""Runs one step, evaluation and save at the longest rows before training, without effect: an out-of-memory error or a
full disk shows in the first minute.

The learning rate is 0; moments, step count and random numbers are restored: losses are bitwise those without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ulysses_cli.data.steps import Batching, Rows, get_shared, plan_longest
from ulysses_cli.plan.files.regular_files import remove_own
from ulysses_cli.train.checkpoint.format import CheckpointContext, save_checkpoint
from ulysses_cli.train.evaluation import evaluate
from ulysses_cli.train.guard.stop_conditions import StopConditions
from ulysses_cli.train.loop import compare_plans, run_step
from ulysses_cli.train.processes.randomness import get_rng_states, set_rng_states
from ulysses_cli.train.train_state import TrainState


class LongestRow:
    """The longest row of a split, alone: the one for which evaluation needs most memory."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.row = max(range(len(rows)), key=lambda row: sum(rows.get_lengths(row)))

    def __len__(self) -> int:
        return 1

    def get_lengths(self, row: int) -> tuple[int, ...]:
        return self.rows.get_lengths(self.row)

    def count_targets(self, row: int) -> int:
        return self.rows.count_targets(self.row)

    def read(self, row: int, start: int, stop: int) -> Any:
        return self.rows.read(self.row, start, stop)

    def get_shared(self, row: int) -> tuple[int, ...]:
        return get_shared(self.rows, self.row)

    def get_reference(self, row: int) -> Any:
        find = getattr(self.rows, "get_reference", None)
        return find(self.row) if find is not None else np.zeros(len(self.get_lengths(row)))


def rehearse(
    state: TrainState, eval_rows: Rows | None, eval_batching: Batching, context: CheckpointContext, scratch: Path,
    report: Callable[[str], None],
) -> int:  # fmt: skip
    """Collective over all ranks. Returns the tokens of the longest row that was tried."""
    device = state.engine.device
    rng_states = get_rng_states(device)
    stop, state.stop = state.stop, StopConditions()  # no rank stops during a rehearsal
    plan = plan_longest(state.rows, state.batching)
    longest = max(max(part) for part in plan.row_tokens)
    try:
        report(f"a step at {longest:,} tokens per row")
        state.phase = "rehearsal: step"
        compare_plans(state, plan)
        run_step(state, plan, learning_rate=0.0)
        if eval_rows is not None and len(eval_rows):
            state.phase = "rehearsal: evaluation"
            evaluate(state.engine, state.groups, LongestRow(eval_rows), replace(eval_batching, seed=0))
        state.phase = "rehearsal: save"
        path = save_checkpoint(context, scratch, 0, {"rehearsal": True})
        if context.owns_disk:
            remove_own(path.parent.parent)
    finally:
        state.stop = stop
    state.engine.reset_optimizer()
    set_rng_states(rng_states, device)
    state.phase = ""
    return longest
