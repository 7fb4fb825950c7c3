"""Tests that a checkpoint resumes for 20 steps on any number of ranks, sp_size, split of data, ZeRO stage and offload,
that a run may change its ring several times, and that models with recurrences and convolutions resume so too.

The resumed run has the same rows in the same order across the ends of several epochs. Its losses are within 1e-5 of the
uninterrupted run's.
"""

from pathlib import Path
from typing import Any

import pytest
from support.hybrids import describe_hybrid
from support.rank_pool import run_on_ranks
from support.run_harness import ROWS, Course, RunHarness, resume, train_and_save
from support.tiers import mark_by
from support.training import MemoryRows, make_recipe, measure_difference
from torch import Tensor

from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import make_layout
from ulysses_cli.run.checkpoints import find_newest_valid, load_state
from ulysses_cli.run.resume import ResumePoint, fit_accumulation

ROWS_PER_STEP, SAVED, NUM_STEPS = 4, 3, 23
# With the usual weights, losses hardly show what convolutions and recurrences do. Delta rules compute in float32: wider
# weights would show that.
RANGES = {"qwen3_5_text": 0.05, "nemotron_h": 0.2, "lfm2": 0.2, "zamba2": 0.2}
HYBRID_STEPS = 6  # of models whose steps take long: past the ends of several epochs too
# (ranks, sp_size), and which of them `make test` and `make check` include
MESHES = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
SP_2, SP_4 = "parallel.sp_size=2", "parallel.sp_size=4"
WRITERS = {
    "sp 2, stage 3": (SP_2, "parallel.zero_stage=3"),
    "dp 2, stage 1": ("parallel.dp_shard_size=2", "parallel.zero_stage=1"),
    "ring 2": (SP_2, "parallel.ring_size=2"),
}
OFFLOADS = ("memory.offload_optimizer=cpu", "memory.offload_optimizer=cpu memory.offload_param=cpu")


def fit(*overrides: str, config: dict[str, Any] | None = None) -> Recipe:
    """Sets the accumulation that `train --resume` computes for this layout."""
    recipe = make_recipe(*overrides, config=config)
    layout, dumped = make_layout(recipe), recipe.model_dump(mode="json")
    state = {"rows_per_step": ROWS_PER_STEP, "recipe": dumped}
    fitted = fit_accumulation(state, 1, 1, layout.dp_size, layout.sp_size, anyway=False)
    return make_recipe(*overrides, f"train.gradient_accumulation_steps={fitted}", config=config)


written: dict[str, tuple[str, Course]] = {}


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written.clear()
    return tmp_path_factory.mktemp("storage")


def check(storage: Path, writer: str, num_ranks: int, *overrides: str, model_type: str = "") -> None:
    config = describe_hybrid(model_type, initializer_range=RANGES[model_type]) if model_type else None
    key = f"{writer} {model_type}"
    num_steps = HYBRID_STEPS if model_type else NUM_STEPS
    if key not in written:
        folder = str(storage / key)
        given = (fit(*WRITERS[writer], config=config), MemoryRows(ROWS), folder, SAVED, num_steps)
        written[key] = folder, run_on_ranks(2, train_and_save, *given)[0]
    folder, expected = written[key]
    assert len(expected.losses) == num_steps - SAVED
    given = (fit(*overrides, config=config), MemoryRows(ROWS), folder, SAVED, num_steps)
    for ours in run_on_ranks(num_ranks, resume, *given):
        assert ours.rows == expected.rows
        assert ours.losses == pytest.approx(expected.losses, rel=1e-5)
        if overrides == WRITERS[writer]:
            assert ours.losses == expected.losses  # bitwise where nothing has changed


def list_cases() -> list[object]:
    results = []
    for writer in ("sp 2, stage 3", "dp 2, stage 1"):
        for num_ranks, sp_size in MESHES:
            for stage in (1, 2, 3):
                is_telling = (writer, num_ranks, sp_size, stage) == ("dp 2, stage 1", 2, 2, 3)
                marks = () if is_telling else pytest.mark.full
                results.append(pytest.param(writer, num_ranks, sp_size, stage, marks=marks))
    return results


@pytest.mark.full
@pytest.mark.parametrize(("writer", "num_ranks", "sp_size", "stage"), list_cases())
def test_any_layout_resumes(storage: Path, writer: str, num_ranks: int, sp_size: int, stage: int) -> None:
    sizes = {"parallel.sp_size": sp_size, "parallel.dp_shard_size": num_ranks // sp_size}
    words = [f"{key}={size}" for key, size in sizes.items() if size > 1]
    check(storage, writer, num_ranks, *words, f"parallel.zero_stage={stage}")


@pytest.mark.full
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_any_offload_resumes(storage: Path, num_ranks: int, offload: str) -> None:
    words = ["parallel.sp_size=2"] if num_ranks == 2 else []
    check(storage, "sp 2, stage 3", num_ranks, *words, *offload.split())


@pytest.mark.full
@pytest.mark.parametrize(("writer", "reader"), [("ring 2", "sp 2, stage 3"), ("sp 2, stage 3", "ring 2")])
def test_a_ring_resumes_what_another_order_wrote(storage: Path, writer: str, reader: str) -> None:
    check(storage, writer, 2, *WRITERS[reader])


READERS = {
    "sp 4, stage 3": (4, (SP_4, "parallel.zero_stage=3")),
    "sp 1, stage 1": (1, ("parallel.zero_stage=1",)),
    "dp 2, stage 2": (2, ("parallel.dp_shard_size=2", "parallel.zero_stage=2")),
    "dp 2 x sp 2": (4, (SP_2, "parallel.dp_shard_size=2")),
    "the same": (2, WRITERS["sp 2, stage 3"]),
}


@pytest.mark.parametrize(
    ("model_type", "reader"),
    [
        pytest.param(name, reader, marks=mark_by(False, (name, reader) == ("lfm2", "sp 1, stage 1")))
        for name in RANGES  # a delta net; Mamba2 with experts; short convolutions; blocks that layers share
        for reader in READERS
    ],
)
def test_a_hybrid_resumes_on_another_layout(storage: Path, model_type: str, reader: str) -> None:
    num_ranks, words = READERS[reader]
    check(storage, "sp 2, stage 3", num_ranks, *words, model_type=model_type)


RING_CHANGES = (1, 3, 4)  # the last steps of the parts of a run


def train_part(recipe: Recipe, folder: str, end: int) -> tuple[list[tuple[int, ...]], list[float], dict[str, Tensor]]:
    """Resumes from the newest checkpoint in the folder, trains until step `end` of a run and saves. Returns what this
    part did, and the weights after it."""
    harness = RunHarness(recipe, MemoryRows(ROWS), RING_CHANGES[-1], folder)
    if newest := find_newest_valid(Path(folder), pytest.fail):
        harness.saves.resume(harness.train_state, ResumePoint(newest, load_state(newest), is_own=True))
    harness.train_until(end)
    harness.saves.save(harness.train_state)
    return [tuple(result.plan.rows) for result in harness.results], harness.losses, harness.read_weights()


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.full
def test_a_run_that_changes_its_ring_twice_is_the_uninterrupted_one(tmp_path: Path, num_ranks: int) -> None:
    """In one folder: heads alone, then a ring of 2, which on 4 ranks shares heads as well, then heads alone."""
    alone = fit(f"parallel.sp_size={num_ranks}", "parallel.ring_size=1")
    ring = fit(f"parallel.sp_size={num_ranks}", "parallel.ring_size=2")
    rows, losses, weights = run_on_ranks(num_ranks, train_part, alone, str(tmp_path / "whole"), RING_CHANGES[-1])[0]
    parts = [
        run_on_ranks(num_ranks, train_part, recipe, str(tmp_path / "chain"), end)[0]
        for recipe, end in zip((alone, ring, alone), RING_CHANGES, strict=True)
    ]
    assert [row for part in parts for row in part[0]] == rows
    assert [len(part[1]) for part in parts] == [1, 2, 1]
    assert [loss for part in parts for loss in part[1]] == pytest.approx(losses, rel=1e-5)
    assert parts[0][1] == losses[:1]
    assert measure_difference(parts[-1][2], weights) < 1e-5
