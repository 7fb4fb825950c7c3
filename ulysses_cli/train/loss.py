"""The loss, from hidden states: a float32 sum of token losses, never a mean. Labels arrive shifted; -100 is no target.

Whoever sums over ranks and micro-steps divides once, by the number of targets of the whole step.
"""

from __future__ import annotations

from dataclasses import dataclass

IGNORED = -100


@dataclass(frozen=True)
class HeadRule:
    """What a model does to its logits after the head: divides them, bends them; and the weight of the z-loss."""

    softcap: float | None = None
    divisor: float = 1.0
    z_loss_weight: float = 0.0
