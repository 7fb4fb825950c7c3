"""Tests that layers which are gathered at once are gathered before they are needed, as the ledger counts it, and that
what is trained does not depend on when."""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
from support.late_gathers import count_starts, predict_starts
from support.rank_pool import run_on_ranks
from support.real_steps import predict_step, trace_step
from support.run_harness import RunHarness
from support.training import CONFIG, MemoryRows, make_recipe

from ulysses_cli.plan.ledger import weights
from ulysses_cli.plan.ledger.job import make_job
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.train.loop import train

ROWS = [[(40, 0), (20, 0)], [(64, 0)], [(30, 0), (30, 0)]]
ZERO = "deepspeed.zero_optimization"
SMALL = ("parallel.sp_size=2", "memory.leaf_layers=true", f"{ZERO}.param_persistence_threshold=0")
NUM_STEPS = 5


def make(*words: str) -> Recipe:
    return make_recipe(
        *SMALL, "memory.gradient_checkpointing=full", f"{ZERO}.max_reuse_distance=0", *words, config=CONFIG
    )


def without_defaults() -> ExitStack:
    """Layers of this model are smaller than DeepSpeed's defaults."""
    stack = ExitStack()
    for name in ("PREFETCH", "MAX_LIVE"):
        stack.enter_context(mock.patch.object(weights, name, 1))
    return stack


def run(recipe: Recipe) -> tuple[list[float], dict[str, Any], tuple[int, int, int]]:
    with without_defaults(), count_starts() as found:
        harness = RunHarness(recipe, MemoryRows(ROWS), NUM_STEPS)
        train(harness.train_state)
        own = harness.built.engine.wrapped
        assert harness.plan.levers.leaf_layers
        last = [starts for starts in found if starts.all][-1]
        assert own.zero_prefetch_bucket_size() > 0
        return harness.losses, harness.read_weights(), (last.late, last.all, len(last.reduced))


@pytest.mark.parametrize("lora", [(), pytest.param(("lora.r=4",), marks=pytest.mark.check)])
def test_leaf_layers_are_gathered_before_they_are_needed(lora: tuple[str, ...]) -> None:
    shape = read_model_shape(CONFIG, "test")
    levers = Levers(gradient_checkpointing="full", leaf_layers=True)
    late, trained = [], []
    for words in ((f"{ZERO}.prefetch_bucket_size=1", f"{ZERO}.reduce_bucket_size=9000"), ()):
        recipe = make(*lora, *words)
        with without_defaults():
            predicted, _ = predict_starts(make_job(recipe, shape, levers), runs_all=True)
        for losses, values, starts in run_on_ranks(2, run, recipe):
            assert starts == (predicted.late, predicted.all, len(predicted.reduced))
            trained.append((losses, values))
        late.append(predicted.late)
    assert late[0] > 0
    assert late[1] == 0
    for losses, values in trained[1:]:
        assert losses == trained[0][0]
        assert all(value.equal(values[name]) for name, value in trained[0][1].items())


@pytest.mark.check
def test_a_trace_has_the_next_layer_too() -> None:
    """Of layers larger than the defaults, on tensors without data: the sizes are those of the ledger, and the user's
    own stay."""
    large = {**CONFIG, "hidden_size": 2048, "intermediate_size": 32768, "num_hidden_layers": 6}
    words, own = SMALL[:2], (f"{ZERO}.prefetch_bucket_size=50000000", f"{ZERO}.max_live_parameters=300000000")
    peaks = []
    for more in ((), own):
        recipe = make_recipe(*words, *more, config=large)
        peaks.append(predict_step(recipe))
        assert peaks[-1] == pytest.approx(trace_step(recipe), rel=0.01)
    assert peaks[0] != peaks[1]
