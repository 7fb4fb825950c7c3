"""Tests who can reach a run.

On one machine, only gloo's sockets listen, on the loopback. On several machines, any machine on the network that leads
to the master can connect, and nothing that it sends is executed.
"""

import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import networks
from support.faults import ROOT, Runs, wait_until
from support.forked import Command, read_parent
from support.networks import list_listening

KEY, PORT = "k" * 40, 29411
MACHINES = ["--nnodes=2", "--master-addr=10.231.7.1", f"--master-port={PORT}"]
# Reaches the agents' store, which leads to the ranks' store, and overwrites all values in both, in every form in which
# torch would unpickle them.
ATTACK = """
import base64, pickle, sys, torch.distributed as dist
class Payload:
    def __reduce__(self):
        return open, (sys.argv[3], "w")
def connect(port):
    return dist.TCPStore(sys.argv[1], int(port), is_master=False, wait_for_workers=False)
agents = connect(sys.argv[2])
port = next(key for key in agents.list_keys() if key.endswith("/MASTER_PORT"))
evil = pickle.dumps(Payload())
for store in (connect(base64.b64decode(agents.get(port))[32:]), agents):
    keys = store.list_keys()
    for key in keys:
        for value in (evil, base64.b64encode(evil).decode()):
            store.set(key, value)
    print(len(keys))
"""
# Takes the place of rank 1 and sends as torch's all_gather_object does, after its part of a session.
POSE = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
class Payload:
    def __reduce__(self):
        return open, (sys.argv[2], "w")
address, port = sys.argv[1].split(":")
os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
store = dist.TCPStore(address, int(port), is_master=False, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=1, world_size=2, timeout=timedelta(seconds=60))
values = [None, None]
try:
    if sys.argv[3] == "sealed":
        dist.all_gather([torch.zeros(16, dtype=torch.uint8) for _ in values], torch.zeros(16, dtype=torch.uint8))
    dist.all_gather_object(values, Payload())
except Exception:
    pass  # what the victim sends is no plain pickle
"""
VICTIM = """
import os, sys, torch.distributed as dist
from datetime import timedelta
from ulysses_cli.train.processes.consistency import gather_values
from ulysses_cli.train.processes.store import list_store_options
def gather_plainly(value, group):
    values = [None, None]
    dist.all_gather_object(values, value)
options = list_store_options(timedelta(seconds=60))
dist.init_process_group("gloo", timeout=timedelta(seconds=60), **options)
(gather_values if sys.argv[1] == "sealed" else gather_plainly)("mine", dist.group.WORLD)
"""


def list_processes(command: Command) -> list[int]:
    """Returns the command, its agent and its ranks."""
    ranks = [rank for rank in command.list_ranks() if command.pid in walk_parents(rank)]
    return [command.pid, *{read_parent(rank) for rank in ranks}, *ranks]


def walk_parents(process: int) -> Iterator[int]:
    while process > 1:
        yield process
        process = read_parent(process)


def test_an_open_port_is_detected() -> None:
    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("::", 0), family=socket.AF_INET6):
        assert sorted(address for address, _ in list_listening(os.getpid())) == ["127.0.0.1", "::"]


@pytest.mark.full
def test_a_run_on_one_machine_listens_on_the_loopback_alone(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    command = runs.start("run")
    assert wait_until(command, lambda: runs.count_steps("run") >= 2), command.read_stderr()
    listening = {process: list_listening(process) for process in list_processes(command)}
    command.send_signal(signal.SIGTERM)
    command.communicate(timeout=240)
    *others, _, _ = listening
    assert [listening[process] for process in others] == [[], []], "neither the command nor its agent listens"
    addresses = {address for result in listening.values() for address, _ in result}
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses), addresses


@pytest.fixture(scope="module")
def lan() -> Iterator[list[str]]:
    """Yields two machines and a third on their networks."""
    with networks.open_or_skip(3) as names:
        yield names


def start(runs: Runs, network: str, *words: str, key: str = "", peer: Command | None = None) -> Command:
    runs.environ |= {networks.NETWORK: network, "ULYSSES_RUN_KEY": key}
    return runs.start("run", *MACHINES, *words, peer=peer)


def attack(network: str, *words: str) -> str:
    done = networks.run_in(network, [sys.executable, "-c", *words], timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_two_machines_train_and_execute_nothing_from_a_third(tmp_path: Path, lan: list[str]) -> None:
    """The two listen only at the address that leads to the master. A machine with another key is refused, and the run
    goes on. Payloads in the agents' and the ranks' stores are not executed, and the run says why it ends."""
    runs, third, evidence = Runs(tmp_path), tmp_path / "third", tmp_path / "evidence"
    first = start(runs, lan[0], "--node-rank=0", "train.max_steps=100000", "run.save_steps=null")
    second = start(runs, lan[1], "--node-rank=1", "train.max_steps=100000", "run.save_steps=null", peer=first)
    assert wait_until(first, lambda: runs.count_steps("run") >= 2), first.read_stderr()
    assert (tmp_path / "run" / "key").stat().st_mode & 0o777 == 0o600
    key = (tmp_path / "run" / "key").read_text()

    for number, command in enumerate((first, second)):
        listening = {process: list_listening(process) for process in list_processes(command)}
        assert len(listening) == 3, "the command, its agent, its rank"
        results = {address for each in listening.values() for address, _ in each}
        assert results == {f"10.231.7.{number + 1}"}, listening
        assert listening[command.pid] == []
        for process in listening:
            assert key not in Path(f"/proc/{process}/cmdline").read_text()
    assert [port for _, port in list_listening(list_processes(first)[1])] == [PORT]

    third.mkdir()
    stranger = Runs(third)
    started = time.monotonic()
    refused = start(stranger, lan[2], "--node-rank=1", key="another key of forty letters, or nearly")
    _, output = refused.communicate(timeout=240)
    assert refused.returncode == 1
    assert "another key than the run at 10.231.7.1:29411" in output
    assert time.monotonic() - started < 120, "no time-out of minutes"
    before = runs.count_steps("run")
    assert wait_until(first, lambda: runs.count_steps("run") > before), first.read_stderr()

    overwritten = [int(count) for count in attack(lan[2], ATTACK, "10.231.7.1", str(PORT), str(evidence)).split()]
    assert len(overwritten) == 2
    assert min(overwritten) > 0
    output = first.communicate(timeout=240)[1]
    second.communicate(timeout=240)
    assert first.returncode == 1, output
    assert "the state in the machines' store was not written by this run" in output
    assert not evidence.exists(), "a payload was executed"
    assert not (tmp_path / "run" / "key").exists()


@pytest.mark.check
@pytest.mark.parametrize("how", ["sealed", pytest.param("plain", marks=pytest.mark.full)])
def test_a_process_in_a_ranks_place_runs_no_code(tmp_path: Path, lan: list[str], how: str) -> None:
    """torch's own gather of objects runs what it receives, which shows that the attack is real."""
    evidence, port = tmp_path / "evidence", PORT + 1 + (how == "plain")
    environ = [f"PYTHONPATH={ROOT}", "RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=10.231.7.1", f"MASTER_PORT={port}"]
    environ += ["GLOO_SOCKET_IFNAME=eth0", f"ULYSSES_RUN_KEY={KEY}"]
    with ThreadPoolExecutor(1) as pool:
        victim = pool.submit(networks.run_in, lan[0], ["env", *environ, sys.executable, "-c", VICTIM, how], 120)
        attack(lan[2], POSE, f"10.231.7.1:{port}", str(evidence), how)
        ended = victim.result()
    assert evidence.exists() == (how == "plain")
    assert ("ForgedError" in ended.stderr) == (how == "sealed"), ended.stderr
