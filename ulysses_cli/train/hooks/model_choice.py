"""Acts on the loss of each evaluation: saves the best model so far, and ends a run whose loss no longer falls."""

from __future__ import annotations

from collections.abc import Callable

from ulysses_cli.plan.models.model_choice import choose_best, count_without_progress, has_stalled
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.train.train_state import TrainState


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
        """Collective over all ranks: all of them know the same losses."""
        losses = state.eval_losses
        best = choose_best(losses, losses)
        if best == state.step:
            self.save(state)
        if state.step < state.num_steps and has_stalled(losses, self.patience, self.threshold):
            state.num_steps = state.step
            lowest = "" if best is None else f"; the lowest was {losses[best]:.4g}, at step {best}"
            count = format_count(count_without_progress(losses, self.threshold), "evaluation")
            self.report(f"early stop after step {state.step}: the loss has not fallen for {count}{lowest}")
