"""Two machines, as network namespaces: started as docs/machines.md says; one comes late, has another recipe, or is cut
off in mid-run, for good or for some seconds."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import networks
from support.blocks import list_blocks
from support.faults import Runs, wait_until
from support.generated_docs import DOCS

STEP_TIMEOUT, MARGIN, SAVE_STEPS, CUT_SECONDS = 8, 60, 40, 4.0
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


@pytest.mark.full
@pytest.mark.parametrize("lost", [0, 1], ids=["the rendezvous host", "the other host"])
def test_a_machine_that_is_cut_off_and_comes_back_goes_on(tmp_path: Path, lan: list[str], lost: int) -> None:
    """In mid-step: ranks reduce gradients across the cut. The losses are those of ranks on one machine."""
    runs, commands = Runs(tmp_path), []
    words = [*ENDLESS, "parallel.dp_shard_size=2", f"train.max_steps={SAVE_STEPS}", f"run.step_timeout={MARGIN}"]
    code, err = runs.train("whole", *words)
    assert code == 0, err
    for rank, name in enumerate(lan):
        runs.environ |= {networks.NETWORK: name}
        peer = commands[0] if commands else None
        commands.append(runs.start("run", *MACHINES, *words, f"--node-rank={rank}", peer=peer))
    assert wait_until(commands[0], lambda: runs.count_steps("run") >= 3), commands[0].read_stderr()
    networks.ip("-n", lan[lost], "link", "set", "eth0", "down")
    began, done = time.monotonic(), runs.count_steps("run")
    wait_until(commands[0], lambda: time.monotonic() - began > CUT_SECONDS)
    assert runs.count_steps("run") <= done + 1, "no step is done without the other machine"
    networks.ip("-n", lan[lost], "link", "set", "eth0", "up")
    outputs = [command.communicate(timeout=300)[1] for command in commands]
    assert [command.returncode for command in commands] == [0, 0], outputs
    assert runs.read_losses("run") == runs.read_losses("whole")
    assert runs.read_model("run") == runs.read_model("whole")


@pytest.mark.full
@pytest.mark.parametrize("way", ["--node-rank", "--hostfile"])
def test_the_commands_of_the_page_start_a_run(tmp_path: Path, lan: list[str], way: str) -> None:
    """The machines' names are in the reverse order of their numbers, and mean 127.0.1.1 on the machine itself."""
    runs, commands = Runs(tmp_path), []
    page = (DOCS / "machines.md").read_text().replace("10.0.0.", "10.231.7.")
    lines = [line for line in "".join(list_blocks(page, "sh")).splitlines() if line.startswith("ulysses train")]
    lines = [line for line in lines if way in line]
    (hosts,) = list_blocks(page, "text hosts")
    (tmp_path / "hosts").write_text(hosts.replace("slots=8", "slots=1"))
    for name, host, line in zip(lan, ("zeta", "alpha"), lines * (len(lan) // len(lines)), strict=True):
        runs.environ |= {networks.NETWORK: name, networks.HOST: host}
        words = shlex.split(line.removeprefix("ulysses train my.yaml"))
        peer = commands[0] if commands else None
        commands.append(runs.start("run", *words, "train.max_steps=3", peer=peer))
    outputs = [command.communicate(timeout=300)[1] for command in commands]
    assert [command.returncode for command in commands] == [0, 0], outputs
    for number, output in enumerate(outputs):
        assert f"this is number {number}, by {'hosts' if way == '--hostfile' else 'options'}" in output
    assert max(runs.read_losses("run")) == 3
    assert (runs.folder / "run" / "model").exists()
