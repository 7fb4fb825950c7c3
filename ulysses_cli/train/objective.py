"""What a run minimizes, as a value that is chosen once, where the run is built. Loop, engine and hooks know none.

An objective is a sum over targets, ranks and micro-steps, divided once; means of ranks or of micro-steps have no place.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ulysses_cli.data.steps import StepPlan
from ulysses_cli.train.loss import Loss, Places


class Objective(Protocol):
    """`names`: of what is summed, divided and written beside the loss."""

    names: tuple[str, ...]

    def compute(self, loss: Loss, hidden: Tensor, labels: Tensor, places: Places | None) -> Tensor:
        """Takes what a loss takes, returns this rank's sums [1 + names]. The first is minimized: on a rank without a
        target it is part of the graph too."""

    def count(self, plan: StepPlan) -> int:
        """What the sums of a step are divided by. It follows from the plan alone, so all ranks share it."""


class NextToken:
    """The cross-entropy of each target, on average over the targets of the step."""

    names: tuple[str, ...] = ()

    def compute(self, loss: Loss, hidden: Tensor, labels: Tensor, places: Places | None) -> Tensor:
        return loss(hidden, labels, places)[None]

    def count(self, plan: StepPlan) -> int:
        return plan.num_targets
