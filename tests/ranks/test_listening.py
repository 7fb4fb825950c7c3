"""Who can reach a run on one machine: nobody. Its sockets that listen are gloo's, on the loopback."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from faults import Workshop
from forked import Command

LISTENS = "0A"


def list_listening(process: int) -> list[str]:
    """Addresses at which a process listens, as the kernel says."""
    inodes = set()
    for link in Path(f"/proc/{process}/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and words[9] in inodes:
                found.append(read_address(words[1].partition(":")[0]))
    return found


def read_address(text: str) -> str:
    """The kernel writes words of four bytes in the machine's order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def list_processes(command: Command) -> list[int]:
    """The command, its launcher, its ranks."""
    ranks = command.list_ranks()
    launcher = int(Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[1])
    return [command.pid, launcher, *ranks]


def test_an_open_port_would_be_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("::", 0), family=socket.AF_INET6):
        assert sorted(list_listening(os.getpid())) == ["127.0.0.1", "::"]


@pytest.mark.check
def test_a_run_on_one_machine_listens_on_the_loopback_alone(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    command = shop.start("run")
    end = time.monotonic() + 240
    while shop.count_steps("run") < 2:
        assert command.poll() is None, command.read_said()
        assert time.monotonic() < end
        time.sleep(0.02)
    listening = {process: list_listening(process) for process in list_processes(command)}
    command.send_signal(signal.SIGTERM)
    command.communicate(timeout=240)
    *others, _, _ = listening
    assert [listening[process] for process in others] == [[], []], "neither the command nor its launcher listens"
    addresses = {address for found in listening.values() for address in found}
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses), addresses
