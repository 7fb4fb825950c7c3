"""Head and cross-entropy in tiles of targets: no [sequence, vocabulary] tensor exists.

Values are those of train/loss.py. A sum of losses makes its gradients with it, in one pass. Losses of their own, which
get weights only later, make their tiles again in the backward. The head's module is called once per pass, also for no
target, so that ZeRO-3 gathers its weight once, on all ranks. Takes any head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ulysses_cli.train.elementwise.operators import Implementation, compute_losses, measure_targets
from ulysses_cli.train.loss import HeadRule, Places, take_all
from ulysses_cli.train.memory.tiling import WeightSums, backward_tile, check_is_whole


class TiledLoss:
    """Takes hidden states [B, S, H] and shifted labels [B, S], returns the float32 sum of token losses, or each
    target's.

    Replaces the head's forward: `head(hidden, labels)` is the loss, `head(hidden)` the logits as before.
    """

    def __init__(
        self, head: nn.Module, rule: HeadRule, tile_tokens: int, implementation: Implementation = "blocks"
    ) -> None:
        if tile_tokens < 1:
            raise ValueError(f"a tile of {tile_tokens} tokens")
        self.head = head
        self.rule = rule
        self.tile_tokens = tile_tokens
        self.implementation = implementation
        # what other modules return, their own backward may need
        self.overwrites = type(head) is nn.Linear
        self.compute_logits: Callable[[Tensor], Tensor] = head.forward
        head.forward = self._run_head

    def __call__(
        self, hidden: Tensor, labels: Tensor, places: Places | None = None, weights: Tensor | None = None
    ) -> Tensor:
        total: Tensor = self.head(hidden, labels, places=places, target_weights=weights)
        return total

    def per_token(
        self, hidden: Tensor, labels: Tensor, places: Places | None = None, *, is_measured: bool = False
    ) -> Tensor:
        losses: Tensor = self.head(hidden, labels, places=places, per_token=True, is_measured=is_measured)
        return losses

    def walk_tiles(self, num_targets: int) -> list[slice]:
        starts = range(0, num_targets, self.tile_tokens)
        return [slice(start, min(start + self.tile_tokens, num_targets)) for start in starts]

    def _run_head(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        *,
        places: Places | None = None,
        per_token: bool = False,
        is_measured: bool = False,
        target_weights: Tensor | None = None,
    ) -> Tensor:
        """ZeRO-3's hooks see what has no name."""
        if labels is None:
            return self.compute_logits(hidden)
        check_is_whole(self.head, "the output head")
        places = take_all(labels.numel()) if places is None else places
        weights = WeightSums(self.head)
        if torch.is_grad_enabled() and (hidden.requires_grad or weights.weights):
            result: Tensor
            if per_token:
                result = _TargetLosses.apply(hidden, labels, places, self, is_measured, weights, *weights.weights)
            else:
                result = _Loss.apply(hidden, labels, places, self, target_weights, weights, *weights.weights)
            return result
        rule = self.rule.measure() if per_token else self.rule
        losses = self.compute_losses_in_tiles(
            hidden.flatten(0, 1), labels.flatten(), places, rule, is_measured=is_measured
        )
        if per_token:
            return losses
        return losses.sum() if target_weights is None else (losses * target_weights).sum()

    def compute(self, logits: Tensor, labels: Tensor, rule: HeadRule, **options: Any) -> tuple[Tensor, Tensor]:
        """Of a tile whose logits nothing else needs."""
        return compute_losses(
            logits, labels, rule, overwrites=self.overwrites, implementation=self.implementation, **options
        )

    @torch.no_grad()
    def compute_losses_in_tiles(
        self, tokens: Tensor, labels: Tensor, places: Places, rule: HeadRule, *, is_measured: bool = False
    ) -> Tensor:
        found = map(places.find, self.walk_tiles(len(places)))
        losses = [self.compute_tile(tokens[each], labels[each], rule, is_measured=is_measured) for each in found]
        if losses:
            return torch.cat(losses, -1)
        return _make_sum(tokens).new_empty((4, 0) if is_measured else 0)

    def compute_tile(self, tokens: Tensor, labels: Tensor, rule: HeadRule, *, is_measured: bool) -> Tensor:
        """What `per_token` returns of a tile; its logits are gone then."""
        logits = self.compute_logits(tokens)
        if not is_measured:
            return self.compute(logits, labels, rule)[0]
        measures = measure_targets(logits, labels, rule, self.implementation)  # before the logits' memory is taken
        return torch.cat([self.compute(logits, labels, rule)[0][None], measures])


def _make_sum(tokens: Tensor) -> Tensor:
    return tokens.new_zeros((), dtype=torch.promote_types(tokens.dtype, torch.float32))


def _backward_tiles(
    loss: TiledLoss,
    tokens: Tensor,
    places: Places,
    weights: WeightSums,
    compute_grad: Callable[[slice, slice | Tensor, Tensor], Tensor],
) -> Tensor:
    """Returns the tokens' gradient, 0 where there is no target; those of weights are added to their sums.
    `compute_grad` takes a part of the targets, where these are, and their logits; it returns the logits' gradient."""
    is_full = len(places) == tokens.size(0)
    dtokens = torch.empty_like(tokens) if is_full else torch.zeros_like(tokens)
    with weights.collect():
        for part in loss.walk_tiles(len(places)):
            found = places.find(part)
            if type(loss.head) is nn.Linear:
                # picked twice: while the logits' gradient is made, which takes most memory, no copy is kept
                dlogits = compute_grad(part, found, loss.compute_logits(tokens[found]))
                dtokens[found] = weights.backward_linear(loss.head, tokens[found], dlogits)
                del dlogits
            else:
                compute = partial(compute_grad, part, found)
                (dtokens[found],) = backward_tile(loss.compute_logits, [tokens[found]], compute)
    return dtokens


class _Loss(torch.autograd.Function):
    """The forward computes the gradients too; the backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        places: Places,
        loss: TiledLoss,
        target_weights: Tensor | None,
        weights: WeightSums,
        *_: nn.Parameter,
    ) -> Tensor:
        tokens, labels = hidden.detach().flatten(0, 1), labels.flatten()
        losses: list[Tensor] = []
        ctx.rows_of_logits = loss.tile_tokens

        def compute_grad(part: slice, found: slice | Tensor, logits: Tensor) -> Tensor:
            ctx.rows_of_logits = max(loss.tile_tokens, logits.numel() // tokens.size(1))
            given = None if target_weights is None else target_weights[part]
            tile_losses, dlogits = loss.compute(logits, labels[found], loss.rule, with_grad=True, weights=given)
            losses.append((tile_losses if given is None else tile_losses * given).sum())
            return dlogits

        dtokens = _backward_tiles(loss, tokens, places, weights, compute_grad)
        ctx.save_for_backward(dtokens.view(hidden.shape), *weights.take_sums())
        ctx.dtypes = [weight.dtype for weight in weights.weights]
        return torch.stack(losses).sum() if losses else _make_sum(tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        dtokens, *sums = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()
        for rows in dtokens.flatten(0, 1).split(ctx.rows_of_logits):  # copies take no more than a tile's logits did
            rows.copy_(rows.to(dtotal.dtype).mul_(dtotal))  # a scale rounded to bfloat16 would bias every gradient
        dweights: list[Tensor] = []
        while sums:  # each sum is freed before the next weight's gradient is made
            dweights.append(sums.pop(0).mul_(dtotal).to(ctx.dtypes[len(dweights)]))
        return dtokens if ctx.needs_input_grad[0] else None, None, None, None, None, None, *dweights


class _TargetLosses(torch.autograd.Function):
    """The forward keeps the hidden states alone; the backward makes each tile again, with its losses' weights."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        places: Places,
        loss: TiledLoss,
        is_measured: bool,
        weights: WeightSums,
        *_: nn.Parameter,
    ) -> Tensor:
        ctx.places, ctx.loss, ctx.weights = places, loss, weights
        ctx.save_for_backward(hidden, labels)
        return loss.compute_losses_in_tiles(
            hidden.flatten(0, 1), labels.flatten(), places, loss.rule.measure(), is_measured=is_measured
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        hidden, labels = ctx.saved_tensors
        loss, weights, labels = ctx.loss, ctx.weights, labels.flatten()
        dlosses = dlosses if dlosses.dim() == 1 else dlosses[0]  # what is measured beside them has no gradient

        def compute_grad(part: slice, found: slice | Tensor, logits: Tensor) -> Tensor:
            rule = loss.rule.measure()
            return loss.compute(logits, labels[found], rule, with_grad=True, weights=dlosses[part])[1]

        dtokens = _backward_tiles(loss, hidden.detach().flatten(0, 1), ctx.places, weights, compute_grad)
        dweights: list[Tensor] = []
        sums = weights.take_sums()
        while sums:
            dweights.append(sums.pop(0).to(weights.weights[len(dweights)].dtype))
        dhidden = dtokens.view(hidden.shape) if ctx.needs_input_grad[0] else None
        return dhidden, None, None, None, None, None, *dweights


def make_tiled_loss(
    head: nn.Module,
    rule: HeadRule,
    tile_tokens: int,
    gather_whole: Callable[[nn.Module], None] | None = None,
    implementation: Implementation = "blocks",
) -> TiledLoss:
    """`gather_whole` is called with a head that has submodules (adapters), which must be gathered together."""
    if gather_whole is not None and next(head.children(), None) is not None:
        gather_whole(head)
    return TiledLoss(head, rule, tile_tokens, implementation)
