"""Each function of formulas.py as a torch operator, as it was chosen: torch's own fused kernel, the
compiled formula, or the formula in blocks; their autograd functions; and losses of a tile of logits, with the
gradient in its memory.

Tracing has their shapes, and compiled code treats them as one operation. Inputs are saved in the model's dtype,
nothing in float32 except one number for each row of a norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, library, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ulysses_cli.plan.rows.indexing import RMS_NORM, split_rows
from ulysses_cli.plan.rows.packing import IGNORE_INDEX
from ulysses_cli.train.choosing import call_operator, compile_for_all_threads
from ulysses_cli.train.elementwise import formulas
from ulysses_cli.train.elementwise.formulas import walk_blocks
from ulysses_cli.train.loss import HeadRule, TokenLoss, apply_token_loss, measure_logits

# transformers: its own code stays as it is.
Implementation = Literal["torch", "compiled", "blocks", "transformers"]


@library.custom_op("ulysses::normalize", mutates_args=())
def normalize(hidden: Tensor, weight: Tensor, eps: float, kind: str, implementation: str) -> tuple[Tensor, Tensor]:
    """Returns the output and one float32 number for each row, which the backward needs."""
    parts = split_rows(math.prod(hidden.shape[:-1]), hidden.nbytes, *RMS_NORM)
    if len(parts) == 1:
        return _normalize(hidden, weight, eps, kind, implementation)
    rows, out = hidden.flatten(0, -2), torch.empty_like(hidden)
    rstd = hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32)
    for part in parts:
        results = _normalize(rows[part], weight, eps, kind, implementation)
        for whole, result in zip((out, rstd), results, strict=True):
            whole.flatten(0, -2)[part] = result
    return out, rstd


def _normalize(hidden: Tensor, weight: Tensor, eps: float, kind: str, implementation: str) -> tuple[Tensor, Tensor]:
    if implementation == "torch":
        assert kind != "offset", "torch's kernel scales by the weight alone"
        return torch.ops.aten._fused_rms_norm(hidden, weight.shape, weight, eps)
    if implementation == "compiled":
        return compile_once(formulas.normalize, hidden.size(-1), kind)(hidden, weight, eps, kind)
    return formulas.normalize_in_blocks(hidden, weight, eps, kind)


@normalize.register_fake
def _(hidden: Tensor, weight: Tensor, eps: float, kind: str, implementation: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32)


@library.custom_op("ulysses::normalize_backward", mutates_args=())
def normalize_backward(
    dout: Tensor, hidden: Tensor, weight: Tensor, rstd: Tensor, kind: str, implementation: str
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the input and of the weight."""
    parts = split_rows(math.prod(hidden.shape[:-1]), hidden.nbytes, *RMS_NORM)
    if len(parts) == 1:
        dhidden, dweight = _normalize_backward(dout, hidden, weight, rstd, kind, implementation)
        return dhidden, dweight.to(weight.dtype)
    dhidden, dweight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
    grads, rows, inverse = (tensor.flatten(0, -2) for tensor in (dout, hidden, rstd))
    for part in parts:
        dhidden.flatten(0, -2)[part], share = _normalize_backward(
            grads[part], rows[part], weight, inverse[part], kind, implementation
        )
        dweight += share
    return dhidden, dweight.to(weight.dtype)


def _normalize_backward(
    dout: Tensor, hidden: Tensor, weight: Tensor, rstd: Tensor, kind: str, implementation: str
) -> tuple[Tensor, Tensor]:
    """The weight's gradient is in float32, but for torch's own kernel, which rounds it."""
    if implementation == "torch":
        return torch.ops.aten._fused_rms_norm_backward(
            dout.contiguous(), hidden, weight.shape, rstd, weight, [True, True]
        )
    compute = formulas.normalize_backward_in_blocks
    if implementation == "compiled":
        compute = compile_once(formulas.normalize_backward, hidden.size(-1), kind)
    return compute(dout, hidden, weight, rstd, kind)


@normalize_backward.register_fake
def _(
    dout: Tensor, hidden: Tensor, weight: Tensor, rstd: Tensor, kind: str, implementation: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(weight)


@library.custom_op("ulysses::rotate", mutates_args=())
def rotate(hidden: Tensor, cos: Tensor, sin: Tensor, implementation: str) -> Tensor:
    return _pick(implementation, formulas.rotate, formulas.rotate_in_blocks, hidden, cos)(hidden, cos, sin)


@rotate.register_fake
def _(hidden: Tensor, cos: Tensor, sin: Tensor, implementation: str) -> Tensor:
    return torch.empty_like(hidden)


@library.custom_op("ulysses::rotate_backward", mutates_args=())
def rotate_backward(dout: Tensor, cos: Tensor, sin: Tensor, implementation: str) -> Tensor:
    return _pick(implementation, formulas.rotate_backward, formulas.rotate_backward_in_blocks, dout, cos)(
        dout, cos, sin
    )


@rotate_backward.register_fake
def _(dout: Tensor, cos: Tensor, sin: Tensor, implementation: str) -> Tensor:
    return torch.empty_like(dout)


@library.custom_op("ulysses::gate", mutates_args=())
def gate(gates: Tensor, values: Tensor, implementation: str) -> Tensor:
    return _pick(implementation, formulas.gate, formulas.gate, gates)(gates, values)


@gate.register_fake
def _(gates: Tensor, values: Tensor, implementation: str) -> Tensor:
    return torch.empty_like(gates)


@library.custom_op("ulysses::gate_backward", mutates_args=())
def gate_backward(dout: Tensor, gates: Tensor, values: Tensor, implementation: str) -> tuple[Tensor, Tensor]:
    return _pick(implementation, formulas.gate_backward, formulas.gate_backward, gates)(dout, gates, values)


@gate_backward.register_fake
def _(dout: Tensor, gates: Tensor, values: Tensor, implementation: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gates), torch.empty_like(values)


def _pick(
    implementation: str, formula: Callable[..., Any], on_cpu: Callable[..., Any], *tensors: Tensor
) -> Callable[..., Any]:
    return compile_once(formula, *(tensor.size(-1) for tensor in tensors)) if implementation == "compiled" else on_cpu


@cache
def compile_once(function: Callable[..., Any], *kind: Any) -> Callable[..., Any]:
    """One compiled function for each width, so that only the number of tokens is a variable of the kernel. torch keeps
    what it has compiled by code and name: two widths of one function would make the width a variable, and many kinds of
    inputs would be refused. A width alone has many: with gradients or without, one head or several, one token or many,
    rows past what 32 bits count."""
    code, name = function.__code__, "_".join(map(str, (function.__name__, *kind)))
    own = FunctionType(code.replace(co_name=name), function.__globals__, name, function.__defaults__)
    return compile_for_all_threads(own, fullgraph=True)


class Normalize(torch.autograd.Function):
    """`norm` holds the weight: under ZeRO-3 the backward finds it there once it is gathered again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, norm: nn.Module, eps: float, kind: str, implementation: str
    ) -> Tensor:
        hidden = hidden.contiguous()
        out, rstd = call_operator(normalize, hidden, weight, eps, kind, implementation)
        ctx.save_for_backward(hidden, rstd)
        ctx.norm, ctx.kind, ctx.implementation = norm, kind, implementation
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        hidden, rstd = ctx.saved_tensors
        dhidden, dweight = call_operator(
            normalize_backward, dout, hidden, ctx.norm.weight.detach(), rstd, ctx.kind, ctx.implementation
        )
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        return dhidden if needs_input else None, dweight if needs_weight else None, None, None, None, None


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, cos: Tensor, sin: Tensor, implementation: str) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.implementation = implementation
        turned: Tensor = call_operator(rotate, hidden, cos, sin, implementation)
        return turned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return call_operator(rotate_backward, dout, cos, sin, ctx.implementation), None, None, None


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates: Tensor, values: Tensor, implementation: str) -> Tensor:
        ctx.save_for_backward(gates, values)
        ctx.implementation = implementation
        gated: Tensor = call_operator(gate, gates, values, implementation)
        return gated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gates, values = ctx.saved_tensors
        return *call_operator(gate_backward, dout, gates, values, ctx.implementation), None


BLOCK_ELEMENTS = 1 << 19  # 2 MiB in float32: measured on a CPU, half or twice as many take as long


def compute_losses(
    logits: Tensor,
    labels: Tensor,
    rule: HeadRule,
    *,
    with_grad: bool = False,
    weights: Tensor | None = None,
    overwrites: bool = False,
    implementation: Implementation = "blocks",
) -> tuple[Tensor, Tensor]:
    """Takes logits [N, vocabulary] and labels [N]. Returns losses [N] in float32 or better and, when asked, the
    gradient of their sum by each logit, each loss times its weight [N]. `overwrites`: the logits' memory is free for
    the gradient, and is lost in any case. Where nothing can be compiled, it is computed as by `torch`."""
    if implementation == "compiled" and overwrites and rule.token_loss is None and logits.size(0) > 1:
        return _run_compiled(logits, labels, rule, weights, with_grad=with_grad)
    if implementation != "blocks":
        return _compute_at_once(logits, labels, rule, weights, with_grad=with_grad)
    grad = logits if overwrites else torch.empty_like(logits)
    losses = logits.new_empty(len(labels), dtype=torch.promote_types(logits.dtype, torch.float32))
    for part in walk_blocks(logits.size(0), logits.size(1), BLOCK_ELEMENTS):
        here, shares = logits[part], weights if weights is None else weights[part]
        into = here if overwrites else grad[part]
        losses[part] = _compute_block(here, labels[part], rule, shares, into, with_grad=with_grad)
    return losses, grad if with_grad else losses


MEASURED_ELEMENTS = 1 << 23  # on a GPU: in few kernels, and with less memory than the losses of a tile take


def measure_targets(logits: Tensor, labels: Tensor, rule: HeadRule, implementation: Implementation) -> Tensor:
    """What `measure_logits` returns, [3, N]. The logits stay as they are."""
    if implementation == "compiled" and logits.size(0) > 1:
        for tensor in (logits, labels):
            torch._dynamo.mark_dynamic(tensor, 0)
        compiled: Callable[..., Tensor] = compile_once(_measure_tile, logits.size(-1))
        return compiled(logits, labels, rule.divisor, rule.softcap)
    measures = logits.new_empty((3, len(labels)), dtype=torch.promote_types(logits.dtype, torch.float32))
    elements = BLOCK_ELEMENTS if implementation == "blocks" else MEASURED_ELEMENTS
    for part in walk_blocks(logits.size(0), logits.size(1), elements):
        measures[:, part] = measure_logits(logits[part], labels[part], rule.divisor, rule.softcap)
    return measures


def _measure_tile(logits: Tensor, labels: Tensor, divisor: float, softcap: float | None) -> Tensor:
    return measure_logits(logits, labels, divisor, softcap)


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
