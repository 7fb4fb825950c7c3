"""Where the processes of a run find each other, and the key by which they know each other."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ulysses_cli.host import network
from ulysses_cli.launch.nodes import Nodes
from ulysses_cli.run_folder import run_key


@dataclass(frozen=True)
class Meeting:
    """Where the processes of a run find each other, and the key by which they know each other."""

    key: str = field(repr=False)
    address: str  # of this machine, at which its processes listen
    interface: str
    endpoint: str  # of the launchers: a file, or host:port
    folder: Path | None = None  # of one machine's ranks


@contextmanager
def open_meeting(nodes: Nodes, run_dir: Path, environ: Mapping[str, str]) -> Iterator[Meeting]:
    """One machine's processes meet in a new folder that is the user's alone; those of several at the master's port."""
    given = run_key.read_given_key(environ)
    if nodes.master_addr is None or nodes.count == 1:
        with tempfile.TemporaryDirectory(prefix="ulysses-meeting-", ignore_cleanup_errors=True) as folder:
            key = given or secrets.token_hex(run_key.NUM_BYTES)
            yield Meeting(key, "localhost", "lo", str(Path(folder) / "launcher"), Path(folder))
        return
    route = network.find_route(nodes.master_addr)
    key = given or run_key.share_key(run_dir)
    try:
        yield Meeting(key, route.address, route.interface, f"{nodes.master_addr}:{nodes.master_port}")
    finally:
        if given is None and nodes.rank == 0:
            run_key.drop_key(run_dir, key)
