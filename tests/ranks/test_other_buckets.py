"""Tests run.checkpoint_uri at gs:// and hf:// addresses, against stand-ins of both services on loopback: checkpoints go
up with their manifest last, and a run goes on from there alone, in a new folder."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.bucket_server import GOOGLE_IS_INSTALLED, GOOGLE_REASON, serve_google_bucket
from support.checkpoints import make_checkpoint
from support.faults import Runs
from support.hub_server import TOKEN, serve_hub
from support.paths import ROOT

NUM_STEPS = 12
WORDS = (f"train.max_steps={NUM_STEPS}", "run.save_steps=2")
ADDRESSES = [
    pytest.param("gs://runs/mine", marks=pytest.mark.skipif(not GOOGLE_IS_INSTALLED, reason=GOOGLE_REASON), id="gs"),
    pytest.param("hf://me/runs/mine", id="hf"),
]
SEND_AND_FETCH = """
import sys
from pathlib import Path
from ulysses_cli.run.checkpoints import CheckpointError
from ulysses_cli.run.bucket import Bucket
from ulysses_cli.run.checkpoints import name_share
from ulysses_cli.run.remote_checkpoints import Sending, bring_newest, list_remote_steps, prune_remote, try_out

bucket, here, there = Bucket(sys.argv[1], pauses=(0.1,)), Path(sys.argv[2]), Path(sys.argv[3])
assert try_out(bucket) == ""
written, put = [], Bucket.put_file
Bucket.put_file = lambda self, file, name, *rest: (put(self, file, name, *rest), written.append(name))
shares = [name_share(0), name_share(1)]
for step in (2, 4):
    Sending(bucket).send_checkpoint(here / "checkpoints" / f"step-{step}", shares, 0, 1)
    assert written[-1] == f"checkpoints/step-{step}/manifest.json"
assert list_remote_steps(bucket) == [4, 2]
bring_newest(bucket, there, print)
content = bytearray(bucket.read(f"checkpoints/step-4/{shares[1]}"))
content[5] ^= 1
bucket.put_bytes(bytes(content), f"checkpoints/step-4/{shares[1]}")
bring_newest(bucket, there / "after damage", print)
prune_remote(bucket, 4, 1)
assert list_remote_steps(bucket) == [4]
try:
    bring_newest(bucket, there / "nowhere", print)
except CheckpointError as error:
    print(error)
"""


@pytest.fixture
def services() -> Iterator[Mapping[str, str]]:
    """The environment of a process that uses the stand-ins. The hub's address is read when its package is imported, so
    that process must be a new one."""
    with ExitStack() as stack:
        hub = stack.enter_context(serve_hub())
        hub.repos["me/runs"] = {}
        google = stack.enter_context(serve_google_bucket()) if GOOGLE_IS_INSTALLED else {}
        ours = {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
        path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        yield {**os.environ, **google, **ours, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONPATH": path}


@pytest.mark.check
@pytest.mark.parametrize("address", ADDRESSES)
def test_a_checkpoint_goes_up_and_comes_back_checked(address: str, services: Mapping[str, str], tmp_path: Path) -> None:
    for step in (2, 4):
        make_checkpoint(tmp_path / "here", step)
    words = [sys.executable, "-c", SEND_AND_FETCH, address, str(tmp_path / "here"), str(tmp_path / "there")]
    done = subprocess.run(words, env=services, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    first, second, skipped, third, *rest = done.stdout.splitlines()
    assert first == second
    assert all(f"{address}/checkpoints/step-4" in line for line in (first, skipped))
    assert f"{address}/checkpoints/step-2" in third
    assert f"{address} none is valid" in rest[-1]
    for run_dir, step in (("there", 4), ("there/after damage", 2)):
        for file in (tmp_path / "here" / "checkpoints" / f"step-{step}").iterdir():
            assert (tmp_path / run_dir / "checkpoints" / f"step-{step}" / file.name).read_bytes() == file.read_bytes()


def train(runs: Runs, services: Mapping[str, str], *words: str, stop_after: int | None = None) -> tuple[int, str]:
    """In processes of its own, which import everything anew."""
    command = [sys.executable, "-m", "ulysses_cli", "train", "r.yaml", "run.output_dir=run", *WORDS, *words]
    with open(runs.folder / "shown.txt", "w+") as shown:
        process = subprocess.Popen(command, cwd=runs.folder, env={**runs.environ, **services}, stderr=shown)
        while stop_after is not None and process.poll() is None and runs.count_steps("run") < stop_after:
            time.sleep(0.05)
        if stop_after is not None:
            process.send_signal(signal.SIGTERM)
        code = process.wait(600)
        shown.seek(0)
        return code, shown.read()


@pytest.mark.full
@pytest.mark.parametrize("address", ADDRESSES)
def test_a_run_goes_on_from_another_service_alone(address: str, services: Mapping[str, str], tmp_path: Path) -> None:
    runs, uri = Runs(tmp_path), f"run.checkpoint_uri={address}"
    runs.finish("plain", *WORDS)
    code, err = train(runs, services, uri, stop_after=4)
    assert code == 0, err
    assert f"uploaded {address}/checkpoints/step-" in err
    stopped = max(runs.read_losses("run"))
    assert stopped < NUM_STEPS, "the run was stopped before its end"
    shutil.rmtree(runs.folder / "run")
    code, err = train(runs, services, uri)
    assert code == 2
    assert f"the newest of step {stopped}" in err
    code, err = train(runs, services, uri, "--resume", "auto")
    assert code == 0, err
    assert f"downloading {address}/checkpoints/step-{stopped}" in err
    assert f"uploaded {address}/model" in err
    expected = {step: loss for step, loss in runs.read_losses("plain").items() if step > stopped}
    assert runs.read_losses("run") == expected
    assert runs.read_model("run") == runs.read_model("plain")
    assert json.loads((runs.folder / "run" / "run.json").read_text())["recipe"]["run"]["checkpoint_uri"] == address
