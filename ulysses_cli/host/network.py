"""By which of its addresses and interfaces this machine reaches another one. Sends nothing, and asks only for names."""

from __future__ import annotations

import ipaddress
import socket
import time
from dataclasses import dataclass

from ulysses_cli.plan.problem import Problem, RecipeError

NAME_SECONDS = 60.0  # clusters make names of machines while these start
ANY_PORT = 9  # of an address that is only routed, never sent to


@dataclass(frozen=True)
class Way:
    """This machine's own end of the way to another one."""

    address: str
    interface: str


def find_way(host: str) -> Way:
    """Raises RecipeError where there is none, or one that others cannot take."""
    family, address = _resolve(host)
    if ipaddress.ip_address(address[0].partition("%")[0]).is_loopback and not _means_loopback(host):
        message = f"{host} is {address[0]} on this machine, where no other machine can reach it"
        raise _refuse(message, "give --master-addr as the address by which the other machines reach it")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)  # only routes
        except OSError as error:
            raise _refuse(f"no way leads to {host} ({address[0]}): {error.strerror}", "look at the network") from None
        own = probe.getsockname()[0]
    return Way(own, find_interface(own))


def find_interface(address: str) -> str:
    """The one that has the address; '' when none says so."""
    import psutil  # slow to import, and only several machines need it

    for name, known in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address.partition("%")[0] for each in known):
            return str(name)
    return ""


def _resolve(host: str) -> tuple[int, tuple[str, int]]:
    """Its first address beyond the loopback, if it has one: a machine often calls itself 127.0.1.1 as well."""
    end = time.monotonic() + NAME_SECONDS
    while True:
        try:
            found = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)
            break
        except socket.gaierror as error:
            if time.monotonic() > end:
                raise _refuse(f"{host} is the name of no machine: {error.strerror}", "look at --master-addr") from None
        time.sleep(0.5)
    family, _, _, _, address = min(found, key=lambda one: str(one[4][0]).startswith("127.") or one[4][0] == "::1")
    return family, address  # type: ignore[return-value]


def _means_loopback(host: str) -> bool:
    """Somebody has written it, for machines that are all on this one."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refuse(message: str, hint: str) -> RecipeError:
    return RecipeError([Problem("", message, hint)])
