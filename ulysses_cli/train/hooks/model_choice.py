"""Acts on each evaluation that run.keep_best goes by: saves the best model so far, and ends a run that no longer gets
better."""

from __future__ import annotations

from collections.abc import Callable

from ulysses_cli.plan.models.model_choice import (
    choose_best,
    describe_measure,
    describe_stall,
    has_stalled,
)
from ulysses_cli.train.train_state import TrainState

TRAIN_ON = "to train on, use --resume auto and a larger run.early_stopping_patience"


class ModelChoice:
    """Called after each evaluation. `save` saves a model that is the best so far. `patience` None: no early stop."""

    def __init__(
        self,
        save: Callable[[TrainState], None],
        patience: int | None,
        threshold: float,
        report: Callable[[str], None],
    ) -> None:
        self.save, self.patience, self.threshold, self.report = save, patience, threshold, report

    def judge(self, state: TrainState) -> None:
        """Collective over all ranks: all of them know the same losses or scores."""
        losses = state.measured
        best = choose_best(losses, losses)
        if best == state.step:
            self.save(state)
        if state.step < state.num_steps and has_stalled(losses, self.patience, self.threshold):
            state.num_steps = state.step
            stall = describe_stall(state.measure, losses, self.threshold)
            highest = (
                ""
                if best is None
                else f"; the best was {describe_measure(state.measure, losses[best])}, at step {best}"
            )
            self.report(f"early stop after step {state.step}: {stall}{highest}; {TRAIN_ON}")
