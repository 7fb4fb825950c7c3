"""Says which machines are missing while the others wait for them, times the calls to their store, and tells by signs in
that store which machine is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch.distributed as dist

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

    def __init__(self, store: dist.Store, own: int, count: int, calls: StoreCalls) -> None:
        self.store, self.own, self.count, self.calls = store, own, count, calls
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
                time.sleep(SIGN_SECONDS)
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
