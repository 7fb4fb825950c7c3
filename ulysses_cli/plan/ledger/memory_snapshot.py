"""A rank's memory at one time at which it may be fullest, as lines that add up."""

from __future__ import annotations

from typing import NamedTuple

Lines = dict[str, int]


class MemorySnapshot(NamedTuple):
    """The phase, what happens in it, and every line alive. A tuple because one search makes hundreds of thousands."""

    phase: str
    name: str
    lines: Lines

    @property
    def num_bytes(self) -> int:
        return sum(self.lines.values())
