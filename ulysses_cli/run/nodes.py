"""The machines of a run: which there are (options, DeepSpeed's hostfile, the environment), which of them this is, by
which interface and address they reach each other, and where their processes meet. Sends nothing but name look-ups."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.units import format_count
from ulysses_cli.run import key as run_key
from ulysses_cli.run.environments import (
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

NAME_SECONDS = 60.0  # clusters register the names of machines while these start
ANY_PORT = 9  # the address is only routed; nothing is sent to the port
CONTAINERS = ("docker", "virbr", "veth", "br-", "cni", "flannel", "cali", "lxc", "podman")  # their interfaces' names


@dataclass(frozen=True)
class Route:
    """This machine's address and interface on the route to another one."""

    address: str
    interface: str


def find_route(host: str, *, is_here: bool = False, seconds: float = NAME_SECONDS) -> Route:
    """`is_here`: this machine is the one that others reach as `host`; `seconds`: how long its name is tried. Raises
    RecipeError if there is no route, or if it leads to this machine itself."""
    is_own_name = is_here and _shorten(host) == _shorten(socket.gethostname())
    if is_own_name and _finds_no_other(host):
        return _find_own_route(host)
    family, address = _resolve(host, seconds)
    if ipaddress.ip_address(address[0].partition("%")[0]).is_loopback and not _means_loopback(host):
        message = f"{host} is {address[0]} on this machine, where no other machine can reach it"
        raise _refuse_address(message, "give --master-addr as the address by which the other machines reach it")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)  # only routes
        except OSError as error:
            raise _refuse_address(f"no route to {host} ({address[0]}): {error.strerror}", "check the network") from None
        own = probe.getsockname()[0]
    return Route(own, find_interface(own))


def _find_own_route(host: str) -> Route:
    """This machine's only address. Raises RecipeError where it has several: the others reach it by one of them."""
    import psutil  # slow to import, and only several machines need it

    states = psutil.net_if_stats()
    entries = [
        Route(entry.address.partition("%")[0], str(name))
        for name, known in psutil.net_if_addrs().items()
        for entry in known
        if entry.family in (socket.AF_INET, socket.AF_INET6) and states[name].isup and not name.startswith(CONTAINERS)
    ]
    routes = [each for each in entries if _is_seen_outside(each.address)]
    routes = [each for each in routes if ":" not in each.address] or routes
    if len(routes) == 1:
        return routes[0]
    own = f"{host} means this machine itself here, or nothing"
    if not routes:
        raise _refuse_address(f"{own}, and no interface has an address", "check the network")
    listed = ", ".join(f"{each.address} ({each.interface})" for each in routes)
    hint = f"give all machines the one by which they reach this one: --master-addr {routes[0].address}"
    raise _refuse_address(f"{own}, and it has {len(routes)} addresses: {listed}", hint)


def find_interface(address: str) -> str:
    """The interface that has the address; '' if none has it."""
    import psutil  # slow to import, and only several machines need it

    for name, known in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in known):
            return str(name)
    return ""


def _resolve(host: str, seconds: float) -> tuple[int, tuple[str, int]]:
    """The host's first address that is not a loopback one, if there is one: a machine often has 127.0.1.1 as well."""
    end = time.monotonic() + seconds
    while True:
        try:
            entries = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)
            break
        except socket.gaierror as error:
            if time.monotonic() > end:
                raise _refuse_address(
                    f"{host} is the name of no machine: {error.strerror}", "check --master-addr"
                ) from None
        time.sleep(0.5)
    family, _, _, _, address = min(entries, key=lambda entry: _is_loopback(str(entry[4][0])))
    return family, address  # type: ignore[return-value]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _shorten(name: str) -> str:
    return name.partition(".")[0].lower()


def _finds_no_other(host: str) -> bool:
    """Whether all that the name means here is a loopback address, as in Debian's 127.0.1.1, or nothing."""
    try:
        entries = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)
    except socket.gaierror:
        return True
    return not _means_loopback(host) and all(_is_loopback(str(entry[4][0])) for entry in entries)


def _is_seen_outside(address: str) -> bool:
    read = ipaddress.ip_address(address)
    return not (read.is_loopback or read.is_link_local)


def _means_loopback(host: str) -> bool:
    """Whether the user wrote a loopback name or address, for a run whose machines are all this one."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refuse_address(message: str, hint: str) -> RecipeError:
    return RecipeError([Problem("", message, hint)])


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
    route = find_route(nodes.master_addr, is_here=nodes.rank == 0)
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
