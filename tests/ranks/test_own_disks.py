"""Tests runs on two machines that share no disk: each has a folder of its own for recipe, data and run."""

import shutil
import signal
import socket
from pathlib import Path

import pytest
from support.faults import Runs, wait_until
from support.rank_pool import run_on_ranks

from ulysses_cli.run.bucket import Bucket
from ulysses_cli.run.checkpoints import list_checkpoints
from ulysses_cli.run.remote_checkpoints import list_remote_steps
from ulysses_cli.train.checkpoint.collection import find_disks
from ulysses_cli.train.processes.consistency import gather_values

NUM_STEPS = 12
WORDS = (f"train.max_steps={NUM_STEPS}", "run.save_steps=3")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("plain"))
    runs.finish("run", *WORDS)
    return runs


@pytest.fixture
def machines(tmp_path: Path) -> list[Runs]:
    return [Runs(tmp_path / name) for name in ("a", "b")]


def train(machines: list[Runs], *words: str, stop_after: int | None = None) -> tuple[list[int], str]:
    """Runs on both machines. Returns their exit codes, and what the first one showed."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    meeting = ("--nnodes=2", "--master-addr=localhost", f"--master-port={port}")
    processes = []
    for number, runs in enumerate(machines):
        runs.environ["ULYSSES_RUN_KEY"] = "a key that both machines were given"
        peer = processes[0] if processes else None
        processes.append(runs.start("run", *WORDS, *words, *meeting, f"--node-rank={number}", peer=peer))
    if stop_after is not None:
        assert wait_until(processes[0], lambda: machines[0].count_steps("run") >= stop_after)
        processes[0].send_signal(signal.SIGTERM)
    messages = [process.communicate(timeout=240)[1] for process in processes]
    return [process.returncode for process in processes], "\n".join(messages)


def list_files(runs: Runs) -> list[str]:
    return sorted(file.name for file in list_checkpoints(runs.folder / "run")[0].iterdir())


@pytest.mark.full
def test_each_machine_keeps_its_share_and_resume_brings_them_together(plain: Runs, machines: list[Runs]) -> None:
    codes, shown = train(machines, stop_after=4)
    assert codes == [0, 0], shown
    assert " 2 disks " in shown
    assert list_files(machines[0]) == ["manifest.json", "rank-00000.safetensors", "state.json"]
    assert list_files(machines[1]) == ["manifest.json", "rank-00001.safetensors", "state.json"]
    for runs in machines:
        shutil.copytree(runs.folder / "run", runs.folder / "kept")
    codes, shown = train(machines, "--resume", "auto")
    assert codes == [0, 0], shown
    assert "resumed from run/checkpoints/step-" in shown
    assert machines[0].read_losses("run") == plain.read_losses("run")
    assert machines[0].read_model("run") == plain.read_model("run")
    for runs in machines:
        shutil.rmtree(runs.folder / "run")
    shutil.copytree(machines[0].folder / "kept", machines[0].folder / "run")
    codes, shown = train(machines, "--resume", "auto")
    assert 0 not in codes
    assert "rank-00001.safetensors is missing" in shown


@pytest.mark.full
def test_machines_without_a_shared_disk_go_on_from_the_bucket_alone(
    plain: Runs, machines: list[Runs], tmp_path: Path
) -> None:
    address = f"file://{tmp_path}/bucket"
    codes, shown = train(machines, f"run.checkpoint_uri={address}", stop_after=4)
    assert codes == [0, 0], shown
    (step, *_) = list_remote_steps(Bucket(address))
    for runs in machines:
        shutil.rmtree(runs.folder / "run")
    codes, shown = train(machines, f"run.checkpoint_uri={address}", "--resume", "auto")
    assert codes == [0, 0], shown
    assert f"resumed from run/checkpoints/step-{step} " in shown
    expected = {at: loss for at, loss in plain.read_losses("run").items() if at > step}
    assert machines[0].read_losses("run") == expected
    assert Bucket(address).read("model/model.safetensors") == plain.read_model("run")


def look_for_disks(folders: list[str]) -> tuple[int, ...]:
    import os

    import torch.distributed as dist

    rank = dist.get_rank()
    os.environ["LOCAL_RANK"] = "0"
    return find_disks(Path(folders[rank]), rank, lambda value: gather_values(value, dist.group.WORLD)).owners


def test_disks_are_told_apart(tmp_path: Path) -> None:
    assert run_on_ranks(4, look_for_disks, [str(tmp_path / name) for name in "abba"]) == [(0, 1, 1, 0)] * 4
    assert list((tmp_path / "a").iterdir()) == []
