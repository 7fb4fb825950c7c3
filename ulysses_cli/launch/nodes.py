"""The machines of a run, and which of them this is: read from options, a hostfile and the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ulysses_cli.launch.environments import (
    BY_HAND,
    NO_CLUSTER,
    ClusterEnvironment,
    find_cluster,
    find_first_host,
    find_named_cluster,
    read_count,
    read_number,
    refuse,
    refuse_lone_rank,
)
from ulysses_cli.launch.hostfile import read_hostfile
from ulysses_cli.plan.nouns import format_count

DEFAULT_PORT = 29400


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, and which of them this is. `source`: who said so."""

    count: int = 1
    rank: int = 0
    master_addr: str | None = None
    master_port: int = DEFAULT_PORT
    processes_here: int = 1
    source: str = field(default="", compare=False)

    def describe(self) -> str:
        if self.count == 1:
            return "1; no variable or option names another one"
        place = f"they meet at {self.master_addr}:{self.master_port}"
        return f"{self.count}; this is number {self.rank}, by {self.source}; {place}; number 0 shows the progress"


def find_nodes(
    world_size: int,
    environ: Mapping[str, str],
    *,
    command: str = "train",
    nnodes: int | None = None,
    node_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    hostfile: Path | None = None,
) -> Nodes:
    """Options win over a hostfile, which wins over NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and NPROC_PER_NODE,
    which win over the cluster's own variables. Several machines that cannot be told apart are an error, never one."""
    hosts = read_hostfile(hostfile) if hostfile is not None else None
    given = nnodes or (len(hosts.names) if hosts else None) or read_count(environ, BY_HAND.count)
    if given is None:
        refuse_lone_rank(environ, is_alone=False)
    find = find_cluster if given is None else find_named_cluster
    cluster = NO_CLUSTER if nnodes == 1 else find(environ, command)
    count = given or read_count(environ, cluster.count) or 1
    if count == 1:
        if nnodes is None:
            refuse_lone_rank(environ, is_alone=True)
        return _describe_single(world_size, environ, node_rank)
    rank = node_rank if node_rank is not None or hosts is None else hosts.find_rank()
    rank = rank if rank is not None else read_number(environ, BY_HAND.rank)
    rank = rank if rank is not None else read_number(environ, cluster.rank)
    address = master_addr or (hosts.names[0] if hosts else "") or environ.get(BY_HAND.master_addr)
    address = address or find_first_host(environ.get(cluster.master_addr, ""))
    if rank is None or not address:
        missing, name = ("--node-rank", cluster.rank) if rank is None else ("--master-addr", cluster.master_addr)
        unset = f": {cluster.name} has not set {name}" if name else ""
        raise refuse(f"{count} machines need {missing}{unset}", "give it here or in NODE_RANK and MASTER_ADDR")
    if not 0 <= rank < count:
        raise refuse(f"node rank {rank} is outside {count} machines", f"use 0 to {count - 1}")
    here = (hosts.slots if hosts else None) or read_count(environ, BY_HAND.processes_here)
    here = here or read_count(environ, cluster.processes_here) or world_size // count
    if here * count != world_size:
        each = format_count(here, "process")
        raise refuse(
            f"{count} machines with {each} each are {here * count}, but the recipe has {world_size}",
            "every machine runs the same number of processes: change --nnodes, NPROC_PER_NODE or the parallel sizes",
        )
    port = master_port or read_count(environ, BY_HAND.master_port) or read_count(environ, cluster.master_port)
    source = _name_source(nnodes, hostfile, given, cluster)
    return Nodes(count, rank, address, port or DEFAULT_PORT, here, source)


def count_nodes(
    environ: Mapping[str, str], *, command: str, nnodes: int | None = None, hostfile: Path | None = None
) -> int:
    """How many machines `find_nodes` will find."""
    listed = len(read_hostfile(hostfile).names) if hostfile is not None else None
    given = nnodes or listed or read_count(environ, BY_HAND.count)
    return given or read_count(environ, find_cluster(environ, command).count) or 1


def _name_source(nnodes: int | None, hostfile: Path | None, given: int | None, cluster: ClusterEnvironment) -> str:
    """Returns who said how many machines there are, with the variables that say it."""
    if nnodes is not None:
        return "options"
    if hostfile is not None:
        return str(hostfile)
    by = BY_HAND if given else cluster
    return f"{by.name} ({', '.join(filter(None, (by.count, by.rank, by.master_addr)))})"


def _describe_single(world_size: int, environ: Mapping[str, str], node_rank: int | None) -> Nodes:
    if node_rank:
        raise refuse(f"node rank {node_rank} is outside 1 machine", "add --nnodes, or leave out --node-rank")
    here = read_count(environ, BY_HAND.processes_here) or world_size
    if here != world_size:
        recipe = f"the recipe has {format_count(world_size, 'process')}"
        raise refuse(f"NPROC_PER_NODE is {here}, but {recipe}", "change one of the two")
    return Nodes(processes_here=world_size)
