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

TokenLoss = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class HeadRule:
    """What a model applies to its logits after the head: a divisor, a softcap; the weight of the z-loss; and a function
    of the targets' cross-entropies [N], which returns their losses [N], each from its own token's alone."""

    softcap: float | None = None
    divisor: float = 1.0
    z_loss_weight: float = 0.0
    token_loss: TokenLoss | None = None

    def measure(self) -> HeadRule:
        """The rule of an evaluation: cross-entropy alone."""
        return replace(self, z_loss_weight=0.0, token_loss=None)


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
    if rule.token_loss is not None:
        losses = apply_token_loss(rule.token_loss, losses, labels != IGNORE_INDEX)
    if rule.z_loss_weight:
        squares = torch.logsumexp(logits, -1).square()
        losses = losses + rule.z_loss_weight * torch.where(labels == IGNORE_INDEX, 0.0, squares)
    return losses


def apply_token_loss(function: TokenLoss, losses: Tensor, is_target: Tensor) -> Tensor:
    """Applies a function to the losses of targets; the others stay 0. Their losses are replaced by 1 before the call:
    at 0 the function may have no slope, and the product of a NaN and 0 is NaN."""
    return torch.where(is_target, function(torch.where(is_target, losses, 1.0)), 0.0)


class PlainLoss:
    """All logits of the slice at once."""

    def __init__(self, head: Callable[[Tensor], Tensor], rule: HeadRule) -> None:
        self.head, self.rule = head, rule

    def __call__(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return compute_token_losses(self.head(hidden).flatten(0, 1), labels.flatten(), self.rule).sum()

    @torch.no_grad()
    def per_token(self, hidden: Tensor, labels: Tensor) -> Tensor:
        # no name holds the head's logits: they are freed when their float32 copy is there
        rule = self.rule.measure()
        return compute_token_losses(self.head(hidden).flatten(0, 1), labels.flatten(), rule).view(labels.shape)
