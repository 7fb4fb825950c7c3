"""Finds the address and interface by which this machine reaches another one. Sends nothing but name look-ups."""

from __future__ import annotations

import ipaddress
import socket
import time
from dataclasses import dataclass

from ulysses_cli.plan.problem import Problem, RecipeError

NAME_SECONDS = 60.0  # clusters register the names of machines while these start
ANY_PORT = 9  # the address is only routed; nothing is sent to the port
CONTAINERS = ("docker", "virbr", "veth", "br-", "cni", "flannel", "cali", "lxc", "podman")  # their interfaces' names


@dataclass(frozen=True)
class Route:
    """This machine's address and interface on the route to another one."""

    address: str
    interface: str


def find_route(host: str, *, is_here: bool = False) -> Route:
    """`is_here`: this machine is the one that others reach as `host`. Raises RecipeError if there is no route, or if it
    leads to this machine itself."""
    is_own_name = is_here and _shorten(host) == _shorten(socket.gethostname())
    if is_own_name and _finds_no_other(host):
        return _find_own_route(host)
    family, address = _resolve(host)
    if ipaddress.ip_address(address[0].partition("%")[0]).is_loopback and not _means_loopback(host):
        message = f"{host} is {address[0]} on this machine, where no other machine can reach it"
        raise _refuse(message, "give --master-addr as the address by which the other machines reach it")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)  # only routes
        except OSError as error:
            raise _refuse(f"no route to {host} ({address[0]}): {error.strerror}", "check the network") from None
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
        raise _refuse(f"{own}, and no interface has an address", "check the network")
    listed = ", ".join(f"{each.address} ({each.interface})" for each in routes)
    hint = f"give all machines the one by which they reach this one: --master-addr {routes[0].address}"
    raise _refuse(f"{own}, and it has {len(routes)} addresses: {listed}", hint)


def find_interface(address: str) -> str:
    """The interface that has the address; '' if none has it."""
    import psutil  # slow to import, and only several machines need it

    for name, known in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in known):
            return str(name)
    return ""


def _resolve(host: str) -> tuple[int, tuple[str, int]]:
    """The host's first address that is not a loopback one, if there is one: a machine often has 127.0.1.1 as well."""
    end = time.monotonic() + NAME_SECONDS
    while True:
        try:
            entries = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)
            break
        except socket.gaierror as error:
            if time.monotonic() > end:
                raise _refuse(f"{host} is the name of no machine: {error.strerror}", "check --master-addr") from None
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


def _refuse(message: str, hint: str) -> RecipeError:
    return RecipeError([Problem("", message, hint)])
