"""Tests real runs that are killed and resumed, saves while steps go on, and saves that fail. benchmarks/faults.py kills
many more."""

import errno
import random
import re
import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from support.faults import Runs, damage_newest, wait_until
from support.rank_pool import RankError, run_on_ranks
from support.run_harness import ROWS, RunHarness
from support.tiers import sample
from support.training import MemoryRows, make_recipe

from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.run.checkpoints import find_damage
from ulysses_cli.train.checkpoint import format as checkpoint
from ulysses_cli.train.checkpoint.saves import SavePolicy
from ulysses_cli.train.loop import train

ASYNC = SavePolicy(is_async=True)


def save_beside_steps(recipe: Recipe, folder: str) -> tuple[list[float], list[float]]:
    """Saves after step 2 while steps go on, and once more without a thread, for comparison."""
    harness = RunHarness(recipe, MemoryRows(ROWS), 6, folder, policy=ASYNC)
    harness.train_until(2)
    harness.saves.save(harness.train_state)
    checkpoint.save_checkpoint(
        harness.context, Path(folder) / "plain", 2, harness.saves.read_state(harness.train_state)
    )
    harness.train_until(6)
    harness.saves.wait_for_pending()
    ahead = harness.losses[2:]
    again = RunHarness(recipe, MemoryRows(ROWS), 6, folder)
    again.resume(folder, 2)
    train(again.train_state)
    return ahead, again.losses


@pytest.mark.check
def test_a_save_beside_steps_holds_the_step_at_which_it_began(tmp_path: Path) -> None:
    recipe = make_recipe("parallel.sp_size=2", "lora.r=4", "lora.dropout=0.1")
    for ahead, again in run_on_ranks(2, save_beside_steps, recipe, str(tmp_path)):
        assert again == ahead
        assert len(ahead) == 4
    ours, plain = (tmp_path / part / "checkpoints" / "step-2" for part in ("", "plain"))
    assert find_damage(ours) == ""
    assert sorted(file.name for file in ours.iterdir()) == sorted(file.name for file in plain.iterdir())
    for rank in range(2):
        own, reference = (load_file(path / f"rank-{rank:05d}.safetensors") for path in (ours, plain))
        assert own.keys() == reference.keys()
        assert all(torch.equal(own[name], reference[name]) for name in own)


def end_with_a_slow_save(recipe: Recipe, folder: str) -> tuple[bool, list[str]]:
    """Begins a save of step 2 on a slow disk, takes one more step and ends. Returns whether the save was still running
    then, and which checkpoints are complete."""
    harness, real = RunHarness(recipe, MemoryRows(ROWS), 3, folder, policy=ASYNC), checkpoint.write_share
    may_write = threading.Event()

    def write(*args: Any) -> Any:
        may_write.wait(60)
        return real(*args)

    harness.train_until(2)
    with mock.patch.object(checkpoint, "write_share", write):
        harness.saves.save(harness.train_state)
        harness.train_until(3)
        is_on_its_way = harness.saves.pending is not None and not harness.saves.pending.is_done
        may_write.set()
        harness.saves.save_last(harness.train_state)
    result = Path(folder, "checkpoints").iterdir()
    return is_on_its_way, sorted(path.name for path in result if not find_damage(path))


@pytest.mark.check
def test_a_run_ends_when_its_last_save_is_durable(tmp_path: Path) -> None:
    for is_on_its_way, whole in run_on_ranks(2, end_with_a_slow_save, make_recipe("parallel.sp_size=2"), str(tmp_path)):
        assert is_on_its_way
        assert whole == ["step-2", "step-3"]


def fail_to_save(recipe: Recipe, folder: str, policy: SavePolicy, bad_rank: int) -> tuple[list[str], list[float]]:
    """Saves after steps 1 and 2; on one rank the first save meets a full disk."""
    harness = RunHarness(recipe, MemoryRows(ROWS), 4, folder, policy=policy)
    harness.saves.record.warn = harness.warnings.append  # type: ignore[method-assign]
    real, left = checkpoint.write_share, [1]

    def write(beside: Path, rank: int, share: Any) -> Any:
        if rank == bad_rank and left[0]:
            left[0] -= 1
            (beside / f"rank-{rank:05d}.safetensors").write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(beside, rank, share)

    with mock.patch.object(checkpoint, "write_share", write):
        for step in (1, 2):
            harness.train_until(step)
            harness.saves.save(harness.train_state)
        harness.saves.wait_for_pending()
    return harness.warnings, harness.losses


@pytest.mark.parametrize(
    ("bad_rank", "is_async"), sample([(0, False), (0, True), (1, False), (1, True)], quick=[(0, True)], checked=())
)
def test_a_disk_that_is_full_on_one_rank_fails_the_save_on_all(tmp_path: Path, is_async: bool, bad_rank: int) -> None:
    recipe = make_recipe("parallel.sp_size=2")
    words = rf"step-1 .* rank {bad_rank}: "
    for warnings, losses in run_on_ranks(
        2, fail_to_save, recipe, str(tmp_path), SavePolicy(is_async=is_async, continue_on_error=True), bad_rank
    ):
        assert len(losses) == 2
        (warning,) = warnings
        assert re.search(words, warning)
        assert "run.on_save_error: continue" in warning
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-2"]
    assert find_damage(tmp_path / "checkpoints" / "step-2") == ""
    if not is_async and bad_rank:
        with pytest.raises(RankError, match=words):
            run_on_ranks(2, fail_to_save, recipe, str(tmp_path / "x"), SavePolicy(), bad_rank)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """`whole` is an uninterrupted run."""
    made = Runs(tmp_path_factory.mktemp("runs"))
    made.finish("whole", "train.max_steps=12")
    return made


def stop(runs: Runs, run: str) -> None:
    """Ends a run of 12 steps by a signal after its fourth."""
    process = runs.start(run, "train.max_steps=12")
    assert wait_until(process, lambda: runs.count_steps(run) >= 4)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)


@pytest.mark.full
def test_a_run_killed_twice_gives_the_bytes_of_an_uninterrupted_run(runs: Runs) -> None:
    """One rank is killed in the middle of a save. After the resume another rank is killed, and the agent restarts
    all."""
    words = ["train.max_steps=12", "run.async_save=true", "run.max_restarts=1"]
    process = runs.start("killed", *words, "run.max_restarts=0")
    assert wait_until(process, lambda: runs.count_steps("killed") >= 2)
    assert wait_until(process, lambda: any("writing" in name for name in runs.list_checkpoints("killed")), pause=0)
    process.signal_rank(1)
    _, output = process.communicate(timeout=240)
    assert process.returncode == 1, output
    assert "rank 1 was killed by SIGKILL" in output

    process = runs.start("killed", *words, "--resume", "auto")
    assert wait_until(process, lambda: runs.count_steps("killed") >= 6)
    process.signal_rank(0)
    _, output = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert output.count("resumed from killed/checkpoints/step-") == 2
    assert runs.read_losses("killed") == runs.read_losses("whole")
    assert runs.read_model("killed") == runs.read_model("whole")


@pytest.mark.full
def test_a_rank_that_hangs_is_named(runs: Runs) -> None:
    process = runs.start("hanging", "run.step_timeout=8")
    assert wait_until(process, lambda: runs.count_steps("hanging") >= 2)
    process.signal_rank(1, signal.SIGSTOP)
    _, output = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "run.step_timeout (8 s): rank 1 " in output
    assert "Current thread" in (runs.folder / "hanging" / "logs" / "rank-0.log").read_text()


@pytest.mark.full
def test_another_layout_keeps_the_rows_and_a_changed_recipe_is_refused(runs: Runs) -> None:
    stop(runs, "moved")
    code, output = runs.train("moved", "train.max_steps=12", "data.max_length=64", "--resume", "auto")
    assert code == 2
    assert "data.max_length: was 128, is 64" in output
    code, output = runs.train("moved", "train.max_steps=12", "parallel.dp_shard_size=3", "--resume", "auto")
    assert code == 2
    assert "3 x 1 row at a time" in output
    words = ["train.max_steps=12", "parallel.sp_size=1", "parallel.dp_shard_size=2", "parallel.zero_stage=2"]
    output = runs.finish("moved", *words, "--resume", "auto")
    assert "gradient_accumulation_steps: 2 -> 1" in output
    ours, reference = runs.read_losses("moved"), runs.read_losses("whole")
    assert ours == pytest.approx(reference, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", ["truncated file", "flipped byte", "missing shard", "missing manifest", "torn metrics"]
)
def test_a_damaged_checkpoint_is_skipped_and_damaged_metrics_are_repaired(runs: Runs, kind: str) -> None:
    run = kind.replace(" ", "-")
    stop(runs, run)
    damage_newest(runs.folder / run, kind, random.Random(1))
    runs.finish(run, "train.max_steps=12", "--resume", "auto")
    ours, reference = runs.read_losses(run), runs.read_losses("whole")
    assert ours.items() <= reference.items()
    assert len(reference) - len(ours) <= (
        kind == "torn metrics"
    )  # its last line is lost, and its step is not done again
    assert runs.read_model(run) == runs.read_model("whole")
