"""The loss, from hidden states: a float32 sum of token losses, never a mean. Labels arrive shifted; -100 is no target.

The caller sums over ranks and micro-steps and divides once, by the number of targets of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ulysses_cli.data.steps import IGNORE_INDEX


@dataclass(frozen=True)
class HeadRule:
    """What a model applies to its logits after the head: a divisor, a softcap; and the weight of the z-loss."""

    softcap: float | None = None
    divisor: float = 1.0
    z_loss_weight: float = 0.0


class Loss(Protocol):
    """Takes hidden states [B, S, H] and shifted labels [B, S], returns losses. `rule`: that of the head."""

    rule: HeadRule

    def __call__(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Float32 sum over targets, part of the graph even when there is none."""

    def per_token(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Float32 [B, S] of cross-entropy alone, 0 where there is no target. No gradients."""


def apply_rule(logits: Tensor, rule: HeadRule) -> Tensor:
    """Turns the head's output into the model's logits."""
    if rule.divisor != 1.0:
        logits = logits / rule.divisor
    if rule.softcap is not None:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    return logits


def compute_token_losses(logits: Tensor, labels: Tensor, rule: HeadRule) -> Tensor:
    """Takes logits [N, vocabulary] and labels [N], returns losses [N] in float32 (float64 stays float64)."""
    logits = apply_rule(logits.to(torch.promote_types(logits.dtype, torch.float32)), rule)
    losses = functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    if rule.z_loss_weight:
        squares = torch.logsumexp(logits, -1).square()
        losses = losses + rule.z_loss_weight * torch.where(labels == IGNORE_INDEX, 0.0, squares)
    return losses


class PlainLoss:
    """All logits of the slice at once."""

    def __init__(self, head: Callable[[Tensor], Tensor], rule: HeadRule) -> None:
        self.head, self.rule = head, rule

    def __call__(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return compute_token_losses(self.head(hidden).flatten(0, 1), labels.flatten(), self.rule).sum()

    @torch.no_grad()
    def per_token(self, hidden: Tensor, labels: Tensor) -> Tensor:
        rule = replace(self.rule, z_loss_weight=0.0)
        return compute_token_losses(self.head(hidden).flatten(0, 1), labels.flatten(), rule).view(labels.shape)
