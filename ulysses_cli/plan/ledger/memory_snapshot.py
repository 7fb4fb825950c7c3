"""A rank's memory at one time at which it may be fullest, as lines that add up."""

from __future__ import annotations

from typing import NamedTuple

Lines = dict[str, int]

# Names of snapshots that other rules test for.
LEAVES, HEAD_SENT = "head's gradient leaves", "head's gradient is reduced"
HEAD_SNAPSHOTS = ("final norm", LEAVES, HEAD_SENT)
EMBEDDED, LAST_SENT, FIRST = "embedding", "last gradients are reduced", "the first "
MAKING, BETWEEN, AGAIN = "master weights are made", "between micro-steps", "recomputation"
PASSES, BEFORE_GRADIENTS = ("forward", "backward"), ("loss", "head's gradient")
BEFORE_ATTENTION = ("the MLP's last matrix", "gate and up", "mlp", "norm")


class MemorySnapshot(NamedTuple):
    """The phase, what happens in it, every line alive, and the number of the layer in whose backward it is, where that
    matters. A tuple because one search makes hundreds of thousands."""

    phase: str
    name: str
    lines: Lines
    layer: int | None = None

    @property
    def num_bytes(self) -> int:
        return sum(self.lines.values())
