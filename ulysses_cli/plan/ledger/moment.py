"""A time at which a rank's memory may be fullest, as lines that add up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

Lines = dict[str, int]


@dataclass(frozen=True)
class Moment:
    """A time at which memory may be fullest: what happens then, and every line alive."""

    phase: str
    name: str
    lines: Lines

    @cached_property
    def num_bytes(self) -> int:
        return sum(self.lines.values())
