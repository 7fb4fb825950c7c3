"""Counts steps whose loss or gradient is not finite and names their rows. The engine has not applied such steps."""

from __future__ import annotations

import math
from collections.abc import Callable

from ulysses_cli.data.steps import NO_ROW
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.train.processes.consistency import gather_values
from ulysses_cli.train.train_state import StepResult, TrainState


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
