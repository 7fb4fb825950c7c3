"""Head and cross-entropy in tiles of tokens, forward and backward in one pass: no [sequence, vocabulary] tensor exists.

Values are those of train/loss.py. The head is called once per pass, as the module it is, so that whoever shards its
weight gathers it once. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ulysses_cli.train.loss import IGNORED, HeadRule
from ulysses_cli.train.memory.tiling import WeightSums, backward_tile, check_is_whole


class TiledLoss:
    """Hidden states [B, S, H] and shifted labels [B, S] -> the float32 sum of token losses, or each token's.

    It takes the head's forward over: `head(hidden, labels)` is the loss, `head(hidden)` what it always was.
    """

    def __init__(self, head: nn.Module, rule: HeadRule, tile_tokens: int) -> None:
        if tile_tokens < 1:
            raise ValueError(f"a tile of {tile_tokens} tokens")
        self.head, self.rule, self.tile_tokens = head, rule, tile_tokens
        self.compute_logits: Callable[[Tensor], Tensor] = head.forward
        head.forward = self._run_head

    def __call__(self, hidden: Tensor, labels: Tensor) -> Tensor:
        total: Tensor = self.head(hidden, labels)
        return total

    @torch.no_grad()
    def per_token(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Float32 [B, S] of cross-entropy alone, 0 where there is no target."""
        losses: Tensor = self.head(hidden, labels, per_token=True)
        return losses

    def walk_tiles(self, num_tokens: int) -> list[slice]:
        starts = range(0, num_tokens, self.tile_tokens)
        return [slice(start, min(start + self.tile_tokens, num_tokens)) for start in starts]

    def _run_head(self, hidden: Tensor, labels: Tensor | None = None, *, per_token: bool = False) -> Tensor:
        if labels is None:
            return self.compute_logits(hidden)
        check_is_whole(self.head, "the output head")
        if per_token:
            rule = replace(self.rule, z_loss_weight=0.0)
            return self.compute_losses_in_tiles(hidden.flatten(0, 1), labels.flatten(), rule).view(labels.shape)
        weights = WeightSums(self.head)
        if torch.is_grad_enabled() and (hidden.requires_grad or weights.weights):
            total: Tensor = _Loss.apply(hidden, labels, self, weights, *weights.weights)
            return total
        return self.compute_losses_in_tiles(hidden.flatten(0, 1), labels.flatten(), self.rule).sum()

    @torch.no_grad()
    def compute_losses_in_tiles(self, hidden: Tensor, labels: Tensor, rule: HeadRule) -> Tensor:
        parts = self.walk_tiles(labels.numel())
        return torch.cat([compute_losses(self.compute_logits(hidden[part]), labels[part], rule)[0] for part in parts])


class _Loss(torch.autograd.Function):
    """The forward finds the gradients too; the backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, labels: Tensor, loss: TiledLoss, weights: WeightSums, *_: nn.Parameter
    ) -> Tensor:
        tokens, targets = hidden.detach().flatten(0, 1), labels.flatten()
        dtokens = torch.empty_like(tokens)
        losses: list[Tensor] = []

        def find_slope(logits: Tensor) -> Tensor:
            found, slope = compute_losses(logits, targets[part], loss.rule, with_slope=True)
            losses.append(found.sum())
            return slope

        with weights.collect():
            for part in loss.walk_tiles(targets.numel()):
                if type(loss.head) is nn.Linear:
                    slope = find_slope(loss.compute_logits(tokens[part]))
                    dtokens[part] = weights.backward_linear(loss.head, tokens[part], slope)
                    del slope
                else:
                    dtokens[part] = backward_tile(loss.compute_logits, tokens[part], find_slope)
        ctx.save_for_backward(dtokens.view(hidden.shape), *weights.take_sums())
        ctx.tile_tokens = loss.tile_tokens
        ctx.dtypes = [weight.dtype for weight in weights.weights]
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        dtokens, *sums = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()
        for rows in dtokens.flatten(0, 1).split(ctx.tile_tokens):
            rows.copy_(rows.to(dtotal.dtype).mul_(dtotal))  # a scale rounded to bfloat16 would bend every gradient
        dweights: list[Tensor] = []
        while sums:  # each sum is let go before the next weight's gradient is made
            dweights.append(sums.pop(0).mul_(dtotal).to(ctx.dtypes[len(dweights)]))
        return dtokens if ctx.needs_input_grad[0] else None, None, None, None, *dweights


def compute_losses(
    logits: Tensor, labels: Tensor, rule: HeadRule, *, with_slope: bool = False
) -> tuple[Tensor, Tensor]:
    """[N, vocabulary] and [N] -> losses [N] in float32 or better, and (when asked) what each logit adds to their sum.

    At most two float32 copies of a tile exist at once, three with a softcap.
    """
    precision = torch.promote_types(logits.dtype, torch.float32)
    bent = None
    if rule.softcap is not None:
        bent = logits.to(precision).mul(1 / (rule.divisor * rule.softcap)).tanh_()
        log_shares = functional.log_softmax(bent * rule.softcap, -1)
    elif rule.divisor != 1.0:
        log_shares = functional.log_softmax(logits.to(precision) / rule.divisor, -1)
    else:
        log_shares = functional.log_softmax(logits, -1, dtype=precision)
    is_target = labels != IGNORED
    targets = torch.where(is_target, labels, 0)[:, None]
    log_share = log_shares.gather(-1, targets)[:, 0]
    losses = torch.where(is_target, -log_share, 0.0)
    factor = is_target.to(precision)
    if rule.z_loss_weight:
        score = logits.gather(-1, targets)[:, 0].to(precision) / rule.divisor
        if rule.softcap is not None:
            score = torch.tanh(score / rule.softcap) * rule.softcap
        normaliser = score - log_share
        losses = losses + torch.where(is_target, rule.z_loss_weight * normaliser.square(), 0.0)
        factor = factor * (1 + 2 * rule.z_loss_weight * normaliser)
    if not with_slope:
        return losses, losses
    slope = log_shares.exp_().mul_(factor[:, None])
    slope.scatter_add_(-1, targets, -is_target.to(precision)[:, None])
    if bent is not None:
        slope.mul_(bent.square_().neg_().add_(1))
    if rule.divisor != 1.0:
        slope.div_(rule.divisor)
    return losses, slope.to(logits.dtype)


def make_tiled_loss(
    head: nn.Module, rule: HeadRule, tile_tokens: int, gather_whole: Callable[[nn.Module], None] | None = None
) -> TiledLoss:
    """`gather_whole` is told of a head that has parts of its own (adapters): they are to be gathered together."""
    if gather_whole is not None and next(head.children(), None) is not None:
        gather_whole(head)
    return TiledLoss(head, rule, tile_tokens)
