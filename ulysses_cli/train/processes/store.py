"""The store through which ranks connect, and what machines tell each other in it: who is missing, which machine is
lost, and that the run has failed and ends on all machines.

On one machine the store is a file in a folder that is the user's alone, so that nothing listens. On several it is
rank 0's, which listens at its machine's address alone."""

from __future__ import annotations

import base64
import binascii
import os
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from ulysses_cli.run.key import ForgedError, Seal

FOLDER = "ULYSSES_MEETING"
BACKLOG = 2048  # ranks that connect at once


def join_ranks(device: torch.device, timeout: timedelta) -> None:
    """Collective over all ranks: initializes torch's process group of the world."""
    on_gpu = device.type == "cuda"
    bound_device = device if on_gpu else None  # NCCL then need not guess it at its first collective
    store = list_store_options(timeout)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout, device_id=bound_device, **store)


def list_store_options(timeout: timedelta) -> dict[str, Any]:
    """Arguments of torch's init_process_group for the ranks' own store. Empty where no agent has set the rank."""
    if "MASTER_ADDR" not in os.environ:
        return {}
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return {"store": _open_store(rank, world_size, timeout), "rank": rank, "world_size": world_size}


def _open_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    if (file := _name_file("ranks")) is not None:
        return open_file_store(file, world_size)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        return listen(host, port, timeout)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def open_file_store(file: str, world_size: int = -1) -> dist.Store:
    """Raises FileNotFoundError where the folder is gone: its owner has ended. torch itself would wait five minutes for
    the file and hold the interpreter's lock meanwhile, so that no thread of this rank could end it. The store opens the
    file again at each access, hence by a handle, which stays open as long as the process: it survives the folder."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return dist.FileStore(f"/proc/self/fd/{handle}", world_size)


def connect(timeout: timedelta) -> dist.Store | None:
    """A new connection, separate from the process group's. None where there is no agent, or no longer one."""
    try:
        if (file := _name_file("words")) is not None:
            store = open_file_store(file)
            store.set_timeout(timeout)
            return store
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except (KeyError, ValueError, RuntimeError, FileNotFoundError):
        return None


def listen(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """A store at one address; a socket of torch's own would listen on every interface. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family, backlog=BACKLOG) as server:
        port, handle = server.getsockname()[1], os.dup(server.fileno())  # the store closes it
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "timeout": timeout}
    return dist.TCPStore(address, port, master_listen_fd=handle, **options)


def _name_file(name: str) -> str | None:
    """Each restart has files of its own: ranks do not read what earlier ones have left."""
    folder = os.environ.get(FOLDER)
    return str(Path(folder) / f"{name}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}") if folder else None


REPORT_SECONDS = 15.0
SIGN_SECONDS = 2.0
SHOWN = 8


class StoreCalls:
    """Times the calls to the machines' store. A host that is cut off answers none, and torch's client waits for the
    network's own time-out then: many minutes."""

    def __init__(self) -> None:
        self.begun: dict[int, float] = {}  # by thread

    @contextmanager
    def timed(self) -> Iterator[None]:
        thread = threading.get_ident()
        self.begun[thread] = time.monotonic()
        try:
            yield
        finally:
            self.begun.pop(thread)

    def find_longest(self) -> float:
        """Returns the seconds of the call that has gone on longest, 0 for none."""
        now = time.monotonic()
        return max((now - begun for begun in [*self.begun.values()]), default=0.0)


class Heartbeats:
    """For how long agents have given no sign, by this machine's clock alone: those of other machines may differ."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.seen: dict[Hashable, tuple[object, float]] = {}

    def find_longest(self, beats: Mapping[Hashable, object]) -> float:
        """Takes the last heartbeat of each agent, which may be of any kind. Agents seen once are expected from
        then on. Returns the seconds of the longest silence."""
        return max(self.list_silences(beats).values(), default=0.0)

    def list_silences(self, beats: Mapping[Hashable, object]) -> dict[Hashable, float]:
        """As `find_longest`, with the seconds of each agent."""
        now = self.clock()
        for agent, beat in beats.items():
            if agent not in self.seen or beat not in (None, self.seen[agent][0]):
                self.seen[agent] = beat, now
        return {agent: now - since for agent, (_, since) in self.seen.items()}


class Signs:
    """Gives this machine's sign in the machines' store every few seconds, and times the silence of the others. In a
    thread: what machines do meanwhile may take any time. torch's heartbeats do not serve: a machine that was cut off
    for some seconds gives none any more, though it goes on."""

    def __init__(
        self, store: dist.Store, own: int, count: int, calls: StoreCalls, seconds: float = SIGN_SECONDS
    ) -> None:
        self.seconds = seconds
        self.store = store
        self.own = own
        self.count = count
        self.calls = calls
        self.heartbeats: Heartbeats | None = None  # while all machines are expected to give signs
        self.silences: Mapping[Hashable, float] = {}
        self._give()  # a machine that has met this one can read it
        threading.Thread(target=self._work, name="signs of machines", daemon=True).start()

    def watch(self) -> None:
        """Call when all machines have met."""
        self.silences, self.heartbeats = {}, Heartbeats()

    def pause(self) -> None:
        """Call before machines meet anew: one of them may have to come back first."""
        self.heartbeats = None

    def find_quietest(self) -> tuple[float, int]:
        """Returns the longest silence, in seconds, and the number of the machine; its own number for none."""
        silences = self.silences if self.heartbeats is not None else {}
        return max(((seconds, int(str(who))) for who, seconds in silences.items()), default=(0.0, self.own))

    def _work(self) -> None:
        others = [number for number in range(self.count) if number != self.own]
        with suppress(RuntimeError):  # the store is gone: the agent's own calls say so
            while True:
                time.sleep(self.seconds)
                self._give()
                if (heartbeats := self.heartbeats) is not None:
                    with self.calls.timed():
                        signs = self.store.multi_get([name_sign(number) for number in others])
                    self.silences = heartbeats.list_silences(dict(zip(others, signs, strict=True)))

    def _give(self) -> None:
        with self.calls.timed():
            self.store.add(name_sign(self.own), 1)


def name_sign(number: int) -> str:
    return f"ulysses/signs/{number}"


@contextmanager
def report_waiting(
    describe: Callable[[], str], say: Callable[[str], object], seconds: float = REPORT_SECONDS
) -> Iterator[None]:
    """Says every few seconds what the block still waits for."""
    is_over, began = threading.Event(), time.monotonic()

    def report() -> None:
        while not is_over.wait(seconds):
            say(f"{describe()}, after {time.monotonic() - began:.0f} s")

    thread = threading.Thread(target=report, name="who is missing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(seconds)


def name_missing(ranks: Sequence[int], num_machines: int) -> str:
    if not ranks:
        return f"all {num_machines} machines have come, but do not agree on a start"
    shown = ", ".join(map(str, ranks[:SHOWN])) + (", ..." if len(ranks) > SHOWN else "")
    who = f"numbers {shown} have" if len(ranks) > 1 else f"number {shown} has"
    return f"of {num_machines} machines, {who} not come"


FAILED = "ulysses/failed"  # a key of the machines' store, and a purpose of the seal
ASK_SECONDS = 1.0
END_SECONDS = 30.0  # for ranks to notice a lost peer, and to write down what they did


class MeetingError(RendezvousStateError):
    """Machines cannot join one run, or go on with it. `hint` says what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@contextmanager
def asking_the_store() -> Iterator[None]:
    """Around a call of the machines' store. The machine that holds it may have ended."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise RendezvousConnectionError("the machines' store is gone") from error


@dataclass
class SharedEnd:
    """The end of a run in the store of its machines. `clock` counts seconds."""

    store: dist.Store
    seal: Seal
    node_rank: int
    clock: Callable[[], float] = time.monotonic
    asked: float = field(default=float("-inf"), init=False)
    known_since: float | None = field(default=None, init=False)

    def tell(self) -> None:
        """The run has failed on this machine, and no restart follows. The first machine that says so is named."""
        content = self.seal.close(FAILED, str(self.node_rank).encode())
        self.store.compare_set(FAILED, "", base64.b64encode(content).decode("ascii"))

    def check(self) -> None:
        """Called while ranks of this machine run. Raises MeetingError some time after another machine has failed; until
        then ranks may end by themselves, and with a better message."""
        now = self.clock()
        if self.known_since is None and now - self.asked >= ASK_SECONDS:
            self.asked = now
            with asking_the_store():
                self.known_since = now if self.store.check([FAILED]) else None
        if self.known_since is not None and now - self.known_since >= END_SECONDS:
            raise MeetingError(
                f"the run has failed on machine number {self._read_number()}, and ranks of this machine did not end "
                f"by themselves within {END_SECONDS:g} s",
                "look at the logs of both: a rank that is stopped, or hangs outside of Python, cannot say so",
            )

    def _read_number(self) -> str:
        with asking_the_store():
            text = self.store.get(FAILED)
        try:
            return self.seal.open(FAILED, base64.b64decode(text, validate=True)).decode()
        except (ForgedError, binascii.Error):
            raise MeetingError(
                "an end of the run that no machine of this run has written is in their store",
                "let no other machine reach the master's port",
            ) from None
