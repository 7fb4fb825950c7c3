"""The training loop's state: fixed parts, counters that change with each step, and the result of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ulysses_cli.data.steps import Batching, Rows, StepPlan
from ulysses_cli.plan.models.model_choice import SCORE
from ulysses_cli.train.engine import Engine, Update
from ulysses_cli.train.guard.stop_conditions import StopConditions
from ulysses_cli.train.processes.groups import Groups


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
    eval_losses: dict[int, float] = field(default_factory=dict)  # by step, the same on all ranks
    eval_lacks: dict[int, float] = field(default_factory=dict)  # what scores of run.eval_suite lack to 1: the same
    measure: str | None = None  # run.keep_best
    step_seconds: float = 0.0  # of the previous step, on this rank
    phase: str = ""

    @property
    def measured(self) -> dict[int, float]:
        """By step, what the best model and early stopping go by; lower is better."""
        return self.eval_lacks if self.measure == SCORE else self.eval_losses
