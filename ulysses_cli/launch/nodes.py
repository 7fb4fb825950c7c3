"""The machines of a run, and which of them this is: read from options, the environment, or SLURM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ulysses_cli.plan.problem import Problem, RecipeError

DEFAULT_PORT = 29400


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, and which of them this is."""

    count: int = 1
    rank: int = 0
    master_addr: str | None = None
    master_port: int = DEFAULT_PORT
    processes_here: int = 1


def find_nodes(
    world_size: int,
    environ: Mapping[str, str],
    *,
    nnodes: int | None = None,
    node_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> Nodes:
    """Options win over NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and NPROC_PER_NODE, which win over SLURM's."""
    in_srun = "SLURM_STEP_NODELIST" in environ and "SLURM_NODEID" in environ
    slurm = environ if in_srun else {}
    count = nnodes or _read_count(environ, "NNODES") or _read_count(slurm, "SLURM_STEP_NUM_NODES") or 1
    rank = node_rank if node_rank is not None else _read_rank(environ, "NODE_RANK")
    rank = rank if rank is not None else _read_rank(slurm, "SLURM_NODEID")
    address = master_addr or environ.get("MASTER_ADDR") or _first_host(slurm.get("SLURM_STEP_NODELIST", ""))
    if count == 1:
        if node_rank:
            raise refuse(f"node rank {node_rank} is outside 1 machine", "add --nnodes, or leave out --node-rank")
        here = _read_count(environ, "NPROC_PER_NODE") or world_size
        if here != world_size:
            raise refuse(
                f"NPROC_PER_NODE is {here}, but the recipe has {world_size} processes", "change one of the two"
            )
        return Nodes(processes_here=world_size)
    if rank is None or not address:
        missing = "--node-rank" if rank is None else "--master-addr"
        raise refuse(f"{count} machines need {missing}", "give it here or in NODE_RANK and MASTER_ADDR")
    if not 0 <= rank < count:
        raise refuse(f"node rank {rank} is outside {count} machines", f"use 0 to {count - 1}")
    here = _read_count(environ, "NPROC_PER_NODE") or world_size // count
    if here * count != world_size:
        raise refuse(
            f"{count} machines with {here} processes each are {here * count}, but the recipe has {world_size}",
            "every machine runs the same number of processes: change --nnodes, NPROC_PER_NODE or the parallel sizes",
        )
    port = master_port or _read_count(environ, "MASTER_PORT") or DEFAULT_PORT
    return Nodes(count, rank, address, port, here)


def refuse(message: str, hint: str) -> RecipeError:
    return RecipeError([Problem("", message, hint)])


def _read_rank(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    if text and not text.isdecimal():
        raise refuse(f"{name} is {text}", "write a whole number")
    return int(text) if text else None


def _read_count(environ: Mapping[str, str], name: str) -> int | None:
    return _read_rank(environ, name) or None


def _first_host(nodes: str) -> str:
    """The first name of SLURM's compressed list: gpu[07-09,12],login1 -> gpu07."""
    match = re.match(r"([^\[,]+)(?:\[(\d+))?", nodes)
    return (match[1] + (match[2] or "")) if match else ""
