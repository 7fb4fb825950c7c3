"""Four machines, as network namespaces: their names are in the reverse order of their numbers and mean 127.0.1.1 on the
machine itself, no two share a disk, and they come in any order."""

import signal
from pathlib import Path

import pytest
from support import networks
from support.faults import Runs
from support.forked import Command

NAMES = ("zeta", "midway", "beta", "alpha")
ORDER = (2, 0, 3, 1)  # in which they are started
WORDS = ["parallel.sp_size=2", "parallel.dp_shard_size=2", "train.max_steps=6", "run.save_steps=2"]
MEETING = ["--nnodes=4", "--master-addr=zeta", "--master-port=29431"]


@pytest.mark.full
def test_ranks_killed_on_four_machines_go_on_in_the_same_order(tmp_path: Path) -> None:
    """Each row is split over two machines. After the restart each machine has the ranks that it had, or it would not
    find its own share of the checkpoint. The losses and the model are those of four ranks on one machine."""
    if why := networks.find_obstacle():
        pytest.skip(f"network namespaces are not permitted here: {why}")
    machines = []
    for name in (*NAMES, "whole"):
        (tmp_path / name).mkdir()
        machines.append(Runs(tmp_path / name))
    code, shown = machines[-1].train("run", *WORDS)
    assert code == 0, shown
    plan = {"phase": "micro-step 2", "step": 3, "who": "all", "signal": signal.SIGKILL}
    with networks.open_networks(4, lans=1) as lan:
        commands: dict[int, Command] = {}
        for number in ORDER:
            runs = machines[number]
            runs.environ |= {networks.NETWORK: lan[number], networks.HOST: NAMES[number]}
            runs.environ |= {networks.KNOWN: "10.231.7.1 zeta", "ULYSSES_RUN_KEY": "a key that all machines were given"}
            peer = next(iter(commands.values()), None)
            words = [*WORDS, *MEETING, f"--node-rank={number}", "run.max_restarts=1"]
            commands[number] = runs.start("run", *words, plan=plan, peer=peer)
        shown = "\n".join(commands[number].communicate(timeout=300)[1] for number in range(4))
    assert [commands[number].returncode for number in range(4)] == [0] * 4, shown
    assert commands[0].has_fired
    assert "restart 1 of 1 (run.max_restarts): " in shown
    assert "run.output_dir is on 4 disks that machines do not share" in shown
    for number, runs in enumerate(machines[1:4], 1):  # number 0 has brought the others' shares, to write the model
        newest = runs.folder / "run" / "checkpoints" / "step-6"
        assert [file.name for file in newest.glob("rank-*")] == [f"rank-{number:05d}.safetensors"]
    assert machines[0].read_losses("run") == machines[-1].read_losses("run")
    assert machines[0].read_model("run") == machines[-1].read_model("run")
