"""Tests agents that meet: what was written with another key, or without one, is neither read nor executed."""

import base64
import io
import os
import pickle
import queue
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.networks import list_listening
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _RendezvousContext,
    _should_keep_alive,
)

from ulysses_cli.run.key import KEY, Seal
from ulysses_cli.train.processes import rendezvous
from ulysses_cli.train.processes.rendezvous import (
    Attendance,
    SealedBackend,
    SealedHandler,
    SealedStore,
    make_handler,
    open_store,
)
from ulysses_cli.train.processes.store import (
    ASK_SECONDS,
    END_SECONDS,
    Heartbeats,
    MeetingError,
    SharedEnd,
    Signs,
    StoreCalls,
    listen,
    name_missing,
    report_waiting,
)

OURS, THEIRS = Seal("o" * 40), Seal("t" * 40)
TIMEOUT = timedelta(seconds=20)


class Payload:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return io.open, (str(self.file), "w")


def read_state(backend: RendezvousBackend) -> None:
    settings = RendezvousSettings("x", 1, 1, RendezvousTimeout(), timedelta(seconds=5), 3)
    _BackendRendezvousStateHolder(backend, settings).sync()


def test_a_state_without_the_runs_seal_is_not_unpickled(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """torch's own backend unpickles the state, which shows that the attack is real."""
    evil, store = pickle.dumps(Payload(tmp_path / "ran")), dist.HashStore()
    plain, sealed = C10dRendezvousBackend(store, "x"), SealedBackend(store, OURS, "x")
    store.set("torch.rendezvous.x", base64.b64encode(evil).decode())
    with pytest.raises(AttributeError):  # what the payload returns is no state
        read_state(plain)
    assert (tmp_path / "ran").exists()
    (tmp_path / "ran").unlink()
    others = (THEIRS.close("rendezvous", evil), OURS.close("a value gathered from all ranks", evil))
    said = set()
    for text in (evil, *map(base64.b64encode, (evil, *others)), b"\xff", b""):
        store.set(sealed.key, text)
        said.add(explain(read_state, sealed, error=MeetingError))
    assert said == snapshot
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("seal", [OURS, THEIRS], ids=["told", "forged"])
def test_the_end_of_a_run_on_one_machine_ends_it_on_the_others(seal: Seal, snapshot: SnapshotAssertion) -> None:
    """They get some time to notice it by themselves."""
    store, now = dist.HashStore(), [0.0]
    watching = SharedEnd(store, OURS, 0, lambda: now[0])
    watching.check()
    for number in (1, 2):
        SharedEnd(store, seal, number).tell()
    for seconds in (ASK_SECONDS, ASK_SECONDS + END_SECONDS - 0.1):
        now[0] = seconds
        watching.check()
    now[0] += 0.1
    assert explain(watching.check, error=MeetingError) == snapshot


class GoneStore:
    def check(self, _: list[str]) -> bool:
        raise dist.DistNetworkError("Connection reset by peer")

    def get(self, _: str) -> bytes:
        raise dist.DistNetworkError("Connection reset by peer")


def test_a_lost_store_has_one_message(snapshot: SnapshotAssertion) -> None:
    """The agent asks for a failure of another machine before torch asks for the state."""
    store: Any = GoneStore()
    watching = SharedEnd(store, OURS, 0, lambda: END_SECONDS)
    said = set()
    for known_since in (None, 0.0):
        watching.known_since = known_since
        said.add(explain(watching.check, error=RendezvousConnectionError))
    assert said == snapshot


SETTINGS = RendezvousSettings("x", 2, 2, RendezvousTimeout(), timedelta(seconds=5), 3)


def hold(backend: SealedBackend, node: Any, seconds: list[float]) -> Attendance:
    holder = Attendance(backend, SETTINGS, node, Heartbeats(lambda: seconds[0]))
    holder._cache_duration = 0
    holder.sync()
    return holder


def test_a_machine_whose_clock_differs_is_not_taken_for_dead() -> None:
    """torch compares times of day of two clocks; 15 s of difference made ranks of one run start as two runs."""
    seconds, backend = [0.0], SealedBackend(dist.HashStore(), OURS, "x")
    own, other = (SealedHandler._node_desc_generator.generate(name) for name in ("here", "there"))

    def beat(holder: Attendance, node: Any, clock: float) -> None:
        """As torch writes it, by a clock that differs by so many seconds."""
        holder.sync()
        holder.state.participants.setdefault(node, len(holder.state.participants))
        holder.state.last_heartbeats[node] = datetime.now(UTC) + timedelta(seconds=clock + seconds[0])
        holder.mark_dirty()
        holder.sync()

    for clock in (-90.0, 86_400.0):
        here, there = hold(backend, own, seconds), hold(backend, other, seconds)
        for _ in range(8):
            beat(here, own, 0.0)
            beat(there, other, clock)
            here.sync()
            assert set(here.state.participants) == {own, other}
            assert set(there.state.participants) == {own, other}
            seconds[0] += 5.0
    for _ in range(4):  # the other one gives no heartbeat any more
        beat(here, own, 0.0)
        seconds[0] += 5.0
    assert set(here.state.participants) == {own}


def test_a_clock_that_is_set_back_silences_no_machine() -> None:
    seconds, own = [0.0], SealedHandler._node_desc_generator.generate("here")
    holder = hold(SealedBackend(dist.HashStore(), OURS, "x"), own, seconds)
    holder.state.last_heartbeats[own] = datetime.now(UTC) + timedelta(hours=1)
    holder.mark_dirty()
    holder.sync()
    assert not _should_keep_alive(_RendezvousContext(own, holder.state, SETTINGS))
    seconds[0] += 6.0
    holder.sync()
    assert _should_keep_alive(_RendezvousContext(own, holder.state, SETTINGS))


def test_a_state_is_set_only_by_one_that_read_the_newest() -> None:
    store = dist.HashStore()
    first, second = SealedBackend(store, OURS, "x"), SealedBackend(store, OURS, "x")
    assert first.get_state() is None
    one = first.set_state(b"one")
    assert (one[0], one[2]) == (b"one", True)
    late = second.set_state(b"two")
    assert (late[0], late[2]) == (b"one", False), "there is a state already"
    two = second.set_state(b"two", late[1])
    assert two[2]
    stale = first.set_state(b"three", one[1])
    assert (stale[0], stale[2]) == (b"two", False)
    assert first.get_state() == two[:2]


def test_messages_of_agents_belong_to_a_key_and_a_round(snapshot: SnapshotAssertion) -> None:
    store = dist.HashStore()
    ours = SealedStore(store, OURS, "round 1")
    ours.multi_set(["a", "b"], ["1", b"\xff"])
    assert ours.multi_get(["a", "b"]) == [b"1", b"\xff"]
    assert ours.add("count", 2) == 2
    store.set("b", store.get("a"))
    said = []
    for other, key in ((ours, "b"), (SealedStore(store, THEIRS, "round 1"), "a"), (SealedStore(store, OURS, "2"), "a")):
        said.append(explain(other.get, key, error=MeetingError))
    assert said == snapshot
    with pytest.raises(AttributeError):
        ours.append("a", "x")


def test_an_agent_stops_waiting_when_the_state_is_not_valid() -> None:
    store, messages = dist.HashStore(), list[MeetingError]()
    backend = SealedBackend(store, OURS, "x", messages.append)
    agents = SealedStore(store, OURS, "round 1", backend.get_state)
    with pytest.raises(dist.DistStoreError):
        agents.wait(["the others"], timedelta(seconds=0.1))
    store.set(backend.key, "spoilt")
    with pytest.raises(MeetingError):
        agents.wait(["the others"], TIMEOUT)
    assert len(messages) == 1
    store.set("the others", "here")
    agents.wait(["the others"], TIMEOUT)


def find_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Machines:
    """Agents of one run in threads, each with its rank. `results` holds what each of them gets."""

    def __init__(self) -> None:
        self.port, self.results, self.done = find_port(), queue.Queue[Any](), threading.Event()

    def start(self, *node_ranks: int) -> None:
        for node_rank in node_ranks:
            threading.Thread(target=self._join, args=(node_rank,), daemon=True).start()

    def _join(self, node_rank: int) -> None:
        """Joins with addresses by which the master would come last."""
        address = f"10.0.0.{node_rank}" if node_rank else "127.0.0.1"
        endpoint = f"127.0.0.1:{self.port}"
        own = {"node_rank": node_rank, "join_seconds": 60, "lost_seconds": 90}
        params = RendezvousParameters("ulysses", endpoint, "x", 2, 2, local_addr=address, **own)
        try:
            made = make_handler(params, lambda _: None).next_rendezvous()
        except Exception as error:  # noqa: BLE001 - the test judges it
            self.results.put(error)
            return
        made.store.set(f"of {made.rank}", str(made.rank))
        self.results.put((node_rank, made.rank, made.world_size, made.store.get(f"of {1 - made.rank}")))
        self.done.wait(60)


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.setenv(KEY, OURS.key)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    made = Machines()
    yield made
    made.done.set()


def test_machines_with_one_key_meet_in_order_and_another_key_is_refused(
    machines: Machines, snapshot: SnapshotAssertion
) -> None:
    machines.start(1, 0)
    assert sorted(machines.results.get(timeout=60) for _ in range(2)) == [(0, 0, 2, b"1"), (1, 1, 2, b"0")]
    with pytest.raises(MeetingError) as refused:
        open_store(f"127.0.0.1:{machines.port}", THEIRS, None, 60.0)
    assert (str(refused.value).replace(str(machines.port), "PORT"), refused.value.hint) == snapshot


class CuttableStore:
    """A store that a machine can be cut off from."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.is_cut = store, False

    def add(self, key: str, amount: int) -> int:
        if self.is_cut:
            raise RuntimeError("the machine is lost")
        return self.store.add(key, amount)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.store.get(key) for key in keys]


def test_signs_name_the_machine_that_is_lost() -> None:
    """Whatever machines do: only those count that have met, and a new meeting forgets old silences."""
    store = dist.HashStore()
    ends: list[Any] = [CuttableStore(store) for _ in range(3)]
    first, second, third = (Signs(end, own, 3, StoreCalls(), 0.01) for own, end in enumerate(ends))

    def wait_for(seconds: float) -> None:
        end = time.monotonic() + 60
        while first.find_quietest()[0] < seconds:
            assert time.monotonic() < end
            time.sleep(0.01)

    assert first.find_quietest() == (0.0, 0), "they have not met"
    for each in (first, second, third):
        each.watch()
    ends[1].is_cut = True
    wait_for(1.0)
    assert first.find_quietest()[1] == 1
    assert third.find_quietest()[1] == 1
    first.pause()
    assert first.find_quietest() == (0.0, 0)
    first.watch()
    assert first.find_quietest()[0] < 1.0
    wait_for(1.0)
    for end in ends:
        end.is_cut = True


def test_ranks_may_end_by_themselves_before_a_lost_machine_ends_them(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """Where nothing is done, machines that give no sign may come back."""
    handler = object.__new__(rendezvous.SealedHandler)
    handler.lost_seconds, handler.node_rank, handler.signs = 100.0, 0, None
    said = {}
    for called, silent in ((99.0, 0.0), (101.0, 0.0), (0.0, 101.0)):
        monkeypatch.setattr(rendezvous.CALLS, "find_longest", lambda called=called: called)
        handler.find_quietest = lambda silent=silent: (silent, 2)  # type: ignore[method-assign, misc]
        for has_ranks in (True, False):
            said[f"{called} s, {silent} s, ranks: {has_ranks}"] = handler.find_lost(has_ranks=has_ranks)
    assert said == snapshot


@pytest.mark.check
def test_two_machines_with_one_rank_are_refused(machines: Machines, snapshot: SnapshotAssertion) -> None:
    master = open_store(f"127.0.0.1:{machines.port}", OURS, "127.0.0.1", 60.0)
    machines.start(1, 1)
    assert str(machines.results.get(timeout=60)) == snapshot
    assert master.port == machines.port


@pytest.mark.check
def test_an_address_without_a_master_is_reported(snapshot: SnapshotAssertion) -> None:
    said = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        own = silent.getsockname()[1]
        for host, port, listens_at, seconds in (
            ("127.0.0.1", find_port(), None, 0.1), ("127.0.0.1", own, None, 0.1), ("x", own, "127.0.0.1", 60.0)
        ):  # fmt: skip
            with pytest.raises(MeetingError) as failed:
                open_store(f"{host}:{port}", OURS, listens_at, seconds, answer_seconds=0.5)
            said.append(f"{failed.value}: {failed.value.hint}".replace(str(port), "PORT"))
    assert said == snapshot


def test_a_store_listens_at_one_address() -> None:
    before = set(list_listening(os.getpid()))
    store = listen("127.0.0.1", 0, TIMEOUT)
    assert set(list_listening(os.getpid())) - before == {("127.0.0.1", store.port)}


def test_a_store_that_does_not_answer_is_timed() -> None:
    """The longest call counts, of any thread; one that has ended does not."""
    calls, release = StoreCalls(), threading.Event()
    assert calls.find_longest() == 0.0

    @calls.timed()
    def wait() -> None:
        release.wait(60)

    thread = threading.Thread(target=wait)
    thread.start()
    while not calls.begun:
        time.sleep(0.001)
    begun = next(iter(calls.begun.values()))
    with calls.timed():
        assert calls.find_longest() >= time.monotonic() - begun - 1.0
        assert len(calls.begun) == 2
    release.set()
    thread.join()
    assert calls.find_longest() == 0.0


def test_who_waits_says_for_whom(snapshot: SnapshotAssertion) -> None:
    lines: list[str] = []
    said = threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        said.set()

    with report_waiting(lambda: name_missing([1, 3], 4), say, 0.01):
        assert said.wait(60)
    num_lines = len(lines)
    assert [
        lines[0].rpartition(",")[0],
        name_missing([2], 4),
        name_missing(range(9), 9),
        name_missing([], 2),
    ] == snapshot
    assert len(lines) == num_lines, "the block is over"
