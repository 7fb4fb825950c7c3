"""Two machines, as network namespaces: started as docs/machines.md says; one comes late, has another recipe, or is cut
off in mid-run, for good or for some seconds."""

import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import networks
from support.blocks import list_blocks
from support.faults import Runs, wait_until
from support.forked import Command
from support.generated_docs import DOCS
from support.paths import ROOT
from support.served import write_program

from ulysses_cli.run.nodes import LOST_SECONDS

STEP_TIMEOUT, MARGIN, SAVE_STEPS, CUT_SECONDS = 8, 60, 40, 4.0
SLOW_SECONDS, LONG_SECONDS = 0.3, 2.0  # for each of the tensors of a checkpoint
Plan = Mapping[str, Any] | None
MACHINES = ["--nnodes=2", "--master-addr=10.231.7.1", "--master-port=29431", "parallel.dp_shard_size=2"]
ENDLESS = [
    "parallel.sp_size=1",
    "train.max_steps=100000",
    f"run.save_steps={SAVE_STEPS}",
    f"run.step_timeout={STEP_TIMEOUT}",
]


def start_each(
    runs: Runs,
    lan: Sequence[str],
    words: Callable[[int], Sequence[str]],
    environ: Callable[[int], Mapping[str, str]] = lambda _: {},
    plans: Sequence[Plan] = (None, None),
) -> list[Command]:
    """Starts the run on all machines, each with words and variables by its number."""
    commands = list[Command]()
    for number, (name, plan) in enumerate(zip(lan, plans, strict=False)):
        runs.environ |= {networks.NETWORK: name, **environ(number)}
        peer = commands[0] if commands else None
        commands.append(runs.start("run", *words(number), peer=peer, plan=plan))
    return commands


def start_both(runs: Runs, lan: list[str], *words: str, plans: Sequence[Plan] = (None, None)) -> list[Command]:
    return start_each(runs, lan, lambda number: [*MACHINES, *words, f"--node-rank={number}"], plans=plans)


def wait_for(commands: list[Command]) -> list[str]:
    """Waits for the good end of all. Returns what they showed."""
    outputs = [command.communicate(timeout=300)[1] for command in commands]
    assert [command.returncode for command in commands] == [0] * len(commands), outputs
    return outputs


def check_slow_save(commands: list[Command]) -> None:
    (seconds,) = re.findall(r"saved \S+step-1 in ([0-9.]+) s", "".join(wait_for(commands)))
    assert float(seconds) > 1.5 * STEP_TIMEOUT


@pytest.mark.full
@pytest.mark.parametrize("lost", [0, 1], ids=["the rendezvous host", "the other host"])
@pytest.mark.parametrize("moment", ["loading the model", "rehearsal: save", "in a step", "in a save"])
def test_every_command_ends_after_a_machine_is_lost(tmp_path: Path, lan: list[str], lost: int, moment: str) -> None:
    """In a save each rank goes on writing for longer than the command may take to end. Ranks that load or rehearse take
    longer than that, too."""
    runs, in_save = Runs(tmp_path), moment == "in a save"
    in_step, words = moment == "in a step", ["run.rehearsal=true"] if moment.startswith("rehearsal") else []
    plan = {"pause": LONG_SECONDS} if in_save else None if in_step else {"stay": moment, "seconds": 600.0}
    commands = start_both(runs, lan, *ENDLESS, *words, plans=(plan, plan))

    def is_moment() -> bool:
        if in_save:
            return f"step-{SAVE_STEPS}.writing" in runs.list_checkpoints("run")
        if in_step:
            return runs.count_steps("run") > SAVE_STEPS
        return all((commands[0].pids / f"stays-{rank}").exists() for rank in range(2))

    assert wait_until(commands[0], is_moment), commands[0].read_stderr()
    networks.ip("-n", lan[lost], "link", "set", "eth0", "down")
    began = time.monotonic()
    outputs = [command.communicate(timeout=300)[1] for command in commands]
    assert time.monotonic() - began < STEP_TIMEOUT + MARGIN, outputs
    for command, output in zip(commands, outputs, strict=True):
        assert command.returncode == 1, output
        assert "Traceback" not in output
        assert not in_step or "the newest checkpoint is " in output
        if not in_step and not in_save:
            assert re.search(r"the machine with number [01] has (not answered|given no sign) for \d+ s", output), output


@pytest.mark.full
def test_a_long_load_is_waited_for(tmp_path: Path, lan: list[str]) -> None:
    """For longer than a lost machine would be."""
    plan = {"stay": "loading the model", "seconds": 1.0 + LOST_SECONDS + 10.0}
    words = (*ENDLESS, "run.step_timeout=1", "train.max_steps=2")
    wait_for(start_both(Runs(tmp_path), lan, *words, plans=(plan, None)))


@pytest.mark.full
def test_a_slow_disk_is_waited_for(tmp_path: Path, lan: list[str]) -> None:
    """Rank 0 writes for longer than run.step_timeout; the other one is done at once, and waits for it."""
    plans = ({"pause": SLOW_SECONDS}, None)
    check_slow_save(start_both(Runs(tmp_path), lan, *ENDLESS, "train.max_steps=1", plans=plans))


@pytest.mark.full
def test_slow_ranks_of_one_machine_are_waited_for(tmp_path: Path) -> None:
    """Their store is a file."""
    words = [*ENDLESS, "parallel.dp_shard_size=2", "train.max_steps=1"]
    check_slow_save([Runs(tmp_path).start("run", *words, plan={"pause": SLOW_SECONDS})])


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
    wait_for([first, second])


@pytest.mark.full
def test_a_wrong_recipe_on_one_machine_is_named_with_its_key(tmp_path: Path, lan: list[str]) -> None:
    """The settings themselves differ in how often ranks meet: without the check they would wait for each other."""

    def say(rank: int) -> list[str]:
        own = [f"run.save_steps={5 + rank}", f"data.store_dir=store-{rank}", f"--node-rank={rank}"]
        return [*MACHINES, *ENDLESS, *own]

    for command in start_each(Runs(tmp_path), lan, say):
        output = command.communicate(timeout=300)[1]
        assert command.returncode == 1, output
        assert "differ in run.save_steps: 6 and 5" in output
        assert "Traceback" not in output


@pytest.mark.full
@pytest.mark.parametrize("lost", [0, 1], ids=["the rendezvous host", "the other host"])
def test_a_machine_that_is_cut_off_and_comes_back_goes_on(tmp_path: Path, lan: list[str], lost: int) -> None:
    """In mid-step: ranks reduce gradients across the cut. The losses are those of ranks on one machine."""
    runs = Runs(tmp_path)
    words = [*ENDLESS, "parallel.dp_shard_size=2", f"train.max_steps={SAVE_STEPS}", f"run.step_timeout={MARGIN}"]
    runs.finish("whole", *words)
    commands = start_both(runs, lan, *words)
    assert wait_until(commands[0], lambda: runs.count_steps("run") >= 3), commands[0].read_stderr()
    networks.ip("-n", lan[lost], "link", "set", "eth0", "down")
    began, done = time.monotonic(), runs.count_steps("run")
    wait_until(commands[0], lambda: time.monotonic() - began > CUT_SECONDS)
    assert runs.count_steps("run") <= done + 1, "no step is done without the other machine"
    networks.ip("-n", lan[lost], "link", "set", "eth0", "up")
    wait_for(commands)
    assert runs.read_losses("run") == runs.read_losses("whole")
    assert runs.read_model("run") == runs.read_model("whole")


@pytest.mark.full
@pytest.mark.parametrize("num_lans", [1, 2])
def test_a_master_given_by_name_that_means_127_0_1_1_to_itself(tmp_path: Path, num_lans: int) -> None:
    """With one address it is found. With two the command is refused and says what to write."""
    with networks.open_or_skip(2, num_lans) as lan:
        words = [*(each.replace("10.231.7.1", "zeta") for each in MACHINES), *ENDLESS, "train.max_steps=2"]
        commands = start_each(
            Runs(tmp_path),
            lan[: 3 - num_lans],
            lambda rank: [*words, f"--node-rank={rank}"],
            lambda rank: {networks.HOST: NAMES[rank], networks.KNOWN: "10.231.7.1 zeta"},
        )
        outputs = [command.communicate(timeout=300)[1] for command in commands]
    if num_lans == 1:
        assert [command.returncode for command in commands] == [0, 0], outputs
    else:
        assert commands[0].returncode == 2
        assert "it has 2 addresses: 10.231.7.1 (eth0), 10.231.8.1 (eth1)" in outputs[0]


PAGE = (DOCS / "machines.md").read_text().replace("10.0.0.", "10.231.7.")
COMMANDS = "".join(list_blocks(PAGE, "sh")).splitlines()
NAMES = ("zeta", "alpha")  # in the reverse order of the machines' numbers


def read_pytorch_job() -> str:
    (text,) = list_blocks(PAGE, "yaml my.pytorchjob.yaml")
    replica = yaml.safe_load(text)["spec"]["pytorchReplicaSpecs"]["Worker"]
    return shlex.join(replica["template"]["spec"]["containers"][0]["command"])


def give_runpod(number: int) -> dict[str, str]:
    own = {"NODE_RANK": str(number), "NODE_ADDR": f"10.231.7.{number + 1}"}
    return own | {"NUM_NODES": "2", "NUM_TRAINERS": "1", "PRIMARY_ADDR": "10.231.7.1", "PRIMARY_PORT": "29431"}


def give_pytorch_job(number: int) -> dict[str, str]:
    own = {"RANK": str(number), "PET_NODE_RANK": str(number)}
    meeting = {"MASTER_ADDR": "10.231.7.1", "PET_MASTER_ADDR": "10.231.7.1", "PET_MASTER_PORT": "23456"}
    return own | meeting | {"WORLD_SIZE": "2", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}


WAYS: dict[str, tuple[list[str], Callable[[int], dict[str, str]], str]] = {
    "by hand": ([line for line in COMMANDS if "--node-rank" in line], lambda _: {}, "options"),
    "with a list": ([line for line in COMMANDS if "train my.yaml --hostfile" in line] * 2, lambda _: {}, "hosts"),
    "RunPod": ([line for line in COMMANDS if line.startswith("ulysses train my.yaml --resume")] * 2, give_runpod, ""),
    "PyTorchJob": ([read_pytorch_job()] * 2, give_pytorch_job, "Kubeflow"),
}


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_the_commands_of_the_page_start_a_run(tmp_path: Path, lan: list[str], way: str) -> None:
    """The machines' names mean 127.0.1.1 on the machine itself. Clusters are their variables."""
    runs, (lines, give, by) = Runs(tmp_path), WAYS[way]
    (hosts,) = list_blocks(PAGE, "text hosts")
    (tmp_path / "hosts").write_text(hosts.replace("slots=8", "slots=1"))

    def say(number: int) -> list[str]:
        return [*shlex.split(lines[number].removeprefix("ulysses train my.yaml")), "train.max_steps=3"]

    commands = start_each(runs, lan, say, lambda number: {networks.HOST: NAMES[number], **give(number)})
    for number, output in enumerate(wait_for(commands)):
        assert f"this is number {number}, by {by or way}" in output
    assert max(runs.read_losses("run")) == 3
    assert (runs.folder / "run" / "model").exists()


ENTER = """\
#!/bin/sh
# stands for ssh: HOST COMMAND...
name=$1
shift
exec ip netns exec {network} unshare --uts sh -c 'hostname {host}; exec sh -c "$*"' sh "$@"
"""


@pytest.mark.full
def test_mpirun_starts_a_run(tmp_path: Path, lan: list[str]) -> None:
    """Open MPI itself, by the page's command; it enters the other machine with a script instead of ssh."""
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed: apt-get install openmpi-bin")
    runs = Runs(tmp_path)
    (hosts,) = list_blocks(PAGE, "text hosts")
    (tmp_path / "hosts").write_text(hosts)
    enter = tmp_path / "enter"
    enter.write_text(ENTER.format(network=lan[1], host=NAMES[1]))
    enter.chmod(0o755)
    program = write_program(tmp_path / "bin")
    (line,) = [line for line in COMMANDS if line.startswith("mpirun ")]
    words = [*shlex.split(line.replace("my.yaml", "r.yaml")), "run.output_dir=run", "train.max_steps=3"]
    environ = {
        **runs.environ, "PATH": f"{program.parent}:{runs.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "DS_ACCELERATOR": "cpu", "OMPI_MCA_plm_rsh_agent": str(enter), "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }  # fmt: skip
    inside = ["ip", "netns", "exec", lan[0], "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', NAMES[0]]
    done = subprocess.run(
        [*inside, *words], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for number in range(2):
        assert f"this is number {number}, by mpirun" in done.stdout + done.stderr
    assert max(runs.read_losses("run")) == 3


FOUR = ("zeta", "midway", "beta", "alpha")
ORDER = (2, 0, 3, 1)  # in which they are started
WORDS = ["parallel.sp_size=2", "parallel.dp_shard_size=2", "train.max_steps=6", "run.save_steps=2"]
MEETING = ["--nnodes=4", "--master-addr=zeta", "--master-port=29431"]


@pytest.mark.full
def test_ranks_killed_on_four_machines_go_on_in_the_same_order(tmp_path: Path) -> None:
    """Each row is split over two machines. After the restart each machine has the ranks that it had, or it would not
    find its own share of the checkpoint. The losses and the model are those of four ranks on one machine."""
    machines = [Runs(tmp_path / name) for name in (*FOUR, "whole")]
    machines[-1].finish("run", *WORDS)
    plan = {"phase": "micro-step 2", "step": 3, "who": "all", "signal": signal.SIGKILL}
    with networks.open_or_skip(4, lans=1) as lan:
        commands: dict[int, Command] = {}
        for number in ORDER:
            runs = machines[number]
            runs.environ |= {networks.NETWORK: lan[number], networks.HOST: FOUR[number]}
            runs.environ |= {networks.KNOWN: "10.231.7.1 zeta", "ULYSSES_RUN_KEY": "a key that all machines were given"}
            peer = next(iter(commands.values()), None)
            words = [*WORDS, *MEETING, f"--node-rank={number}", "run.max_restarts=1"]
            commands[number] = runs.start("run", *words, plan=plan, peer=peer)
        shown = "\n".join(commands[number].communicate(timeout=300)[1] for number in range(4))
    assert [commands[number].returncode for number in range(4)] == [0] * 4, shown
    assert commands[0].has_fired
    assert "restart 1 of 1 (run.max_restarts): " in shown
    assert " 4 disks " in shown
    for number, runs in enumerate(machines[1:4], 1):  # number 0 has brought the others' shares, to write the model
        newest = runs.folder / "run" / "checkpoints" / "step-6"
        assert [file.name for file in newest.glob("rank-*")] == [f"rank-{number:05d}.safetensors"]
    assert machines[0].read_losses("run") == machines[-1].read_losses("run")
    assert machines[0].read_model("run") == machines[-1].read_model("run")
