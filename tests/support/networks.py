"""Simulates machines as network namespaces of this one, joined by a switch; traffic never leaves them."""

import ctypes
import ipaddress
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

NETWORK = "TEST_NETWORK"  # in a command's environment: the machine on which it runs
HOST = "TEST_HOST"  # and the machine's own name, which its hosts file gives 127.0.1.1, as Ubuntu's does
KNOWN = "TEST_KNOWN_HOST"  # a further line of the hosts file
CLONE_NEWNET, CLONE_NEWUTS, CLONE_NEWNS = 0x40000000, 0x04000000, 0x00020000  # linux/sched.h
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 1 << 18  # linux/mount.h
LISTENS = "0A"  # net/tcp_states.h


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def find_obstacle() -> str:
    """Returns why there can be no namespaces here, or ''."""
    try:
        done = subprocess.run(["unshare", "--net", "ip", "link"], check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    return done.stderr.strip()


@contextmanager
def open_networks(count: int, lans: int = 2) -> Iterator[list[str]]:
    """Opens machines. Number N has 10.231.7.N+1 on eth0 and 10.231.8.N+1 on eth1, on two networks that all share; with
    `lans` 1, on the first alone."""
    switch, *names = [f"ulysses-{os.getpid()}-{name}" for name in ("switch", *range(count))]
    with ExitStack() as stack:
        for name in (switch, *names):
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")
        for at in range(lans):
            ip("-n", switch, "link", "add", f"lan{at}", "type", "bridge")
            ip("-n", switch, "link", "set", f"lan{at}", "up")
            for number, name in enumerate(names):
                port = f"port{at}{number}"
                ip("link", "add", port, "netns", switch, "type", "veth", "peer", "name", f"eth{at}", "netns", name)
                ip("-n", switch, "link", "set", port, "master", f"lan{at}", "up")
                ip("-n", name, "addr", "add", f"10.231.{7 + at}.{number + 1}/24", "dev", f"eth{at}")
                ip("-n", name, "link", "set", f"eth{at}", "up")
        yield names


@contextmanager
def open_or_skip(count: int, lans: int = 2) -> Iterator[list[str]]:
    """For a test, which is skipped where there can be none."""
    import pytest

    if why := find_obstacle():
        pytest.skip(f"network namespaces are not permitted here: {why}")
    with open_networks(count, lans) as names:
        yield names


def enter(name: str) -> None:
    """Moves this thread, and all that it starts, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as handle:
        if libc.setns(handle.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def join(process: int) -> None:
    """Moves this process, which has one thread, into another one's network, with its host name and files."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, flag in (("net", CLONE_NEWNET), ("uts", CLONE_NEWUTS), ("mnt", CLONE_NEWNS)):
        there = f"/proc/{process}/ns/{kind}"
        if os.readlink(there) != os.readlink(f"/proc/self/ns/{kind}"):
            with open(there) as handle:
                if libc.setns(handle.fileno(), flag):
                    raise OSError(ctypes.get_errno(), "setns")


def take_host_name(host: str, hosts: Path, known: str = "") -> None:
    """Gives this process, and all that it starts, a host name of its own and a hosts file at the place of the real
    one. `known`: a further line, unless it names this machine."""
    known = "" if known.endswith(f" {host}") else known
    hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host}\n{known}\n")
    libc = ctypes.CDLL(None, use_errno=True)
    root, none = b"/", b"none"
    if libc.unshare(CLONE_NEWUTS | CLONE_NEWNS) or libc.mount(none, root, None, MS_REC | MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(host)
    if libc.mount(os.fsencode(hosts), b"/etc/hosts", None, MS_BIND, None):
        raise OSError(ctypes.get_errno(), "mount")


def run_in(name: str, command: Sequence[str], timeout: float = 60) -> subprocess.CompletedProcess[str]:
    words = ["ip", "netns", "exec", name, *command]
    return subprocess.run(words, check=False, capture_output=True, text=True, timeout=timeout)


def list_listening(process: int) -> list[tuple[str, int]]:
    """Returns (address, port) of the sockets at which a process listens, from the kernel."""
    inodes = set()
    for link in Path(f"/proc/{process}/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    results = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and words[9] in inodes:
                address, _, port = words[1].partition(":")
                results.append((read_address(address), int(port, 16)))
    return results


def read_address(text: str) -> str:
    """Reads an address, which the kernel writes as words of four bytes in the machine's byte order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
