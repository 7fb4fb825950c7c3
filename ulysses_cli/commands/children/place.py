"""Where `evaluate` runs: which machine of how many this is, and how many ranks there are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ulysses_cli.commands.children.training import Machine
    from ulysses_cli.launch.nodes import Nodes
    from ulysses_cli.launch.rendezvous import Rendezvous

COMMAND = "evaluate"
OWN_PROCESSES = "NPROC_PER_NODE"  # of a run; an evaluation takes a machine's GPUs, or what --sp-size needs
JOIN_SECONDS = 600.0  # that machines wait for each other, as run.join_timeout does


def find_place(sp_size: int, slots: int, environ: Mapping[str, str], machine: Machine) -> tuple[Nodes, int]:
    """This machine's part, and the number of all ranks: as many groups of `sp_size` as there are GPUs for. `slots`:
    GPUs of a machine, 0 on the CPU, where there is one group, or a rank on each machine. Raises RecipeError."""
    from ulysses_cli.launch.environments import refuse
    from ulysses_cli.launch.nodes import count_nodes, find_nodes

    count = count_nodes(environ, command=COMMAND, nnodes=machine.nnodes, hostfile=machine.hostfile)
    num_gpus = slots * count
    num_ranks = max(sp_size, num_gpus // sp_size * sp_size) if slots else math.lcm(sp_size, count)
    if num_ranks % count:
        hint = f"use a --sp-size that divides {num_gpus}" if slots else f"use a multiple of {count}"
        raise refuse(f"{num_ranks} ranks cannot be dealt evenly to {count} machines", hint)
    rest = {name: value for name, value in environ.items() if name != OWN_PROCESSES}
    return find_nodes(num_ranks, rest, command=COMMAND, **vars(machine)), num_ranks


@contextmanager
def open_meeting(
    nodes: Nodes, folder: Path, environ: Mapping[str, str]
) -> Iterator[tuple[Rendezvous | None, dict[str, Any] | None]]:
    """Where machines meet, for the environment of the child and for its task; None for both on one machine."""
    from ulysses_cli.launch.rendezvous import open_rendezvous

    if nodes.count == 1:
        yield None, None
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open_rendezvous(nodes, folder, environ, JOIN_SECONDS) as rendezvous:
        yield (
            rendezvous,
            {
                "count": nodes.count,
                "rank": nodes.rank,
                "endpoint": rendezvous.endpoint,
                "address": rendezvous.address,
                "join_seconds": rendezvous.join_seconds,
            },
        )
