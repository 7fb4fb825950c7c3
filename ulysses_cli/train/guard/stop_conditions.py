"""Reasons to stop before the last step: a signal, run.max_hours, run.max_cost. If one rank has a reason, all stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.train.processes.consistency import compare_facts

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
        self.max_hours, self.max_cost, self.usd_per_hour, self.is_asked = max_hours, max_cost, usd_per_hour, is_asked
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
