"""Tests runs with run.checkpoint_uri: real processes, killed during uploads, that go on from the bucket alone; uploads
that are slow, and uploads that fail."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from support.bucket_server import IS_INSTALLED, REASON, serve_bucket
from support.faults import Runs, wait_until
from support.rank_pool import run_on_ranks
from support.run_harness import ROWS, RunHarness
from support.training import MemoryRows, make_recipe

from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.run.bucket import Bucket
from ulysses_cli.run.checkpoints import CheckpointError, find_damage, list_checkpoints
from ulysses_cli.run.host import get_builds_folder
from ulysses_cli.run.remote_checkpoints import fetch_checkpoint, list_remote_steps, read_remote_model_steps
from ulysses_cli.train.checkpoint.saves import SavePolicy, Uploads

NUM_STEPS = 8
WORDS = (f"train.max_steps={NUM_STEPS}", "run.save_steps=2")
KILLS = [pytest.param(seed, marks=pytest.mark.full) for seed in range(10)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(tmp_path_factory.mktemp("uploads"))
    made.finish("plain", *WORDS)
    return made


def resume_elsewhere(runs: Runs, run: str, address: str, bucket: Bucket) -> str:
    """Removes the run's folder, as a machine that is gone does, and goes on from the bucket. Returns what is shown."""
    done = list_remote_steps(bucket)
    shutil.rmtree(runs.folder / run)
    err = runs.finish(run, *WORDS, f"run.checkpoint_uri={address}", "--resume", "auto")
    assert (f"resumed from {run}/checkpoints/step-{done[0]} " in err) if done else "starting at step 1" in err
    losses, plain = runs.read_losses(run), runs.read_losses("plain")
    assert losses == {step: loss for step, loss in plain.items() if step > (done[0] if done else 0)}
    assert runs.read_model(run) == runs.read_model("plain")
    assert list_remote_steps(bucket) == [NUM_STEPS, NUM_STEPS - 2]
    assert read_remote_model_steps(bucket) == (NUM_STEPS, NUM_STEPS)
    assert bucket.read("model/model.safetensors") == runs.read_model("plain")
    return err


def kill_and_resume(runs: Runs, seed: int, address: str) -> None:
    generator, run = random.Random(seed), f"killed-{seed}"
    plan: Mapping[str, Any] = {
        "moment": "upload", "ranks": generator.choice([[0], [1], [0, 1]]), "ahead": generator.randint(0, 2),
        "nth": generator.randint(1, 5), "wait": 0.0,
    }  # fmt: skip
    process = runs.start(run, *WORDS, f"run.checkpoint_uri={address}/{run}", plan=plan)
    _, err = process.communicate(timeout=240)
    assert (process.pids / "fired").exists(), err
    assert process.returncode == 1, err
    bucket = Bucket(f"{address}/{run}")
    complete = list_remote_steps(bucket)
    local = [int(path.name[5:]) for path in list_checkpoints(runs.folder / run) if not find_damage(path)]
    assert not complete or complete[0] <= local[0]
    for step in complete:
        assert fetch_checkpoint(bucket, step, runs.folder / f"copy-{seed}") == ""
    resume_elsewhere(runs, run, f"{address}/{run}", bucket)


@pytest.mark.full
def test_a_run_goes_on_from_a_folder_that_stands_for_a_bucket(runs: Runs, tmp_path: Path) -> None:
    kill_and_resume(runs, 99, f"file://{tmp_path}/bucket")


@pytest.fixture(scope="module")
def server() -> Iterator[Mapping[str, str]]:
    with serve_bucket() as environ:
        yield environ


@pytest.mark.skipif(not IS_INSTALLED, reason=REASON)
@pytest.mark.parametrize("seed", KILLS)
def test_nothing_is_lost_when_ranks_are_killed_during_uploads(
    runs: Runs, server: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
        runs.environ[name] = value
    kill_and_resume(runs, seed, "s3://runs")


def save_to(
    recipe: Recipe, folder: str, address: str, pause: float, policy: SavePolicy,
    is_hurried: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:  # fmt: skip
    """Saves after each step of three. Each file takes `pause` seconds to arrive."""
    harness = RunHarness(recipe, MemoryRows(ROWS), 3, folder, policy=policy)
    lines: list[str] = []
    bucket, put = Bucket(address, pauses=(0.0,)), Bucket.put_file

    def put_slowly(self: Bucket, *args: Any) -> None:
        time.sleep(pause)
        put(self, *args)

    machines = ["a", "b"]
    harness.saves.record.report = lines.append  # type: ignore[method-assign]
    harness.saves.record.warn = lines.append  # type: ignore[method-assign]
    harness.saves.uploads = Uploads(bucket, harness.context, machines, policy.total_limit, lines.append)
    failure, state = "", harness.train_state
    harness.saves.is_hurried = is_hurried
    with mock.patch.object(Bucket, "put_file", put_slowly):
        try:
            harness.saves.uploads.begin(-1)
            for step in (1, 2, 3):
                state.stop.is_asked = lambda: False
                harness.train_until(step)
                state.stop.is_asked = is_hurried
                (harness.saves.save_last if step == 3 else harness.saves.save)(state)
            harness.saves.finish_uploads(state)
        except CheckpointError as error:
            failure = str(error)
    return {"lines": lines, "failure": failure, "steps": list_remote_steps(bucket), "step": state.step}


@pytest.mark.full
@pytest.mark.parametrize("is_async", [False, True])
def test_a_save_waits_for_the_upload_before_it_and_says_so(tmp_path: Path, is_async: bool) -> None:
    recipe, address = make_recipe("parallel.sp_size=2"), f"file://{tmp_path}/bucket"
    policy = SavePolicy(2, is_async=is_async)
    first, second = run_on_ranks(2, save_to, recipe, str(tmp_path / "run"), address, 1.2, policy)
    assert first["failure"] == second["failure"] == ""
    assert first["steps"] == [3, 2]
    assert any(line.startswith("waiting for the upload of checkpoints/step-1") for line in first["lines"])
    assert sum(line.startswith(f"uploaded {address}/checkpoints/step-") for line in first["lines"]) == 3
    for step in (2, 3):
        assert fetch_checkpoint(Bucket(address), step, tmp_path / "copy") == ""


@pytest.mark.check
def test_a_rank_without_time_ends_the_wait_of_all(tmp_path: Path) -> None:
    """Rank 1 alone is asked to stop. No save waits, and what follows the upload in progress is not begun."""
    recipe, address = make_recipe("parallel.sp_size=2"), f"file://{tmp_path}/bucket"
    results = run_on_ranks(2, save_in_a_hurry, recipe, str(tmp_path / "run"), address)
    for result in results:
        assert (result["failure"], result["steps"]) == ("", [])
        assert any(line.endswith("an earlier one") for line in result["lines"])
        assert not any(line.startswith("uploaded ") for line in result["lines"])
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-3", "step-2", "step-1"]
    assert not any(find_damage(path) for path in list_checkpoints(tmp_path / "run"))


def save_in_a_hurry(recipe: Recipe, folder: str, address: str) -> dict[str, Any]:
    """With a limit of one checkpoint, which is not applied while an older one is on its way."""
    is_hurried = dist.get_rank() == 1
    return save_to(recipe, folder, address, 15.0, SavePolicy(1), is_hurried=lambda: is_hurried)


@pytest.mark.full
def test_a_signal_while_an_upload_waits_ends_the_run_in_time(runs: Runs, tmp_path: Path) -> None:
    words = [*WORDS, f"run.checkpoint_uri=file://{tmp_path}/bucket"]
    process = runs.start("late", *words, "run.stop_timeout=16", plan={"upload_pause": 600})
    wait_until(process, lambda: "waiting for the upload of checkpoints/step-2" in process.read_stderr())
    process.send_signal(signal.SIGTERM)
    at = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - at < 16
    assert process.returncode == 0, err
    assert "late/checkpoints/step-4 is not uploaded" in err
    assert "late/checkpoints/step-4: continue" in err
    err = runs.finish("late", *words, "--resume", "auto")
    assert "resumed from late/checkpoints/step-4 after step 4" in err
    assert f"uploaded file://{tmp_path}/bucket/checkpoints/step-4" in err
    assert runs.read_losses("late") == runs.read_losses("plain")


@pytest.mark.check
@pytest.mark.parametrize("goes_on", [False, True])
def test_an_upload_that_fails_follows_on_save_error(tmp_path: Path, goes_on: bool) -> None:
    (tmp_path / "file").touch()
    recipe, address = make_recipe("parallel.sp_size=2"), f"file://{tmp_path}/file"
    run: Callable[..., Any] = save_without_listing
    results = run_on_ranks(2, run, recipe, str(tmp_path / "run"), address, SavePolicy(continue_on_error=goes_on))
    for result in results:
        assert bool(result["failure"]) is not goes_on
        assert result["step"] == (3 if goes_on else 2)
        text = "\n".join(result["lines"]) + result["failure"]
        assert f"{address}/below/checkpoints/step-1 was not" in text
        assert ("continues" in text) is goes_on
    newest = list_checkpoints(tmp_path / "run")[0]
    assert find_damage(newest) == ""
    assert newest.name == ("step-3" if goes_on else "step-1")


def save_without_listing(recipe: Recipe, folder: str, address: str, policy: SavePolicy) -> dict[str, Any]:
    """The address cannot be listed either, so nothing is set aside there."""
    Uploads.begin = lambda *_: None  # type: ignore[method-assign, assignment]
    result = save_to(recipe, folder, f"{address}/below", 0.0, policy)
    return result


@pytest.mark.full
@pytest.mark.skipif(not IS_INSTALLED, reason=REASON)
def test_model_data_and_checkpoints_are_all_in_a_bucket(
    runs: Runs, server: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = str(get_builds_folder(os.environ).parent)  # operators are built below the home too
    for name, value in {**server, "HOME": str(tmp_path), "XDG_CACHE_HOME": cache}.items():
        monkeypatch.setenv(name, value)
        monkeypatch.setitem(runs.environ, name, value)
    bucket, model = Bucket("s3://runs/inputs"), runs.folder / "plain" / "model"
    for file in model.iterdir():
        bucket.put_file(file, f"model/{file.name}")
    bucket.put_bytes(b'{"text": "one two three four"}\n' * 40, "texts.jsonl")
    words = [
        *("model.config=null", "model.tokenizer=null", "model.name_or_path=s3://runs/inputs/model"),
        *("data.datasets=[{path: s3://runs/inputs/texts.jsonl}]", "run.checkpoint_uri=s3://runs/of-a-bucket"),
    ]
    err = runs.finish("of-a-bucket", *WORDS, *words)
    assert err.count("downloading s3://runs/inputs/") == 2
    assert read_remote_model_steps(Bucket("s3://runs/of-a-bucket")) == (NUM_STEPS, NUM_STEPS)
    code, err = runs.train("again", *WORDS, *words[:-1])
    assert (code, "downloading" in err) == (0, False), err
    assert runs.read_losses("again") == runs.read_losses("of-a-bucket")
