"""What a run minimizes, as a value that is chosen once, where the run is built. Loop, engine and hooks know none.

An objective is a sum over targets, ranks and micro-steps, divided once; means of ranks or of micro-steps have no place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from ulysses_cli.data.steps import MicroBatch, Numbers, StepPlan
from ulysses_cli.train.loss import Loss, Places


class Objective(Protocol):
    """`names`: of what is summed, divided and written beside the loss. `eval_names`: the same of an evaluation, beside
    or instead of what it tells of targets' losses."""

    names: tuple[str, ...]
    eval_names: tuple[str, ...]

    def load(self, batch: MicroBatch, places: Numbers, send: Callable[[Any], Tensor]) -> Any:
        """What else `compute` takes of a micro-batch. `places`: of this slice's targets; `send` brings an array to the
        device."""

    def compute(self, loss: Loss, hidden: Tensor, labels: Tensor, places: Places | None, answers: Any) -> Tensor:
        """Takes what a loss takes, and what `load` has returned. Returns this rank's sums [1 + names]. The first is
        minimized: on a rank without a target it is part of the graph too."""

    def measure(self, losses: Tensor, answers: Any) -> Tensor:
        """This rank's sums [eval_names] of an evaluation, from the losses of its targets."""

    def describe(self, means: Sequence[float]) -> dict[str, Any]:
        """What is written beside the loss, from the means of `names`."""

    def count(self, plan: StepPlan) -> int:
        """What the sums of a step are divided by. It follows from the plan alone, so all ranks share it."""


class NextToken:
    """The cross-entropy of each target, on average over the targets of the step."""

    names: tuple[str, ...] = ()
    eval_names: tuple[str, ...] = ()

    def load(self, batch: MicroBatch, places: Numbers, send: Callable[[Any], Tensor]) -> None:
        return None

    def compute(self, loss: Loss, hidden: Tensor, labels: Tensor, places: Places | None, answers: Any) -> Tensor:
        return loss(hidden, labels, places)[None]

    def measure(self, losses: Tensor, answers: Any) -> Tensor:
        return losses.new_zeros(0)

    def describe(self, means: Sequence[float]) -> dict[str, Any]:
        return dict(zip(self.names, means, strict=True))

    def count(self, plan: StepPlan) -> int:
        return plan.num_targets
