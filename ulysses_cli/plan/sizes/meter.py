"""Counts the bytes of storages: what is allocated now, on the device and on the host, and the peak of each phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Tag = tuple[str, str]  # what kind of work makes a storage, and the path of the module in which it is made


@dataclass(eq=False)
class Place:
    """TensorDevice or host memory."""

    now: int = 0
    peak: int = 0  # of the present phase
    peaks: dict[str, int] = field(default_factory=dict)


class ByteMeter:
    """`events`: where it is a list, bytes are noted there in order as they come (above 0) and go (below 0), with the
    phase and the storage's tag. `held`: by tag, what is there before the first event."""

    def __init__(self, events: list[tuple[int, str, Tag]] | None = None) -> None:
        self.device, self.host = Place(), Place()
        self.phase, self.events = "", events
        self.tag: Tag = ("", "")
        self.held: Counter[Tag] = Counter()

    def add(self, num_bytes: int, tag: Tag, *, on_host: bool) -> None:
        place = self.host if on_host else self.device
        place.now += num_bytes
        if place.now > place.peak:
            place.peak = place.now
        if self.events is not None and num_bytes and not on_host:
            self.events.append((num_bytes, self.phase, tag))

    def add_temporary(self, num_bytes: int) -> None:
        """Memory that an operator takes and gives back."""
        self.add(num_bytes, self.tag, on_host=False)
        self.add(-num_bytes, self.tag, on_host=False)

    def forget(self, *kept: str) -> None:
        """Forgets events and the peaks of all phases but these."""
        for num_bytes, _, tag in self.events or ():
            self.held[tag] += num_bytes
        self.events = None if self.events is None else []
        for place in (self.device, self.host):
            place.peak = place.now
            place.peaks = {phase: peak for phase, peak in place.peaks.items() if phase in kept}

    def enter(self, phase: str) -> str:
        """Begins a phase and returns the one before."""
        for place in (self.device, self.host):
            place.peaks[self.phase] = max(place.peak, place.peaks.get(self.phase, 0))
            place.peak = place.now
        before, self.phase = self.phase, phase
        return before

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)
