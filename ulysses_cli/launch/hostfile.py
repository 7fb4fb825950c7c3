"""Reads DeepSpeed's list of machines: a line `host slots=N` for each, in the order of their numbers."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from ulysses_cli.launch.environments import refuse
from ulysses_cli.plan.nouns import format_count


@dataclass(frozen=True)
class Hosts:
    """`slots`: processes of each machine."""

    file: Path
    names: tuple[str, ...]
    slots: int

    def find_rank(self) -> int:
        """Returns the number of this machine. Raises RecipeError unless exactly one line names it."""
        own = list_own_names()
        ranks = [rank for rank, name in enumerate(self.names) if own & ({name} | _list_addresses(name))]
        if len(ranks) != 1:
            which = "no line" if not ranks else format_count(len(ranks), "line")
            raise refuse(f"{self.file}: {which} of {len(self.names)} name this machine", "give --node-rank")
        return ranks[0]


def read_hostfile(file: Path) -> Hosts:
    """Raises RecipeError with the line that cannot be used."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise refuse(f"{file} cannot be read: {why}", "give a file with a line `host slots=N` per machine") from None
    slots: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, count = words[0], words[-1].removeprefix("slots=")
        if len(words) != 2 or not words[1].startswith("slots=") or not count.isdecimal() or int(count) < 1:
            raise refuse(f"{file}:{number}: {line.strip()!r} is not a machine", "write `host slots=N`, N its GPUs")
        if name in slots:
            raise refuse(f"{file}:{number}: {name} stands there twice", "write each machine once")
        slots[name] = int(count)
    if not slots:
        raise refuse(f"{file} names no machine", "write a line `host slots=N` for each")
    if len(set(slots.values())) > 1:
        raise refuse(f"{file}: machines differ in slots", "every machine runs the same number of processes")
    return Hosts(file, tuple(slots), next(iter(slots.values())))


def list_own_names() -> set[str]:
    """Returns the names and addresses of this machine; 127.0.1.1 and its like name no machine."""
    import psutil  # slow to import, and only hostfiles need it

    addresses = {entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
    return {socket.gethostname(), socket.getfqdn()} | {each for each in addresses if not each.startswith("127.")}


def _list_addresses(name: str) -> set[str]:
    try:
        return {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except socket.gaierror:
        return set()
