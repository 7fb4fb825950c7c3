"""Times two sets of ranks fairly: they take steps in turns, so that another load on the machine slows both alike."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(eq=False)
class Interleaving:
    """One side's turns. Rank 0 has the pipe to the other side; a side without a pipe never waits."""

    pipe: Connection | None = None
    has_turn: bool = False

    def wait_for_turn(self, group: Any = None) -> None:
        """Collective over the group: all ranks start when the other side has ended its step."""
        if self.pipe is not None and not self.has_turn:
            try:
                self.pipe.recv_bytes()
            except (EOFError, OSError):
                self.pipe = None  # the other side has ended or failed
        importlib.import_module("torch.distributed").barrier(
            group=group
        )  # doctor imports this module where torch may be broken

    def pass_turn(self) -> None:
        """The other side takes its next step."""
        self.has_turn = False
        if self.pipe is not None:
            try:
                self.pipe.send_bytes(b"turn")
            except OSError:
                self.pipe = None


@dataclass(frozen=True)
class Pairs:
    """Seconds of their step / seconds of our step next to it, over all pairs of steps: median and spread."""

    num_pairs: int
    median: float
    low: float  # lower quartile
    high: float  # upper quartile


def compare_pairs(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Pairs | None:
    """Takes seconds per unit of work by step number; a pair is a step that both sides took. None without pairs."""
    ratios = sorted(theirs[step] / ours[step] for step in ours.keys() & theirs.keys())
    if not ratios:
        return None
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Pairs(len(ratios), median, low, high)
