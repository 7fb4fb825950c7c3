"""A time at which a rank's memory may be fullest, as lines that add up."""

from __future__ import annotations

from typing import NamedTuple

Lines = dict[str, int]


class MemorySnapshot(NamedTuple):
    """What happens then, and every line alive. A search makes 100,000s: hence a tuple."""

    phase: str
    name: str
    lines: Lines

    @property
    def num_bytes(self) -> int:
        return sum(self.lines.values())
