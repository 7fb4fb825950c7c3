"""Where a run stands: what does not change while it trains, the numbers that do, and what one step was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ulysses_cli.data.steps import Batching, Rows, StepPlan
from ulysses_cli.train.engine import Engine, Update
from ulysses_cli.train.guard.stop_conditions import StopConditions
from ulysses_cli.train.processes.groups import Groups


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step was."""

    plan: StepPlan
    loss: float
    update: Update
    micro_losses: tuple[float, ...]  # this rank's own


@dataclass(eq=False)
class TrainState:
    """A run on its way: what does not change, and the three numbers that do."""

    engine: Engine
    groups: Groups
    rows: Rows
    batching: Batching
    num_steps: int
    end: int  # rows of the whole run
    stop: StopConditions
    before: Sequence[Callable[[TrainState], None]] = ()
    after: Sequence[Callable[[TrainState, StepResult], None]] = ()
    step: int = 0
    position: int = 0
    optimizer_steps: int = 0
    last_eval_step: int = -1
    step_seconds: float = 0.0  # of the step before, on this rank
    phase: str = ""
