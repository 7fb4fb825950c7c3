"""Brings the agents of a run's machines together, until `run.join_timeout`. Only content with the run's seal is read.

torch's elastic rendezvous keeps its state as a pickle in a store that answers anyone who reaches its port. Here nothing
without the seal is unpickled, and the store listens at one address. On one machine the store is a file in a folder
that is the user's alone.
"""

from __future__ import annotations

import base64
import binascii
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
)

from ulysses_cli.run.key import KEY, ForgedError, Seal, find_seal
from ulysses_cli.train.processes.store import (
    Heartbeats,
    MeetingError,
    SharedEnd,
    Signs,
    StoreCalls,
    asking_the_store,
    listen,
    name_missing,
    open_file_store,
    report_waiting,
)

Say = Callable[[str], object]
NAME = "ulysses"
STATE, EMPTY = "rendezvous", "empty"
GREETING = "ulysses/greeting"
ANSWER_SECONDS = 60.0
CHECK_SECONDS = 0.2
SILENT_SECONDS = 30.0  # agents give a sign every two seconds
LOST_SECONDS = 40.0  # a call to the store takes milliseconds
HEARTBEAT = timedelta(seconds=5)
ANSWER_TIMEOUT = timedelta(seconds=ANSWER_SECONDS)
KEY_HINT = (
    f"the key is {KEY}, or run.output_dir/key where that is not set: give every machine the same, or one shared disk"
)


CALLS = StoreCalls()  # of this process, which has one agent


class SealedBackend(RendezvousBackend):
    """Keeps the rendezvous's state under one key of a store."""

    def __init__(
        self, store: dist.Store, seal: Seal, run_id: str, report: Callable[[MeetingError], None] = lambda _: None
    ) -> None:
        self.store = store
        self.seal = seal
        self.key = f"ulysses/rendezvous/{run_id}"
        self.report = report
        self._call("compare_set", self.key, "", EMPTY)  # a read of a missing key would wait for it

    @property
    def name(self) -> str:
        return NAME

    def get_state(self) -> tuple[bytes, bytes] | None:
        return self._open(self._call("get", self.key))

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, bytes, bool] | None:
        """`token`: the stored text when the state was read."""
        expected = token.decode("ascii") if token else EMPTY
        wanted = base64.b64encode(self.seal.close(STATE, state))
        stored = self._call("compare_set", self.key, expected, wanted.decode("ascii"))
        opened = self._open(stored)
        return opened and (*opened, stored == wanted)

    def _open(self, text: bytes) -> tuple[bytes, bytes] | None:
        if text == EMPTY.encode():
            return None
        try:
            return self.seal.open(STATE, base64.b64decode(text, validate=True)), text
        except (ForgedError, binascii.Error):
            message = "the state in the machines' store was not written by this run; none of it was read"
            error = MeetingError(message, f"let no other machine reach the master's port; {KEY_HINT}")
            self.report(error)  # torch ignores some of its own errors
            raise error from None

    def _call(self, name: str, *args: str) -> bytes:
        with asking_the_store(), CALLS.timed():
            return bytes(getattr(self.store, name)(*args))


class Attendance(_BackendRendezvousStateHolder):
    """Holds the rendezvous's state. torch takes a machine for dead whose last heartbeat, a time of day by its own
    clock, is 15 s before the time of day here. Clocks of machines differ, and are set: here the seconds count since
    this machine has seen a new heartbeat."""

    def __init__(
        self, backend: RendezvousBackend, settings: RendezvousSettings, own: Any, heartbeats: Heartbeats | None = None
    ) -> None:
        super().__init__(backend, settings)
        self.own, self.heartbeats = own, heartbeats or Heartbeats()

    def _sanitize(self) -> None:
        beats, now = self._state.last_heartbeats, datetime.now(UTC)
        silences = self.heartbeats.list_silences(beats)
        seen = {node: now - timedelta(seconds=silences[node]) for node in beats}
        self._state.last_heartbeats = seen
        super()._sanitize()
        kept = {node: beats[node] for node in self._state.last_heartbeats}
        # what others are told of them stays as they wrote it; torch also asks when this machine's next one is due
        self._state.last_heartbeats = kept | ({self.own: seen[self.own]} if self.own in kept else {})


class SealedStore:
    """Holds what agents exchange besides the state: ranks, the address of the ranks' own store. Counters carry no
    seal; a forged one can only end a wait early."""

    def __init__(self, store: dist.Store, seal: Seal, prefix: str, check: Callable[[], object] = lambda: None) -> None:
        self.store = store
        self.seal = seal
        self.prefix = prefix
        self.check_state = check

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else value
        with CALLS.timed():
            self.store.set(key, base64.b64encode(self.seal.close(self._name(key), content)).decode("ascii"))

    def get(self, key: str) -> bytes:
        try:
            with CALLS.timed():
                text = self.store.get(key)
            return self.seal.open(self._name(key), base64.b64decode(text, validate=True))
        except (ForgedError, binascii.Error):
            raise MeetingError(f"{key} was not written by an agent of this run", KEY_HINT) from None

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Ends early when `check_state` raises: agents that have ended, or were killed, will not join."""
        end = time.monotonic() + (timeout or self.store.timeout).total_seconds()
        while not self.check(keys):
            self.check_state()
            if time.monotonic() > end:
                raise dist.DistStoreError(f"timed out waiting for {', '.join(keys)}")
            time.sleep(CHECK_SECONDS)

    def __getattr__(self, name: str) -> Any:
        """Passes on add, check, timeout and set_timeout, which carry no content."""
        if name not in ("add", "check", "timeout", "set_timeout"):
            raise AttributeError(f"agents share nothing by {name}")
        attribute = getattr(self.store, name)
        return CALLS.timed()(attribute) if callable(attribute) else attribute

    def _name(self, key: str) -> str:
        return f"{self.prefix}/{key}"


class SealedHandler(DynamicRendezvousHandler):
    """torch's rendezvous handler with a sealed store."""

    backend: SealedBackend
    endpoint: str
    node_rank: int
    store: dist.Store
    end: SharedEnd
    say: Say
    join_seconds: float
    lost_seconds: float
    num_meetings = 0
    signs: Signs | None  # of several machines

    def _get_world(self) -> tuple[int, int]:
        """Uses --node-rank: torch orders machines by their names, but the display and the model are on machine 0."""
        _, num_machines = super()._get_world()
        if self._get_store().add(f"machine {self.node_rank}", 1) > 1:
            message = f"two machines have --node-rank {self.node_rank}"
            raise MeetingError(message, f"give each of {num_machines} its own, from 0 to {num_machines - 1}")
        return self.node_rank, num_machines

    def _get_store(self) -> Any:
        def check() -> None:
            """Called while this agent waits for the others, also at the end of a run that succeeded here: torch would
            wait for five minutes then."""
            self.backend.get_state()
            seconds, number = self.find_quietest()
            if seconds >= SILENT_SECONDS:
                raise dist.DistStoreError(describe_silence(number, seconds))

        prefix = f"round {self._state_holder.state.round}"
        return SealedStore(super()._get_store(), self.backend.seal, prefix, check)

    def next_rendezvous(self) -> RendezvousInfo:
        if self.signs is not None:  # a machine that is lost has until run.join_timeout to come back
            self.signs.pause()
        self.num_meetings += 1
        self.store.add(name_arrivals(self.node_rank), 1)
        try:
            with report_waiting(self._name_missing, self.say):
                met = super().next_rendezvous()
        except RendezvousTimeoutError:
            message = f"{self._name_missing()} at {self.endpoint} within {self.join_seconds:g} s"
            hint = (
                "start the command on each with its own --node-rank; a machine that is refused prints the reason; "
                "run.join_timeout gives them more time"
            )
            raise MeetingError(message, hint) from None
        if self.signs is not None:
            self.signs.watch()
        return met

    def find_quietest(self) -> tuple[float, int]:
        return self.signs.find_quietest() if self.signs is not None else (0.0, self.node_rank)

    def find_lost(self, *, has_ranks: bool) -> str:
        """Returns what is to be said of a machine that is lost, or ''. While ranks run, they may end by themselves
        first, and with a better message; those that load or rehearse have no time-out of their own."""
        called, (silent, number) = CALLS.find_longest(), self.find_quietest()
        if called >= (self.lost_seconds if has_ranks else LOST_SECONDS):
            return f"the machine with number 0 has not answered for {called:.0f} s"
        return describe_silence(number, silent) if has_ranks and silent >= self.lost_seconds else ""

    def num_nodes_waiting(self) -> int:
        """torch asks again and again while ranks run."""
        if self.settings.max_nodes > 1:
            with CALLS.timed():
                self.end.check()
        return super().num_nodes_waiting()

    def _name_missing(self) -> str:
        """By the counters of machines that have come as often as this one. They carry no seal: a forged one changes
        these words alone."""
        wanted = self.settings.max_nodes
        ranks = [rank for rank in range(wanted) if self.store.add(name_arrivals(rank), 0) < self.num_meetings]
        return name_missing(ranks, wanted)


def describe_silence(number: int, seconds: float) -> str:
    return f"the machine with number {number} has given no sign for {seconds:.0f} s"


def name_arrivals(node_rank: int) -> str:
    return f"ulysses/arrivals/{node_rank}"


def make_handler(
    params: RendezvousParameters, report: Callable[[MeetingError], None], say: Say = lambda _: None
) -> SealedHandler:
    seal, node_rank, join_seconds = find_seal(), int(params.get("node_rank", 0)), float(params.get("join_seconds"))
    if params.get("store_type") == "file":
        store: dist.Store = open_file_store(params.endpoint)
    else:
        store = open_store(params.endpoint, seal, None if node_rank else params.local_addr, join_seconds, say)
    backend = SealedBackend(store, seal, params.run_id, report)
    timeout = RendezvousTimeout(join=timedelta(seconds=join_seconds))
    settings = RendezvousSettings(
        params.run_id, params.min_nodes, params.max_nodes, timeout, HEARTBEAT, keep_alive_max_attempt=3
    )
    own = SealedHandler._node_desc_generator.generate(params.local_addr)
    handler = SealedHandler(own, settings, backend.name, store, Attendance(backend, settings, own))
    handler.backend, handler.endpoint, handler.node_rank = backend, params.endpoint, node_rank
    handler.store, handler.say, handler.join_seconds = store, say, join_seconds
    handler.lost_seconds = float(params.get("lost_seconds", "inf"))
    handler.signs = Signs(store, node_rank, params.max_nodes, CALLS) if params.max_nodes > 1 else None
    handler.end = SharedEnd(store, seal, node_rank)
    return handler


@dataclass
class Meeting:
    """The rendezvous of this process's agent, and the errors that occur in it."""

    errors: list[MeetingError] = field(default_factory=list)
    handlers: list[SealedHandler] = field(default_factory=list)

    def find_lost(self, has_ranks: bool) -> str:
        return next(filter(None, (handler.find_lost(has_ranks=has_ranks) for handler in self.handlers)), "")

    def tell_failure(self) -> None:
        """The other machines may find the store gone instead, which ends them too."""
        for handler in self.handlers:
            with suppress(RuntimeError):
                handler.end.tell()


def register(say: Say = lambda _: None) -> Meeting:
    """Registers --rdzv-backend=ulysses. `say` tells the user who is waited for."""
    meeting = Meeting()

    def make(params: RendezvousParameters) -> SealedHandler:
        meeting.handlers.append(make_handler(params, meeting.errors.append, say))
        return meeting.handlers[-1]

    rendezvous_handler_registry.register(NAME, make)
    return meeting


def open_store(
    endpoint: str,
    seal: Seal,
    own_address: str | None,
    join_seconds: float,
    say: Say = lambda _: None,
    answer_seconds: float = ANSWER_SECONDS,
) -> dist.TCPStore:
    """The master's store, which listens at `own_address` alone; with None, a connection to it. `answer_seconds`: for a
    running master to answer."""
    host, _, port = endpoint.rpartition(":")
    if own_address is not None:
        try:
            store = listen(own_address, int(port), ANSWER_TIMEOUT)
        except OSError as error:
            hint = "end what listens there, or choose another port with --master-port"
            raise MeetingError(f"no store can listen at {own_address}:{port}: {error.strerror}", hint) from None
        store.set(GREETING, base64.b64encode(seal.close(GREETING, b"")).decode("ascii"))
        return store
    _wait_for_master(host, int(port), join_seconds, say)
    store = _connect(host, int(port), endpoint, answer_seconds)
    try:
        store.wait([GREETING], ANSWER_TIMEOUT)
        seal.open(GREETING, base64.b64decode(store.get(GREETING), validate=True))
    except (ForgedError, binascii.Error):
        raise MeetingError(f"this machine has another key than the run at {endpoint}", KEY_HINT) from None
    except RuntimeError:
        raise MeetingError(
            f"what listens at {endpoint} is not the master of a run", _ask_for_master(endpoint)
        ) from None
    return store


def _wait_for_master(host: str, port: int, join_seconds: float, say: Say) -> None:
    """Machines start in any order."""
    end, endpoint = time.monotonic() + join_seconds, f"{host}:{port}"
    with report_waiting(lambda: f"nothing answers at {endpoint}, where machine number 0 should be", say):
        while True:
            try:
                socket.create_connection((host, port), timeout=ANSWER_SECONDS).close()
                return
            except OSError as error:
                if time.monotonic() > end:
                    message = f"nothing answers at {endpoint} within {join_seconds:g} s: {error.strerror or error}"
                    hint = f"{_ask_for_master(endpoint)}; where it downloads or prepares data for longer, set a longer "
                    raise MeetingError(message, f"{hint}run.join_timeout on all machines") from None
            time.sleep(0.5)


def _connect(host: str, port: int, endpoint: str, answer_seconds: float) -> dist.TCPStore:
    """Connects in a thread: torch waits without end for a listener that does not answer."""
    stores: list[dist.TCPStore] = []

    def connect() -> None:
        with suppress(dist.DistError):  # it comes when nobody waits any more; no store says the same
            stores.append(dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=ANSWER_TIMEOUT))

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(answer_seconds)
    if not stores:
        raise MeetingError(f"what listens at {endpoint} is not the master of a run", _ask_for_master(endpoint))
    return stores[0]


def _ask_for_master(endpoint: str) -> str:
    return f"start the command with --node-rank 0 on {endpoint.rpartition(':')[0]}, and let this machine reach its port"
