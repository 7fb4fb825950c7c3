"""Joins results of attention over parts of the keys by their log-sum-exp. All weights are at most 1, so that nothing
overflows whatever the logits are."""

from __future__ import annotations

import torch
from torch import Tensor

# Shapes. out [n, h, V] and log-sum-exp [h, n] of n queries and h heads.


def merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Adds the result of another block of keys to that of the blocks before, in place. `out` is in float32 or better.
    A block without weight, -inf, adds nothing."""
    total = torch.logaddexp(lse, part_lse)
    reference = total.clamp(min=torch.finfo(total.dtype).min)  # else -inf - -inf is not a number
    weight, part_weight = (torch.exp(each - reference).mT[..., None] for each in (lse, part_lse))
    out.mul_(weight).addcmul_(part_out, part_weight)
    lse.copy_(total)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Changes out in place; returns it and the raised log-sum-exp. `sinks` [h] have weight but no value."""
    raised = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out.mul_(torch.exp(lse - raised).mT[..., None]), raised
