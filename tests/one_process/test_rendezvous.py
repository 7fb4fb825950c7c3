"""Tests agents that meet: what was written with another key, or without one, is neither read nor executed."""

import base64
import io
import os
import pickle
import queue
import re
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
from ulysses_cli.train.processes import store as waiting
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


def test_a_state_without_the_runs_seal_is_not_unpickled(tmp_path: Path) -> None:
    """torch's own backend unpickles the state, which shows that the attack is real."""
    evil, store = pickle.dumps(Payload(tmp_path / "ran")), dist.HashStore()
    plain, sealed = C10dRendezvousBackend(store, "x"), SealedBackend(store, OURS, "x")
    store.set("torch.rendezvous.x", base64.b64encode(evil).decode())
    with pytest.raises(AttributeError):  # what the payload returns is no state
        read_state(plain)
    assert (tmp_path / "ran").exists()
    (tmp_path / "ran").unlink()
    for text in (evil, base64.b64encode(evil), base64.b64encode(THEIRS.close("rendezvous", evil)), b"\xff", b""):
        store.set(sealed.key, text)
        with pytest.raises(MeetingError, match="was not written by this run"):
            read_state(sealed)
    sealed_elsewhere = base64.b64encode(OURS.close("a value gathered from all ranks", evil))
    store.set(sealed.key, sealed_elsewhere)
    with pytest.raises(MeetingError):
        read_state(sealed)
    assert not (tmp_path / "ran").exists()


def test_the_end_of_a_run_on_one_machine_ends_it_on_the_others() -> None:
    """They get some time to notice it by themselves."""
    store, now = dist.HashStore(), [0.0]
    first, second = (SharedEnd(store, OURS, number, lambda: now[0]) for number in (1, 2))
    watching = SharedEnd(store, OURS, 0, lambda: now[0])
    watching.check()
    first.tell()
    second.tell()
    now[0] = ASK_SECONDS
    watching.check()
    now[0] += END_SECONDS - 0.1
    watching.check()
    now[0] += 0.1
    with pytest.raises(MeetingError, match="failed on machine number 1, and ranks of this machine did not end"):
        watching.check()


class GoneStore:
    def check(self, _: list[str]) -> bool:
        raise dist.DistNetworkError("Connection reset by peer")

    def get(self, _: str) -> bytes:
        raise dist.DistNetworkError("Connection reset by peer")


def test_a_lost_store_has_one_message() -> None:
    """The agent asks for a failure of another machine before torch asks for the state."""
    store: Any = GoneStore()
    watching = SharedEnd(store, OURS, 0, lambda: END_SECONDS)
    for known_since in (None, 0.0):
        watching.known_since = known_since
        with pytest.raises(RendezvousConnectionError, match="the machines' store is gone"):
            watching.check()


def test_an_agent_is_silent_by_this_machines_clock_alone() -> None:
    now = [100.0]
    heartbeats = Heartbeats(lambda: now[0])
    assert heartbeats.find_longest({}) == 0.0
    assert heartbeats.find_longest({"a": "12:00", "b": "11:00"}) == 0.0
    now[0] += 4.0
    assert heartbeats.find_longest({"a": "12:04", "b": "11:00"}) == 4.0
    now[0] += 4.0
    assert heartbeats.find_longest({"a": "12:08"}) == 8.0, "torch forgets agents that it takes for dead"
    assert heartbeats.find_longest({"a": "12:08", "b": None}) == 8.0
    now[0] += 4.0
    assert heartbeats.find_longest({"a": "12:08", "b": "11:12"}) == 4.0


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


def test_a_forged_end_of_a_run_is_told_apart() -> None:
    store, now = dist.HashStore(), [0.0]
    SharedEnd(store, THEIRS, 1).tell()
    watching = SharedEnd(store, OURS, 0, lambda: now[0])
    watching.check()
    now[0] = END_SECONDS
    with pytest.raises(MeetingError, match="no machine of this run has written"):
        watching.check()


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


def test_messages_of_agents_belong_to_a_key_and_a_round() -> None:
    store = dist.HashStore()
    ours = SealedStore(store, OURS, "round 1")
    ours.multi_set(["a", "b"], ["1", b"\xff"])
    assert ours.multi_get(["a", "b"]) == [b"1", b"\xff"]
    assert ours.add("count", 2) == 2
    store.set("b", store.get("a"))
    for other, key in ((ours, "b"), (SealedStore(store, THEIRS, "round 1"), "a"), (SealedStore(store, OURS, "2"), "a")):
        with pytest.raises(MeetingError, match="was not written by an agent of this run"):
            other.get(key)
    with pytest.raises(AttributeError):
        ours.append("a", "x")


def test_an_agent_stops_waiting_when_the_state_is_not_valid() -> None:
    store, messages = dist.HashStore(), list[MeetingError]()
    backend = SealedBackend(store, OURS, "x", messages.append)
    agents = SealedStore(store, OURS, "round 1", backend.get_state)
    with pytest.raises(dist.DistStoreError, match="timed out waiting for the others"):
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


def test_machines_with_one_key_meet_in_order_and_another_key_is_refused(machines: Machines) -> None:
    machines.start(1, 0)
    assert sorted(machines.results.get(timeout=60) for _ in range(2)) == [(0, 0, 2, b"1"), (1, 1, 2, b"0")]
    with pytest.raises(MeetingError, match=f"another key than the run at 127.0.0.1:{machines.port}") as refused:
        open_store(f"127.0.0.1:{machines.port}", THEIRS, None, 60.0)
    assert "ULYSSES_RUN_KEY" in refused.value.hint


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


def test_signs_name_the_machine_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever machines do: only those count that have met, and a new meeting forgets old silences."""
    monkeypatch.setattr(waiting, "SIGN_SECONDS", 0.01)
    store = dist.HashStore()
    ends: list[Any] = [CuttableStore(store) for _ in range(3)]
    first, second, third = (Signs(end, own, 3, StoreCalls()) for own, end in enumerate(ends))

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


def test_ranks_may_end_by_themselves_before_a_lost_machine_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = object.__new__(rendezvous.SealedHandler)
    handler.lost_seconds, handler.node_rank, handler.signs = 100.0, 0, None
    called, silent = [0.0], [0.0]
    monkeypatch.setattr(rendezvous.CALLS, "find_longest", lambda: called[0])
    handler.find_quietest = lambda: (silent[0], 2)  # type: ignore[method-assign]
    for seconds, with_ranks, without in ((99.0, "", "has not answered for 99 s"), (101.0, "for 101 s", "for 101 s")):
        called[0] = seconds
        assert handler.find_lost(has_ranks=True).endswith(with_ranks)
        assert bool(handler.find_lost(has_ranks=True)) == bool(with_ranks)
        assert handler.find_lost(has_ranks=False).endswith(without)
    called[0], silent[0] = 0.0, 101.0
    assert handler.find_lost(has_ranks=True) == "the machine with number 2 has given no sign for 101 s"
    assert handler.find_lost(has_ranks=False) == "", "machines may come back while nothing is done"


@pytest.mark.check
def test_two_machines_with_one_rank_are_refused(machines: Machines) -> None:
    master = open_store(f"127.0.0.1:{machines.port}", OURS, "127.0.0.1", 60.0)
    machines.start(1, 1)
    assert str(machines.results.get(timeout=60)) == "two machines have --node-rank 1"
    assert master.port == machines.port


@pytest.mark.check
def test_an_address_without_a_master_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "ANSWER_SECONDS", 0.5)
    with pytest.raises(MeetingError, match=r"nothing answers at 127.0.0.1:[0-9]+ within 0.1 s"):
        open_store(f"127.0.0.1:{find_port()}", OURS, None, 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(MeetingError, match="is not the master of a run"):
            open_store(f"127.0.0.1:{silent.getsockname()[1]}", OURS, None, 0.1)
        with pytest.raises(MeetingError, match=r"no store can listen at .*: Address already in use") as messages:
            open_store(f"x:{silent.getsockname()[1]}", OURS, "127.0.0.1", 60.0)
        assert "--master-port" in messages.value.hint


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


def test_who_waits_says_for_whom() -> None:
    lines: list[str] = []
    said = threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        said.set()

    with report_waiting(lambda: name_missing([1, 3], 4), say, 0.01):
        assert said.wait(60)
    num_lines = len(lines)
    assert re.fullmatch(r"of 4 machines, numbers 1, 3 have not come, after \d+ s", lines[0])
    assert name_missing([2], 4) == "of 4 machines, number 2 has not come"
    assert name_missing(range(9), 9).endswith("7, ... have not come")
    assert "do not agree" in name_missing([], 2)
    assert len(lines) == num_lines, "the block is over"
