"""Compares early stopping with transformers' EarlyStoppingCallback on random losses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

from ulysses_cli.plan.models.model_choice import choose_best, has_stalled

# quarters, so that a difference that equals the threshold is exact
LOSSES = st.lists(st.integers(0, 40).map(lambda quarters: quarters / 4), min_size=1, max_size=12)


@given(LOSSES, st.integers(1, 4), st.sampled_from([0.0, 0.25, 1.0]))
def test_a_run_ends_where_transformers_would_end_it(losses: list[float], patience: int, threshold: float) -> None:
    callback = EarlyStoppingCallback(patience, threshold)
    arguments = TrainingArguments(metric_for_best_model="loss", greater_is_better=False, report_to=[])
    state, seen = TrainerState(), dict[int, float]()
    for step, loss in enumerate(losses, 1):
        control = TrainerControl()
        callback.on_evaluate(arguments, state, control, {"eval_loss": loss})
        if state.best_metric is None or loss < state.best_metric:  # as its Trainer does next
            state.best_metric, state.best_global_step = loss, step
        seen[step] = loss
        assert has_stalled(seen, patience, threshold) == control.should_training_stop
        assert choose_best(seen, seen) == state.best_global_step
