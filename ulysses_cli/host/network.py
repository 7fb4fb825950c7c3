"""Finds the address and interface by which this machine reaches another one. Sends nothing but name look-ups."""

from __future__ import annotations

import ipaddress
import socket
import time
from dataclasses import dataclass

from ulysses_cli.plan.problem import Problem, RecipeError

NAME_SECONDS = 60.0  # clusters register the names of machines while these start
ANY_PORT = 9  # the address is only routed; nothing is sent to the port


@dataclass(frozen=True)
class Route:
    """This machine's address and interface on the route to another one."""

    address: str
    interface: str


def find_route(host: str) -> Route:
    """Raises RecipeError if there is no route, or if it leads to this machine itself."""
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


def _means_loopback(host: str) -> bool:
    """Whether the user wrote a loopback name or address, for a run whose machines are all this one."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refuse(message: str, hint: str) -> RecipeError:
    return RecipeError([Problem("", message, hint)])
