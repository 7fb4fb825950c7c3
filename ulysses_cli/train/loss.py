"""The loss, from hidden states: a float32 sum of token losses, never a mean. Labels arrive shifted; -100 is no
target. The objective, what a run minimizes, is a value that is chosen once; loop, engine and hooks know none.

The head runs on targets alone. The caller sums over ranks and micro-steps and divides once, by the number of targets
of the whole step, or by the sum of their weights; means of ranks or of micro-steps have no place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ulysses_cli.data.steps import MicroBatch, Numbers, StepPlan
from ulysses_cli.plan.rows.packing import IGNORE_INDEX

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


class Places:
    """Where the targets of a slice are, counted over its rows, in order. `numbers` are on the host, so that no shape
    waits for a device; `index` holds them on the device, unless one follows the other."""

    def __init__(self, numbers: Sequence[int], index: Tensor | None = None) -> None:
        self.numbers, self.index = numbers, index

    def __len__(self) -> int:
        return len(self.numbers)

    def find(self, part: slice) -> slice | Tensor:
        """What picks these targets from a tensor with a row for each token. A slice, which copies nothing, where there
        is no gap between them."""
        if part.start == part.stop:
            return slice(0, 0)
        first, last = int(self.numbers[part.start]), int(self.numbers[part.stop - 1])
        if last - first == part.stop - part.start - 1:
            return slice(first, last + 1)
        if self.index is None:
            raise AssertionError("targets with gaps have an index")
        return self.index[part]


def take_all(num_tokens: int) -> Places:
    """Every token may be a target: the most that a slice takes, which plans count."""
    return Places(range(num_tokens))


class Loss(Protocol):
    """Takes hidden states [B, S, H] and shifted labels [B, S], returns losses. `rule`: that of the head. `places`: of
    the N targets; None where each of the B S tokens may be one. `weights`: of each of them [N]; None: 1."""

    rule: HeadRule

    def __call__(
        self, hidden: Tensor, labels: Tensor, places: Places | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """Float32 sum over targets, part of the graph even when there is none."""

    def per_token(
        self, hidden: Tensor, labels: Tensor, places: Places | None = None, *, is_measured: bool = False
    ) -> Tensor:
        """Float32 [N] of cross-entropy alone, the negative log-probability of each target, 0 where a label is none.
        With `is_measured` [4, N]: below it what `measure_logits` returns, without a gradient."""


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
    if rule.token_loss is not None and losses.numel():
        losses = apply_token_loss(rule.token_loss, losses, labels != IGNORE_INDEX)
    if rule.z_loss_weight:
        squares = torch.logsumexp(logits, -1).square()
        losses = losses + rule.z_loss_weight * torch.where(labels == IGNORE_INDEX, 0.0, squares)
    return losses


@torch.no_grad()
def measure_logits(logits: Tensor, labels: Tensor, divisor: float, softcap: float | None) -> Tensor:
    """Takes logits [N, vocabulary] and labels [N]. Returns [3, N] in float32 or better: the entropy of each token's
    distribution, its mean logit, and 1 where the label is the likeliest token, of equal ones the first."""
    values = apply_rule(logits.to(torch.promote_types(logits.dtype, torch.float32)), HeadRule(softcap, divisor))
    largest, likeliest = values.max(-1, keepdim=True)
    means = values.mean(-1)
    values = values - largest
    shares = values.exp()
    sums = shares.sum(-1)
    entropies = sums.log() - shares.mul_(values).sum(-1) / sums
    return torch.stack([entropies, means, (likeliest[:, 0] == labels).to(means.dtype)])


def apply_token_loss(function: TokenLoss, losses: Tensor, is_target: Tensor) -> Tensor:
    """Applies a function to the losses of targets; the others stay 0. Their losses are replaced by 1 before the call:
    at 0 the function may have no slope, and the product of a NaN and 0 is NaN."""
    return torch.where(is_target, function(torch.where(is_target, losses, 1.0)), 0.0)


class PlainLoss:
    """The logits of all targets of the slice at once."""

    def __init__(self, head: Callable[[Tensor], Tensor], rule: HeadRule) -> None:
        self.head, self.rule = head, rule

    def __call__(
        self, hidden: Tensor, labels: Tensor, places: Places | None = None, weights: Tensor | None = None
    ) -> Tensor:
        losses = self._compute(hidden, labels, places, self.rule)
        return losses.sum() if weights is None else (losses * weights).sum()

    def per_token(
        self, hidden: Tensor, labels: Tensor, places: Places | None = None, *, is_measured: bool = False
    ) -> Tensor:
        return self._compute(hidden, labels, places, self.rule.measure(), is_measured=is_measured)

    def _compute(
        self, hidden: Tensor, labels: Tensor, places: Places | None, rule: HeadRule, *, is_measured: bool = False
    ) -> Tensor:
        found = None
        if places is not None and len(places) < labels.numel():
            found = places.find(slice(0, len(places)))
        labels = labels.flatten() if found is None else labels.flatten()[found]
        if is_measured:
            logits = self.head(_pick(hidden.flatten(0, 1), found))
            measures = measure_logits(logits, labels, rule.divisor, rule.softcap)
            return torch.cat([compute_token_losses(logits, labels, rule)[None], measures])
        # no name holds the head's logits: they are freed when their float32 copy is there; nor what the head takes
        return compute_token_losses(self.head(_pick(hidden.flatten(0, 1), found)), labels, rule)


def _pick(tokens: Tensor, found: slice | Tensor | None) -> Tensor:
    picked: Tensor = tokens if found is None else _Pick.apply(tokens, found)
    return picked


class _Pick(torch.autograd.Function):
    """Some of the tokens, each at most once. Its backward adds nothing up, so that it is the same each time."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, found: slice | Tensor) -> Tensor:
        ctx.shape, ctx.found = tokens.shape, found
        return tokens[found]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dpicked: Tensor) -> tuple[Tensor, None]:
        dtokens = dpicked.new_zeros(ctx.shape)
        dtokens[ctx.found] = dpicked
        return dtokens, None


class Objective(Protocol):
    """`names`: of what is summed, divided and written beside the loss. `eval_names`: the same of an evaluation, beside
    or instead of what it tells of targets' losses. `is_measured`: whether it wants measured targets, also there."""

    names: tuple[str, ...]
    eval_names: tuple[str, ...]
    is_measured: bool

    def load(self, batch: MicroBatch, places: Numbers, send: Callable[[Any], Tensor]) -> Any:
        """What else `compute` takes of a micro-batch. `places`: of this slice's targets; `send` brings an array to the
        device."""

    def begin(self, answers: Any) -> None:
        """Called before the decoder of each micro-step that `compute` ends."""

    def compute(self, loss: Loss, hidden: Tensor, labels: Tensor, places: Places | None, answers: Any) -> Tensor:
        """Takes what a loss takes, and what `load` has returned. Returns this rank's sums [1 + names]. The first is
        minimized: on a rank without a target it is part of the graph too."""

    def measure(self, losses: Tensor, answers: Any) -> Tensor:
        """This rank's sums [eval_names] of an evaluation, from what `per_token` returns of its targets."""

    def describe(self, means: Sequence[float]) -> dict[str, Any]:
        """What is written beside the loss, from the means of `names`."""

    def count(self, plan: StepPlan) -> float:
        """What the sums of a step are divided by. It follows from the plan alone, so all ranks share it."""


class NextToken:
    """The cross-entropy of each target, on average over the targets of the step: sum(weight x loss) / sum(weight), each
    over all rows of the step. An evaluation counts each target once."""

    names: tuple[str, ...] = ()
    eval_names: tuple[str, ...] = ()
    is_measured = False

    def load(self, batch: MicroBatch, places: Numbers, send: Callable[[Any], Tensor]) -> Any:
        """The weights of this slice's targets; None: 1."""
        return None if batch.weights is None else send(batch.weights.flatten()[places])

    def begin(self, answers: Any) -> None:
        pass

    def compute(self, loss: Loss, hidden: Tensor, labels: Tensor, places: Places | None, answers: Any) -> Tensor:
        return (loss(hidden, labels, places) if answers is None else loss(hidden, labels, places, answers))[None]

    def measure(self, losses: Tensor, answers: Any) -> Tensor:
        return losses.new_zeros(0)

    def describe(self, means: Sequence[float]) -> dict[str, Any]:
        return dict(zip(self.names, means, strict=True))

    def count(self, plan: StepPlan) -> float:
        return plan.divisor
