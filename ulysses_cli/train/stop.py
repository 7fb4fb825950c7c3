"""Reasons to stop before the last step: a signal, the time, the money. Each rank has wishes; all ranks follow any one.

A first signal asks for a stop at the next step's boundary; a second one ends the process at once.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from types import FrameType

REASONS = ("a signal", "run.max_hours", "run.max_cost")
INTERRUPTED = 130


class StopWishes:
    """What this rank would stop for."""

    def __init__(self, max_hours: float | None = None, max_cost: float | None = None, usd_per_hour: float = 0.0):
        self.max_hours, self.max_cost, self.usd_per_hour = max_hours, max_cost, usd_per_hour
        self.hours_before = 0.0  # of the run that is resumed
        self.started = time.monotonic()
        self.signals = 0

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.signals += 1
        if self.signals > 1 and number == signal.SIGINT:
            os._exit(INTERRUPTED)

    @property
    def hours(self) -> float:
        return self.hours_before + (time.monotonic() - self.started) / 3600

    def read_flags(self) -> tuple[int, ...]:
        late = self.max_hours is not None and self.hours >= self.max_hours
        dear = self.max_cost is not None and self.hours * self.usd_per_hour >= self.max_cost
        return int(self.signals > 0), int(late), int(dear)

    @staticmethod
    def name(flags: Sequence[int]) -> str:
        return next((reason for reason, flag in zip(REASONS, flags, strict=True) if flag), "")
