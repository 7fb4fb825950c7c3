"""Says which machines are missing while the others wait for them, and limits how long one call to their store takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

REPORT_SECONDS = 15.0
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
        now = self.clock()
        for agent, beat in beats.items():
            if agent not in self.seen or beat not in (None, self.seen[agent][0]):
                self.seen[agent] = beat, now
        return max((now - since for _, since in self.seen.values()), default=0.0)


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
