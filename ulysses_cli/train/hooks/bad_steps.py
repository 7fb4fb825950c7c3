"""Steps whose loss or gradient is not finite: the engine has not applied them; here rows are named and counted."""

from __future__ import annotations

import math
from collections.abc import Callable

from ulysses_cli.data.steps import NO_ROW
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.train.processes.consistency import gather_values
from ulysses_cli.train.train_state import StepResult, TrainState


class BadStepsError(RuntimeError):
    """Too many of them."""


class BadSteps:
    """A hook after each step."""

    def __init__(self, limit: int, warn: Callable[[str], None]) -> None:
        self.limit, self.warn = limit, warn
        self.count = 0

    def judge(self, state: TrainState, result: StepResult) -> None:
        """Whether a step was applied is the same on all ranks, so all come to the collective or none."""
        if result.update.was_applied:
            return
        self.count += 1
        dealt = result.plan.shares[state.groups.dp_index]
        own = [
            result.plan.rows[member]
            for micro_step, loss in enumerate(result.micro_losses)
            if not math.isfinite(loss)
            for member in dealt[micro_step]
            if member != NO_ROW
        ]
        found = sorted({row for rows in gather_values(own, state.groups.host_group) for row in rows})
        rows = ", ".join(map(str, found or result.plan.rows))
        what = f"loss {result.loss:.4g}, gradient norm {result.update.grad_norm:.4g}, rows {rows}"
        self.warn(f"step {state.step} was not applied: {what}")
        if self.count > self.limit:
            raise BadStepsError(
                f"{format_count(self.count, 'step without a finite loss and gradient')}, "
                f"{self.limit} allowed (run.max_bad_steps); "
                f"the last: {what}"
            )
