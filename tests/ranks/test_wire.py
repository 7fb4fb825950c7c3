"""Tests gradients sent in bfloat16 on one rank and between two: they have the bits of float32 sums; elsewhere float32
is the default."""

from typing import Any

import pytest
import torch
from support.rank_pool import run_on_ranks
from support.run_harness import RunHarness
from support.training import MemoryRows, make_recipe

from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.train.loop import train

ROWS = [[(40, 0), (20, 0)], [(64, 0)], [(5, 0), (9, 9), (3, 0), (20, 15)], [(50, 40)]]


def run(recipe: Recipe) -> tuple[list[float], dict[str, torch.Tensor], list[torch.dtype]]:
    """Returns losses, weights, and the dtypes of the buckets in which gradients travelled."""
    harness = RunHarness(recipe, MemoryRows(ROWS), 6)
    train(harness.train_state)
    buckets: Any = harness.built.engine.wrapped.optimizer.ipg_buckets
    return harness.losses, harness.read_weights(), [bucket.buffer.dtype for bucket in buckets.values()]


@pytest.mark.check
@pytest.mark.parametrize(
    ("num_ranks", "more"), [(2, ()), pytest.param(1, ("train.gradient_accumulation_steps=2",), marks=pytest.mark.full)]
)
def test_bfloat16_gradients_lose_no_bit(num_ranks: int, more: tuple[str, ...]) -> None:
    words = (f"parallel.sp_size={num_ranks}", "model.dtype=bfloat16", *more)
    words += ("deepspeed.zero_optimization.reduce_bucket_size=5000",)
    results = run_on_ranks(num_ranks, run, make_recipe(*words))
    reference = run_on_ranks(num_ranks, run, make_recipe(*words, "deepspeed.communication_data_type=fp32"))
    for (losses, weights, dtypes), (expected, expected_weights, others) in zip(results, reference, strict=True):
        assert (dtypes, others) == ([torch.bfloat16], [torch.float32])
        assert losses == expected
        assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)
