"""Two machines, as network namespaces: one comes late, has another recipe, or is cut off in mid-run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import networks
from support.faults import Runs, wait_until

STEP_TIMEOUT, MARGIN, SAVE_STEPS = 8, 60, 40
MACHINES = ["--nnodes=2", "--master-addr=10.231.7.1", "--master-port=29431", "parallel.dp_shard_size=2"]
ENDLESS = [
    "parallel.sp_size=1",
    "train.max_steps=100000",
    f"run.save_steps={SAVE_STEPS}",
    f"run.step_timeout={STEP_TIMEOUT}",
]


@pytest.fixture
def lan() -> Iterator[list[str]]:
    if why := networks.find_obstacle():
        pytest.skip(f"network namespaces are not permitted here: {why}")
    with networks.open_networks(2) as names:
        yield names


@pytest.mark.full
@pytest.mark.parametrize("lost", [0, 1], ids=["the rendezvous host", "the other host"])
def test_every_command_ends_after_a_machine_is_lost(tmp_path: Path, lan: list[str], lost: int) -> None:
    runs, commands = Runs(tmp_path), []
    for rank, name in enumerate(lan):
        runs.environ |= {networks.NETWORK: name}
        peer = commands[0] if commands else None
        commands.append(runs.start("run", *MACHINES, *ENDLESS, f"--node-rank={rank}", peer=peer))
    # soon after a save, so that the next one is far: a save may take ten times as long as a step
    assert wait_until(commands[0], lambda: runs.count_steps("run") > SAVE_STEPS), commands[0].read_stderr()
    networks.ip("-n", lan[lost], "link", "set", "eth0", "down")
    began = time.monotonic()
    outputs = [command.communicate(timeout=300)[1] for command in commands]
    assert time.monotonic() - began < STEP_TIMEOUT + MARGIN, outputs
    for command, output in zip(commands, outputs, strict=True):
        assert command.returncode == 1, output
        assert "Traceback" not in output
        assert "the newest checkpoint is " in output


@pytest.mark.full
@pytest.mark.parametrize("early", [0, 1])
def test_machines_come_in_any_order_and_say_whom_they_wait_for(tmp_path: Path, lan: list[str], early: int) -> None:
    runs, words = Runs(tmp_path), [*MACHINES, *ENDLESS, "train.max_steps=3"]
    line = "nothing answers at 10.231.7.1:29431, where machine number 0 should be, after 15 s"
    line = line if early else "of 2 machines, number 1 has not come, after 15 s"
    runs.environ |= {networks.NETWORK: lan[early]}
    first = runs.start("run", *words, f"--node-rank={early}")
    assert wait_until(first, lambda: line in first.read_stderr()), first.read_stderr()
    runs.environ |= {networks.NETWORK: lan[1 - early]}
    second = runs.start("run", *words, f"--node-rank={1 - early}", peer=first)
    outputs = [command.communicate(timeout=300)[1] for command in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), outputs


@pytest.mark.full
def test_a_wrong_recipe_on_one_machine_is_named_with_its_key(tmp_path: Path, lan: list[str]) -> None:
    """The settings themselves differ in how often ranks meet: without the check they would wait for each other."""
    runs, commands = Runs(tmp_path), []
    for rank, name in enumerate(lan):
        runs.environ |= {networks.NETWORK: name}
        peer = commands[0] if commands else None
        words = [*MACHINES, *ENDLESS, f"run.save_steps={5 + rank}", f"data.store_dir=store-{rank}"]
        commands.append(runs.start("run", *words, f"--node-rank={rank}", peer=peer))
    for command in commands:
        output = command.communicate(timeout=300)[1]
        assert command.returncode == 1, output
        assert "differ in run.save_steps: 6 and 5" in output
        assert "Traceback" not in output
