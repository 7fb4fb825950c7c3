"""Tests a training in stages: the second starts from the first one's weights and moments, with rows, a schedule and
positions of its own, and resumes like any run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.faults import Runs
from support.rank_pool import run_on_ranks
from support.run_harness import RunHarness
from support.small_run import make_settings
from support.training import MemoryRows, make_plain_model, make_recipe, measure_difference, train_plainly
from torch import Tensor

from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.train.checkpoint.format import load_start
from ulysses_cli.train.loop import train

ROWS = ([[(30, 0)], [(20, 5), (12, 0)]], [[(64, 0)], [(40, 0), (24, 3)], [(50, 9)]])
NUM_STEPS = (2, 3)
RATES = ("train.learning_rate=0.003", "train.lr_scheduler_type=constant", "train.warmup_steps=0")
STAGES = (
    make_recipe(*RATES, "parallel.sp_size=2", "data.max_length=32", "model.rope_theta=1e4"),
    make_recipe(*RATES, "parallel.zero_stage=1", "train.learning_rate=0.001", "model.rope_theta=1e6"),
)


def run_stage(
    recipe: Recipe, stage: int, folder: str, source: str = "", with_moments: bool = True
) -> tuple[list[list[int]], list[float], dict[str, Tensor]]:
    """Returns the rows of each step, the losses and the weights at the end. Leaves a checkpoint."""
    harness = RunHarness(recipe, MemoryRows(ROWS[stage]), NUM_STEPS[stage], folder)
    if source:
        saved = load_start(harness.context, Path(source), with_moments=with_moments)
        assert (saved["step"], harness.train_state.step, harness.train_state.position) == (NUM_STEPS[0], 0, 0)
    train(harness.train_state)
    harness.saves.save(harness.train_state)
    return [list(result.plan.rows) for result in harness.results], harness.losses, harness.read_plain_weights()


def set_base(model: Any, theta: float) -> None:
    rotary = model.model.rotary_emb
    size = 2 * len(rotary.inv_freq)
    rotary.inv_freq.copy_(theta ** (-torch.arange(0, size, 2) / size))


@pytest.mark.parametrize("with_moments", [True, False])
def test_a_second_stage_goes_on_from_the_first(tmp_path: Path, with_moments: bool) -> None:
    """Plain torch on one process trains both stages: with one AdamW, or with a new one for the second. The stages have
    other layouts, rows, learning rates and bases of positions."""
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    steps, losses, weights = run_on_ranks(2, run_stage, STAGES[0], 0, one)[0]
    source = f"{one}/checkpoints/step-{NUM_STEPS[0]}"
    more, later, last = run_on_ranks(1, run_stage, STAGES[1], 1, two, source, with_moments)[0]
    model = make_plain_model(STAGES[0])
    set_base(model, 1e4)
    rows = MemoryRows(ROWS[0])
    first = train_plainly(model, rows, steps, STAGES[0], [0.003] * NUM_STEPS[0])
    assert losses == pytest.approx(first.losses, rel=1e-5)
    assert measure_difference(weights, first.weights) < 1e-5
    if with_moments:
        model = make_plain_model(STAGES[0])
        rows.documents += MemoryRows(ROWS[1]).documents
        remaining = sum(len(rows.documents[row]) for step in steps for row in step)

        def switch(module: Any, *_: object) -> None:
            nonlocal remaining
            set_base(module, 1e4 if remaining > 0 else 1e6)
            remaining -= 1

        model.register_forward_pre_hook(switch)
        whole = [*steps, *([len(ROWS[0]) + row for row in step] for step in more)]
        expected = train_plainly(model, rows, whole, STAGES[1], [0.003] * NUM_STEPS[0] + [0.001] * NUM_STEPS[1])
    else:
        set_base(model, 1e6)
        expected = train_plainly(model, MemoryRows(ROWS[1]), more, STAGES[1], [0.001] * NUM_STEPS[1])
    assert later == pytest.approx(expected.losses[-NUM_STEPS[1] :], rel=1e-5)
    assert measure_difference(last, expected.weights) < 1e-5


@pytest.mark.full
def test_a_recipe_of_two_stages_in_miniature_resumes_into_its_second(tmp_path: Path) -> None:
    """By the command, on two ranks. The second stage, stopped and resumed, is the one that was never stopped."""
    runs = Runs(tmp_path)
    common = {"parallel": {"sp_size": 2}, "run": {"save_steps": 2, "save_total_limit": None, "rehearsal": False}}
    config = {**make_settings()["model"]["config"], "rope_theta": 1e4, "max_position_embeddings": 64}
    for name, length, theta, more in (("one", 64, 1e4, {}), ("two", 256, 1e6, {"start_from": "one"})):
        settings = make_settings(
            config, **{**common, "run": {**common["run"], **more}}, data={"max_length": length},
            train={"max_steps": 4, "warmup_steps": 1},
        )  # fmt: skip
        settings["model"]["rope_theta"] = theta
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "r.yaml").write_text((tmp_path / "one.yaml").read_text())
    runs.finish("one")
    (tmp_path / "r.yaml").write_text((tmp_path / "two.yaml").read_text())
    output = runs.finish("two")
    assert "step 1 starts from the weights and moments of one/checkpoints/step-4, after its step 4" in output
    losses = runs.read_losses("two")
    assert sorted(losses) == [1, 2, 3, 4]
    lines = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["learning_rate"] < lines[1]["learning_rate"], "a warm-up of its own"
    state = json.loads((tmp_path / "two" / "checkpoints" / "step-4" / "state.json").read_text())
    assert (state["step"], state["optimizer_steps"]) == (4, 8)
    output = runs.finish("again", "--resume", "two/checkpoints/step-2")
    assert "step 1 starts from" not in output
    assert runs.read_losses("again") == {step: losses[step] for step in (3, 4)}
    assert runs.read_model("again") == runs.read_model("two")
    exported = json.loads((tmp_path / "two" / "model" / "config.json").read_text())
    assert (exported["rope_parameters"]["rope_theta"], exported["max_position_embeddings"]) == (1e6, 256)
    card = (tmp_path / "two" / "model" / "README.md").read_text()
    assert "Its training went on from the weights of an earlier run" in card
    assert "start_from" not in card.partition("```yaml")[2].replace("start_from: null", "")
    output = runs.finish("bare", "run.start_moments=false")
    assert "step 1 starts from the weights of one/checkpoints/step-4" in output
    assert runs.read_losses("bare")[1] == losses[1]
    assert runs.read_losses("bare")[3] != losses[3]
