"""Compares early stopping with transformers' EarlyStoppingCallback on random losses."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

from ulysses_cli.plan.schedule import choose_best, has_stalled
from ulysses_cli.train.evaluation import ModelChoice

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


def test_an_early_stop_says_by_how_much_and_how_to_train_on() -> None:
    state: Any = SimpleNamespace(measured={2: 3.5, 4: 3.202}, measure=None, step=4, num_steps=30)
    lines = list[str]()
    ModelChoice(lambda _: None, 1, 5.0, lines.append).judge(state)
    assert lines == [
        "early stop after step 4: evaluation loss has not improved by more than 5 for 1 evaluation; the best was "
        "evaluation loss 3.202, at step 4; to train on, use --resume auto and a larger run.early_stopping_patience"
    ]
    assert state.num_steps == 4
