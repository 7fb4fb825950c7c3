"""The address at which the processes of a run find each other, and the run's key, which they authenticate with."""

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

LOST_SECONDS = 30.0  # more than run.step_timeout: ranks that train end by themselves first, and say more


@dataclass(frozen=True)
class Rendezvous:
    """The address at which the processes of a run find each other, and the run's key, which they authenticate with."""

    key: str = field(repr=False)
    address: str  # of this machine; its processes listen there
    interface: str
    endpoint: str  # of the agents: a file, or host:port
    folder: Path | None = None  # the ranks of a single machine meet here
    join_seconds: float = 600.0  # that machines wait for each other at the start
    lost_seconds: float = float("inf")  # after which a silent machine is lost, while ranks run


@contextmanager
def open_rendezvous(
    nodes: Nodes, run_dir: Path, environ: Mapping[str, str], join_seconds: float, step_seconds: float = float("inf")
) -> Iterator[Rendezvous]:
    """Processes of one machine meet in a new folder that only the user can read; those of several machines meet at the
    master's port."""
    own_key = run_key.read_given_key(environ)
    if nodes.master_addr is None or nodes.count == 1:
        with tempfile.TemporaryDirectory(prefix="ulysses-meeting-", ignore_cleanup_errors=True) as folder:
            key = own_key or secrets.token_hex(run_key.NUM_BYTES)
            yield Rendezvous(key, "localhost", "lo", str(Path(folder) / "agent"), Path(folder))
        return
    route = network.find_route(nodes.master_addr, is_here=nodes.rank == 0)
    key = own_key or run_key.share_key(run_dir)
    try:
        endpoint = f"{nodes.master_addr}:{nodes.master_port}"
        lost_seconds = step_seconds + LOST_SECONDS
        yield Rendezvous(
            key, route.address, route.interface, endpoint, join_seconds=join_seconds, lost_seconds=lost_seconds
        )
    finally:
        if own_key is None and nodes.rank == 0:
            run_key.drop_key(run_dir, key)
