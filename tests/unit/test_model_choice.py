"""Tests which checkpoint counts as the best, what is kept for it, and when a run ends early. transformers' own early
stopping is compared in tests/one_process/test_run_parts.py."""

import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
from support.checkpoints import make_checkpoint
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.plan.recipe.recipe import Run
from ulysses_cli.plan.schedule import MEASURES, SCORE_MEASURE, choose_best, describe_stall
from ulysses_cli.run.bucket import Bucket
from ulysses_cli.run.checkpoints import (
    CheckpointError,
    choose_checkpoint,
    dump_measured,
    load_measured,
    name_share,
    prune_checkpoints,
)
from ulysses_cli.run.remote_checkpoints import Sending, bring_newest, list_remote_steps, prune_remote
from ulysses_cli.run.resume import find_resume_point

LOSSES = {2: 2.0, 4: 1.0, 6: math.inf, 8: 3.0}


def dump_losses(losses: dict[int, float]) -> dict[str, float | None]:
    return {str(step): loss if math.isfinite(loss) else None for step, loss in losses.items()}


def make_recipe(measure: str) -> dict[str, Any]:
    train = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    return {"model": {}, "data": {}, "train": train, "run": {"seed": 0, "keep_best": measure}}


def list_steps(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.glob("checkpoints/*"))


def write_evaluations(run_dir: Path, losses: dict[int, float]) -> None:
    run_dir.mkdir(exist_ok=True)
    lines = [{"step": int(step), "loss": loss} for step, loss in dump_losses(losses).items()]
    (run_dir / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_best_is_the_lowest_finite_loss_of_those_that_are_there() -> None:
    assert choose_best(LOSSES, LOSSES) == 4
    assert choose_best(LOSSES, [2, 6, 8, 9]) == 2
    assert choose_best({2: 1.0, 4: 1.0}, [4, 2]) == 2
    assert choose_best(LOSSES, [6, 9]) is None
    measured = {"eval_loss": LOSSES, "eval_suite": {4: -0.3}, "eval_rewards/margins": {2: -0.1, 4: math.inf}}
    saved = json.loads(json.dumps(dump_measured(measured)))
    assert saved["eval_losses"] == dump_losses(LOSSES)
    assert (saved["eval_scores"], saved["eval_margins"]) == ({"4": 0.3}, {"2": 0.1, "4": None}), "scores as they are"
    assert load_measured(saved) == {**measured, "eval_rewards/accuracies": {}}
    assert not any(load_measured({}).values())  # of an older version


def test_pruning_keeps_the_best_beside_the_newest(tmp_path: Path) -> None:
    for step in LOSSES:
        make_checkpoint(tmp_path, step)
    prune_checkpoints(tmp_path, 1, LOSSES)
    assert list_steps(tmp_path) == ["step-4", "step-8"]
    prune_checkpoints(tmp_path, 1, {**LOSSES, 8: 0.5})
    assert list_steps(tmp_path) == ["step-8"]


def test_a_resumed_run_knows_the_losses_of_its_state_and_of_its_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 2)
    make_checkpoint(tmp_path, 8, eval_losses=dump_losses({2: 2.0, 6: math.inf}))
    write_evaluations(tmp_path, {0: 0.01, 8: 3.0, 10: 0.1})
    point = find_resume_point(tmp_path, "auto", 0, lambda _: None)
    assert (point.measured["eval_loss"], point.best_step) == ({2: 2.0, 6: math.inf, 8: 3.0}, 2), (
        "not the base's of step 0"
    )
    assert [point.has_stalled(patience, 0.0) for patience in (1, 2, 3, None)] == [True, True, False, False]
    other = find_resume_point(tmp_path / "other", str(tmp_path / "checkpoints" / "step-8"), 0, lambda _: None)
    assert (other.measured["eval_loss"], other.best_step) == ({2: 2.0, 6: math.inf}, None)


def test_the_best_of_a_run_is_chosen_for_export(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    said: list[str] = []
    for step in (2, 8):
        make_checkpoint(tmp_path, step, eval_losses=dump_losses(LOSSES))
    assert choose_checkpoint(tmp_path, said.append, wants_best=True).name == "step-2"
    (tmp_path / "checkpoints" / "step-2" / name_share(0)).unlink()
    assert choose_checkpoint(tmp_path, said.append, wants_best=True).name == "step-8"
    make_checkpoint(tmp_path / "unmeasured", 2)
    for path in (tmp_path / "checkpoints" / "step-8", tmp_path / "unmeasured"):
        said.append(explain(choose_checkpoint, path, said.append, wants_best=True, error=CheckpointError))
    assert said == snapshot


def test_the_best_stays_in_the_bucket_and_comes_back(tmp_path: Path) -> None:
    bucket, here, there = Bucket(f"file://{tmp_path}/bucket", pauses=(0.0,)), tmp_path / "here", tmp_path / "there"
    for step in LOSSES:
        path = make_checkpoint(here, step, eval_losses=dump_losses(LOSSES), recipe=make_recipe("eval_loss"))
        Sending(bucket).send_checkpoint(path, [name_share(0), name_share(1)], 0, 1)
        prune_remote(bucket, step, 1, LOSSES)
    assert list_remote_steps(bucket) == [8, 4]
    bring_newest(bucket, there, lambda _: None)
    assert list_steps(there) == ["step-4", "step-8"]
    assert find_resume_point(there, "auto", 0, lambda _: None).best_step == 4


def test_a_score_decides_where_the_run_goes_by_it(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Higher scores are better: loss and score disagree here."""
    for step in (2, 4, 8):
        state = {"eval_losses": dump_losses(LOSSES), "eval_scores": {"2": 0.25, "4": 0.5}}
        make_checkpoint(tmp_path, step, recipe=make_recipe("eval_suite"), **state)
    (tmp_path / "quality.jsonl").write_text('{"step": 8, "score": 0.75}\n{"step": 9, "score": 1.0}\n')
    point = find_resume_point(tmp_path, "auto", 0, lambda _: None, "eval_suite")
    assert (point.measured["eval_suite"], point.best_step) == ({2: -0.25, 4: -0.5, 8: -0.75}, 8)
    assert point.measured["eval_loss"] == LOSSES
    assert [point.has_stalled(patience, threshold) for patience, threshold in ((1, 0.0), (1, 0.3))] == [False, True]
    by_loss = find_resume_point(tmp_path, "auto", 0, lambda _: None, "eval_loss")
    assert (by_loss.best_step, by_loss.has_stalled(2, 0.0)) == (4, True)
    said: list[str] = []
    assert choose_checkpoint(tmp_path, said.append, wants_best=True).name == "step-8"
    assert said == snapshot


@pytest.mark.parametrize(("measure", "value"), [("eval_rewards/accuracies", 0.875), ("eval_rewards/margins", 2.5)])
def test_the_highest_metric_of_pairs_decides_where_the_run_goes_by_it(
    tmp_path: Path, measure: str, value: float, snapshot: SnapshotAssertion
) -> None:
    """The loss is lowest at step 4, and the base's metric is the highest. A metric that is none is never the best."""
    kept = {"eval_accuracies": {"2": 0.875, "4": 0.5}, "eval_margins": {"2": 2.5, "4": 0.5}}
    for step in (2, 4, 8):
        make_checkpoint(tmp_path, step, recipe=make_recipe(measure), eval_losses=dump_losses(LOSSES), **kept)
    lines = [{"step": step, "loss": 1.0, measure.removeprefix("eval_"): one} for step, one in ((0, 9.0), (8, None))]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    point = find_resume_point(tmp_path, "auto", 0, lambda _: None, measure)
    assert point.best_step == 2
    assert point.measured[measure] == {2: -value, 4: -0.5, 8: math.inf}
    assert [point.has_stalled(patience, 0.0) for patience in (2, 3)] == [True, False]
    said: list[str] = []
    assert choose_checkpoint(tmp_path, said.append, wants_best=True).name == "step-2"
    assert said == snapshot


def test_a_recipe_may_name_each_measure() -> None:
    annotation = Run.model_fields["keep_best"].annotation
    assert set(get_args(get_args(annotation)[0])) == set(MEASURES)


def test_an_end_without_enough_progress_names_the_threshold(snapshot: SnapshotAssertion) -> None:
    assert describe_stall(None, {2: 3.5, 4: 3.2}, 5.0) == snapshot
    assert describe_stall(SCORE_MEASURE, {2: -0.5, 4: -0.5}, 0.0) == snapshot
