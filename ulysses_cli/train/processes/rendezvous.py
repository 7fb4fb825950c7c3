"""Where launchers of one run meet: torch's elastic rendezvous, whose state is a pickle in a store that answers whoever
reaches its port. Here nothing is unpickled or believed that does not carry the run's seal, and the store listens at one
address. On one machine the store is a file in a folder that is the user's alone.
"""

from __future__ import annotations

import base64
import binascii
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
)

from ulysses_cli.run_folder.seal import KEY, ForgedError, Seal, find_seal
from ulysses_cli.train.processes.rank_store import listen

NAME = "ulysses"
STATE, EMPTY = "rendezvous", "empty"
GREETING = "ulysses/greeting"
JOIN_SECONDS = 600  # for all machines to come
ANSWER_SECONDS = 60.0  # for one that is there to answer
LOOK_SECONDS = 0.2
ANSWER_TIMEOUT = timedelta(seconds=ANSWER_SECONDS)
KEY_HINT = (
    f"the key is {KEY}, or run.output_dir/key where that is not set: give every machine the same, or one shared disk"
)


class MeetingError(RendezvousStateError):
    """Machines that cannot meet: what is wrong, and what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class SealedBackend(RendezvousBackend):
    """The rendezvous's state, in one key of a store."""

    def __init__(
        self, store: dist.Store, seal: Seal, run_id: str, tell: Callable[[MeetingError], None] = lambda _: None
    ) -> None:
        self.store, self.seal, self.key, self.tell = store, seal, f"ulysses/rendezvous/{run_id}", tell
        self._call("compare_set", self.key, "", EMPTY)  # a read of a key that is not there would wait for it

    @property
    def name(self) -> str:
        return NAME

    def get_state(self) -> tuple[bytes, bytes] | None:
        return self._open(self._call("get", self.key))

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, bytes, bool] | None:
        """A token is what stood there when the state was read."""
        expected = token.decode("ascii") if token else EMPTY
        wanted = base64.b64encode(self.seal.close(STATE, state))
        stands = self._call("compare_set", self.key, expected, wanted.decode("ascii"))
        found = self._open(stands)
        return found and (*found, stands == wanted)

    def _open(self, text: bytes) -> tuple[bytes, bytes] | None:
        if text == EMPTY.encode():
            return None
        try:
            return self.seal.open(STATE, base64.b64decode(text, validate=True)), text
        except (ForgedError, binascii.Error):
            message = "what stands where machines meet was not written by this run; none of it was read"
            error = MeetingError(message, f"let nobody else reach the master's port; {KEY_HINT}")
            self.tell(error)  # torch passes over some of its own errors
            raise error from None

    def _call(self, name: str, *args: str) -> bytes:
        try:
            return bytes(getattr(self.store, name)(*args))
        except (ValueError, RuntimeError) as error:
            raise RendezvousConnectionError("the store where machines meet is gone") from error


class SealedStore:
    """What launchers tell each other beside that: ranks, the address of the ranks' own store. Counters are numbers as
    they are; a forged one can only end a wait early."""

    def __init__(self, store: dist.Store, seal: Seal, place: str, look: Callable[[], object] = lambda: None) -> None:
        self.store, self.seal, self.place, self.look = store, seal, place, look

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else value
        self.store.set(key, base64.b64encode(self.seal.close(self._name(key), content)).decode("ascii"))

    def get(self, key: str) -> bytes:
        try:
            return self.seal.open(self._name(key), base64.b64decode(self.store.get(key), validate=True))
        except (ForgedError, binascii.Error):
            raise MeetingError(f"{key} was not written by a launcher of this run", KEY_HINT) from None

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Ends early when `look` raises: launchers that have ended will not come."""
        end = time.monotonic() + (timeout or self.store.timeout).total_seconds()
        while not self.store.check(keys):
            self.look()
            if time.monotonic() > end:
                raise dist.DistStoreError(f"waited in vain for {', '.join(keys)}")
            time.sleep(LOOK_SECONDS)

    def __getattr__(self, name: str) -> Any:
        """add, check, timeout, set_timeout: they carry no content."""
        if name not in ("add", "check", "timeout", "set_timeout"):
            raise AttributeError(f"launchers share nothing by {name}")
        return getattr(self.store, name)

    def _name(self, key: str) -> str:
        return f"{self.place}/{key}"


class SealedHandler(DynamicRendezvousHandler):
    """torch's rendezvous, which hands out a sealed store."""

    backend: SealedBackend
    endpoint: str
    node_rank: int

    def _get_world(self) -> tuple[int, int]:
        """torch orders machines by their names. The display and the model are where --node-rank is 0."""
        _, num_machines = super()._get_world()
        if self._get_store().add(f"machine {self.node_rank}", 1) > 1:
            message = f"two machines say --node-rank {self.node_rank}"
            raise MeetingError(message, f"give each of {num_machines} its own, from 0 to {num_machines - 1}")
        return self.node_rank, num_machines

    def _get_store(self) -> Any:
        place = f"round {self._state_holder.state.round}"
        return SealedStore(super()._get_store(), self.backend.seal, place, self.backend.get_state)

    def next_rendezvous(self) -> RendezvousInfo:
        try:
            return super().next_rendezvous()
        except RendezvousTimeoutError:
            wanted = self.settings.max_nodes
            message = f"not all of {wanted} machines have come to {self.endpoint} within {JOIN_SECONDS} s"
            hint = "start the command on each with its own --node-rank; one that is refused says why"
            raise MeetingError(message, hint) from None


def make_handler(params: RendezvousParameters, tell: Callable[[MeetingError], None]) -> SealedHandler:
    seal, node_rank = find_seal(), int(params.get("node_rank", 0))
    if params.get("store_type") == "file":
        store: dist.Store = dist.FileStore(params.endpoint)
    else:
        store = open_store(params.endpoint, seal, None if node_rank else params.local_addr)
    backend = SealedBackend(store, seal, params.run_id, tell)
    handler = SealedHandler.from_backend(
        params.run_id,
        store,
        backend,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        RendezvousTimeout(join=timedelta(seconds=JOIN_SECONDS)),
    )
    assert isinstance(handler, SealedHandler)
    handler.backend, handler.endpoint, handler.node_rank = backend, params.endpoint, node_rank
    return handler


def register() -> list[MeetingError]:
    """For --rdzv-backend=ulysses. -> what was wrong, as it is found."""
    found: list[MeetingError] = []
    rendezvous_handler_registry.register(NAME, partial(make_handler, tell=found.append))
    return found


def open_store(endpoint: str, seal: Seal, own_address: str | None) -> dist.TCPStore:
    """The master's, which listens at its own address alone; or, with None, a connection to it."""
    host, _, port = endpoint.rpartition(":")
    if own_address is not None:
        try:
            store = listen(own_address, int(port), ANSWER_TIMEOUT)
        except OSError as error:
            hint = "end what listens there, or choose another port with --master-port"
            raise MeetingError(f"no store can listen at {own_address}:{port}: {error.strerror}", hint) from None
        store.set(GREETING, base64.b64encode(seal.close(GREETING, b"")).decode("ascii"))
        return store
    _wait_for_master(host, int(port), endpoint)
    store = _connect(host, int(port), endpoint)
    try:
        store.wait([GREETING], ANSWER_TIMEOUT)
        seal.open(GREETING, base64.b64decode(store.get(GREETING), validate=True))
    except (ForgedError, binascii.Error):
        raise MeetingError(f"this machine has another key than the run at {endpoint}", KEY_HINT) from None
    except RuntimeError:
        raise MeetingError(f"what listens at {endpoint} is no master of a run", _ask_for_master(endpoint)) from None
    return store


def _wait_for_master(host: str, port: int, endpoint: str) -> None:
    """Machines start in any order."""
    end = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            socket.create_connection((host, port), timeout=ANSWER_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                message = f"nothing answers at {endpoint} within {JOIN_SECONDS} s: {error.strerror or error}"
                raise MeetingError(message, _ask_for_master(endpoint)) from None
        time.sleep(0.5)


def _connect(host: str, port: int, endpoint: str) -> dist.TCPStore:
    """torch waits without end for a listener that says nothing, so somebody else waits for torch."""
    found: list[dist.TCPStore] = []

    def connect() -> None:
        found.append(dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=ANSWER_TIMEOUT))

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    if not found:
        raise MeetingError(f"what listens at {endpoint} is no master of a run", _ask_for_master(endpoint))
    return found[0]


def _ask_for_master(endpoint: str) -> str:
    return f"start the command with --node-rank 0 on {endpoint.rpartition(':')[0]}, and let this machine reach its port"
