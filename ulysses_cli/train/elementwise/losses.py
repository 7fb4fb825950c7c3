"""Losses of a tile of logits and the gradient by them, in the memory of the logits.

On a CPU in blocks that fit its cache: each exponential is computed once, and no float32 copy of the tile exists. On a
GPU one compiled function, or torch's own kernels one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ulysses_cli.data.steps import IGNORE_INDEX
from ulysses_cli.train.elementwise.formulas import walk_blocks
from ulysses_cli.train.elementwise.operators import Way, compile_once
from ulysses_cli.train.loss import HeadRule, TokenLoss, apply_token_loss

BLOCK_ELEMENTS = 1 << 19  # 2 MiB in float32: measured on a CPU, half or twice as many take as long


def compute_losses(
    logits: Tensor,
    labels: Tensor,
    rule: HeadRule,
    *,
    with_grad: bool = False,
    weights: Tensor | None = None,
    overwrites: bool = False,
    way: Way = "blocks",
) -> tuple[Tensor, Tensor]:
    """Takes logits [N, vocabulary] and labels [N]. Returns losses [N] in float32 or better and, when asked, the
    gradient of their sum by each logit, each loss times its weight [N]. `overwrites`: the logits' memory is free for
    the gradient, and is lost in any case."""
    if way == "compiled" and overwrites and rule.token_loss is None and logits.size(0) > 1:
        return _run_compiled(logits, labels, rule, weights, with_grad=with_grad)
    if way == "torch" or logits.device.type != "cpu":
        return _compute_at_once(logits, labels, rule, weights, with_grad=with_grad)
    grad = logits if overwrites else torch.empty_like(logits)
    losses = logits.new_empty(len(labels), dtype=torch.promote_types(logits.dtype, torch.float32))
    for part in walk_blocks(logits.size(0), logits.size(1), BLOCK_ELEMENTS):
        here, shares = logits[part], weights if weights is None else weights[part]
        into = here if overwrites else grad[part]
        losses[part] = _compute_block(here, labels[part], rule, shares, into, with_grad=with_grad)
    return losses, grad if with_grad else losses


def _compute_at_once(
    logits: Tensor, labels: Tensor, rule: HeadRule, weights: Tensor | None, *, with_grad: bool
) -> tuple[Tensor, Tensor]:
    """In few kernels. At most two float32 copies of a tile exist at once, three with a softcap."""
    precision = torch.promote_types(logits.dtype, torch.float32)
    tanh = None
    if rule.softcap is not None:
        tanh = logits.to(precision).mul(1 / (rule.divisor * rule.softcap)).tanh_()
        log_probs = functional.log_softmax(tanh * rule.softcap, -1)
    elif rule.divisor != 1.0:
        log_probs = functional.log_softmax(logits.to(precision) / rule.divisor, -1)
    else:
        log_probs = functional.log_softmax(logits, -1, dtype=precision)
    is_target = labels != IGNORE_INDEX
    targets = torch.where(is_target, labels, 0)[:, None]
    target_log_probs = log_probs.gather(-1, targets)[:, 0]
    losses = torch.where(is_target, -target_log_probs, 0.0)
    slopes = is_target.to(precision)
    if rule.token_loss is not None:
        losses, slopes = differentiate(rule.token_loss, losses, is_target)
    factor = slopes
    if rule.z_loss_weight:
        target_logits = logits.gather(-1, targets)[:, 0].to(precision) / rule.divisor
        if rule.softcap is not None:
            target_logits = torch.tanh(target_logits / rule.softcap) * rule.softcap
        log_z = target_logits - target_log_probs
        losses = losses + torch.where(is_target, rule.z_loss_weight * log_z.square(), 0.0)
        factor = factor + is_target * (2 * rule.z_loss_weight * log_z)
    if not with_grad:
        return losses, losses
    if weights is not None:
        slopes, factor = slopes * weights, factor * weights
    dlogits = log_probs.exp_().mul_(factor[:, None])
    dlogits.scatter_add_(-1, targets, -slopes[:, None])
    if tanh is not None:
        dlogits.mul_(tanh.square_().neg_().add_(1))
    if rule.divisor != 1.0:
        dlogits.div_(rule.divisor)
    return losses, dlogits.to(logits.dtype)


def _compute_block(
    logits: Tensor, labels: Tensor, rule: HeadRule, weights: Tensor | None, grad: Tensor, *, with_grad: bool
) -> Tensor:
    """`grad` may be the logits. Works in it if it has the precision, else in one float32 copy, with a softcap in
    two."""
    precision = torch.promote_types(logits.dtype, torch.float32)
    values = logits.to(precision)  # a copy, or the logits
    if values is logits and grad is not logits:
        values = grad.copy_(logits)
    tanh = None
    if rule.softcap is not None:
        tanh = values.mul_(1 / (rule.divisor * rule.softcap)).tanh_()
        values = tanh * rule.softcap
    elif rule.divisor != 1.0:
        values.div_(rule.divisor)
    largest = values.amax(-1, keepdim=True)
    is_target = labels != IGNORE_INDEX
    targets = torch.where(is_target, labels, 0)[:, None]
    values.sub_(largest)
    picked = values.gather(-1, targets)
    sums = values.exp_().sum(-1, keepdim=True)
    logs = sums.log()
    losses = torch.where(is_target, (logs - picked)[:, 0], 0.0)
    slopes = is_target.to(precision)
    if rule.token_loss is not None:
        losses, slopes = differentiate(rule.token_loss, losses, is_target)
    factor = slopes
    if rule.z_loss_weight:
        log_z = (largest + logs)[:, 0]
        losses = losses + torch.where(is_target, rule.z_loss_weight * log_z.square(), 0.0)
        factor = factor + is_target * (2 * rule.z_loss_weight * log_z)
    if not with_grad:
        return losses
    if weights is not None:
        slopes, factor = slopes * weights, factor * weights
    values.mul_(factor[:, None] / sums)
    values.scatter_add_(-1, targets, -slopes[:, None])
    if tanh is not None:
        values.mul_(tanh.square_().neg_().add_(1))
    if rule.divisor != 1.0:
        values.div_(rule.divisor)
    if values is not grad:
        grad.copy_(values)
    return losses


def differentiate(function: TokenLoss, losses: Tensor, is_target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the function's losses [N] and their slopes [N], both 0 where there is no target."""
    with torch.enable_grad():
        given = losses.detach().requires_grad_()
        results = apply_token_loss(function, given, is_target)
        (slopes,) = torch.autograd.grad(results.sum(), given)
    return results.detach(), slopes


def _run_compiled(
    logits: Tensor, labels: Tensor, rule: HeadRule, weights: Tensor | None, *, with_grad: bool
) -> tuple[Tensor, Tensor]:
    """The number of tokens is a variable from the first call on: the last tile has fewer, and a kernel of its own could
    round otherwise in a run that begins with it."""
    for tensor in (logits, labels, *([] if weights is None else [weights])):
        torch._dynamo.mark_dynamic(tensor, 0)
    compiled: Callable[..., Any] = compile_once(_compute_tile, logits.size(-1))
    losses = compiled(logits, labels, weights, rule.divisor, rule.softcap, rule.z_loss_weight, with_grad)
    return losses, logits if with_grad else losses


def _compute_tile(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    divisor: float,
    softcap: float | None,
    z_loss_weight: float,
    with_grad: bool,
) -> Tensor:
    """The same in terms that a compiler joins: one pass for the sums, and one that reads and overwrites the logits."""
    values, slope = logits.to(torch.promote_types(logits.dtype, torch.float32)), None
    if softcap is not None:
        tanh = torch.tanh(values * (1 / (divisor * softcap)))
        values, slope = tanh * softcap, 1 - tanh.square()
    elif divisor != 1.0:
        values = values / divisor
    is_target = labels != IGNORE_INDEX
    targets = torch.where(is_target, labels, 0)[:, None]
    log_z = torch.logsumexp(values, -1, keepdim=True)
    losses = torch.where(is_target, (log_z - values.gather(-1, targets))[:, 0], 0.0)
    slopes = is_target.to(values.dtype)
    factor = slopes
    if z_loss_weight:
        losses = losses + torch.where(is_target, z_loss_weight * log_z[:, 0].square(), 0.0)
        factor = factor + slopes * (2 * z_loss_weight * log_z[:, 0])
    if with_grad:
        if weights is not None:
            slopes, factor = slopes * weights, factor * weights
        is_own = torch.arange(values.size(-1), device=values.device) == targets
        grad = torch.exp(values - log_z) * factor[:, None] - torch.where(is_own, slopes[:, None], 0.0)
        grad = grad if slope is None else grad * slope
        logits.copy_(grad / divisor if divisor != 1.0 else grad)
    return losses
