"""Two worlds of ranks on one machine that take steps in turns, so that what disturbs one disturbs the other; and what
their pairs of steps say."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(eq=False)
class Turn:
    """One side's hold on the machine. Rank 0 holds the wire to the other side; a side that is alone never waits."""

    wire: Connection | None = None
    is_held: bool = False

    def take(self, group: Any = None) -> None:
        """Collective over the group: all ranks begin when the other side has ended its step."""
        if self.wire is not None and not self.is_held:
            try:
                self.wire.recv_bytes()
            except (EOFError, OSError):
                self.wire = None  # the other side is done, or failed
        importlib.import_module("torch.distributed").barrier(group=group)  # torch may be broken where this is imported

    def hand_over(self) -> None:
        self.is_held = False
        if self.wire is not None:
            try:
                self.wire.send_bytes(b"turn")
            except OSError:
                self.wire = None


@dataclass(frozen=True)
class Pairs:
    """How many times as long a step of the other side takes as the step of ours beside it: median and spread."""

    num_pairs: int
    middle: float
    low: float  # a quarter of the pairs lies below
    high: float  # and a quarter above


def compare_pairs(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Pairs | None:
    """Seconds of a unit of work by step; steps that both sides have are pairs."""
    ratios = sorted(theirs[step] / ours[step] for step in ours.keys() & theirs.keys())
    if not ratios:
        return None
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Pairs(len(ratios), middle, low, high)
