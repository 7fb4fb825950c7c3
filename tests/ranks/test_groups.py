"""Tests the process groups of a layout: which ranks are in them, and how long they wait; and that a choice which rank 0
makes reaches all ranks, or its error does."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_pool import run_on_ranks
from support.run_harness import ROWS, RunHarness
from support.training import MemoryRows, make_recipe

from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.train.loop import train
from ulysses_cli.train.model.parts import choose_on_first
from ulysses_cli.train.processes.groups import make_groups


def describe_groups(layout: Layout) -> tuple[int, int, list[int] | None]:
    groups = make_groups(layout, timedelta(seconds=60))
    shared = dist.get_process_group_ranks(groups.sp_group) if groups.sp_group is not None else None
    return groups.sp_axis.rank, groups.sp_axis.size, shared


def test_ranks_of_one_row_have_a_group_and_a_rank_of_its_own_has_none() -> None:
    assert run_on_ranks(2, describe_groups, Layout(dp_shard_size=2)) == [(0, 1, None), (0, 1, None)]
    assert run_on_ranks(2, describe_groups, Layout(sp_size=2)) == [(0, 2, [0, 1]), (1, 2, [0, 1])]


def wait_for_a_late_rank(is_watched: bool, events: Path) -> str:
    """Rank 1 comes later than the groups' time-out, as a rank does that writes a large model. Unwatched, it comes when
    rank 0 has given up."""
    limit = 1.0
    groups = make_groups(Layout(sp_size=2), timedelta(seconds=limit))
    if is_watched:
        groups.wait_without_limit()
    if groups.rank:
        while not (events / ("waiting" if is_watched else "given up")).exists():
            time.sleep(0.01)
        time.sleep(1.3 * limit if is_watched else 0)
    try:
        if not groups.rank:
            (events / "waiting").touch()
        dist.barrier(group=groups.sp_group)
    except RuntimeError as error:
        (events / "given up").touch()
        return type(error).__name__
    return ""


@pytest.mark.check
def test_a_watched_run_waits_for_a_late_rank(tmp_path: Path) -> None:
    assert run_on_ranks(2, wait_for_a_late_rank, True, tmp_path) == ["", ""]
    assert run_on_ranks(2, wait_for_a_late_rank, False, tmp_path)[0], "without, the time-out holds"


def choose(error: Exception | None) -> str:
    """Rank 1 must not be asked. Returns the choice, or the error with its type."""
    groups = make_groups(Layout(sp_size=2), timedelta(seconds=60))

    def find() -> str:
        assert groups.is_first
        if error is not None:
            raise error
        return "this one"

    try:
        return choose_on_first(groups, find)
    except Exception as caught:  # noqa: BLE001 - its type is the result
        return f"{type(caught).__name__}: {caught}"


def test_all_ranks_get_rank_0s_choice_or_its_error() -> None:
    assert run_on_ranks(2, choose, None) == ["this one"] * 2
    assert run_on_ranks(2, choose, ValueError("no kernel")) == ["BuildError: no kernel"] * 2
    assert run_on_ranks(2, choose, MemoryError("full")) == ["MemoryError: full", "RuntimeError: rank 0: full"]


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
