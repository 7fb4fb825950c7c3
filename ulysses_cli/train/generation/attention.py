"""Attention of a few new tokens to cached keys and values: to those of a prefix that all sequences share, and to those
of each sequence's own tokens. Both parts return a log-sum-exp, by which they are joined.

Takes tensors. Logits exist for one block of keys at a time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ulysses_cli.train.attention.kernels.merging import add_sinks, merge
from ulysses_cli.train.attention.kernels.rule import Rule, get_precision
from ulysses_cli.train.attention.kernels.varlen import has_varlen

# Shapes. Q sequences, n new tokens of each, T cached tokens, h query heads, k key/value heads, g = h / k, D, V widths.

MAX_LOGITS = 1 << 22  # of a block of keys

aten = torch.ops.aten
Part = tuple[Tensor, Tensor]  # out [Q, n, h, V] and log-sum-exp [Q, n, h]


def attend_to_prefix(q: Tensor, k: Tensor, v: Tensor, rule: Rule, num_between: int, ages: Tensor) -> Part:
    """Takes q [Q, n, h, D], k [k, T, D] and v [k, T, V]: each head's keys lie side by side in memory, which a CPU reads
    more than twice as fast as those of all heads in turn. `ages`: how far each cached token is from the prefix's end,
    on the host, the oldest first. `num_between`: tokens between the prefix's end and the first new one. The new tokens
    of all sequences are queries of one call: nothing is computed once per sequence. Of no keys, out is 0 and the
    log-sum-exp is -inf."""
    groups = k.size(0), q.size(2) // k.size(0)
    queries = q.unflatten(2, groups).permute(2, 0, 1, 3, 4)  # [k, Q, n, g, D]
    shape = queries.shape[:-1]
    flat = queries.flatten(1, 3)
    oldest = int(ages[0]) if len(ages) else 0
    is_visible = rule.window_tokens is None or oldest + num_between + q.size(1) <= rule.window_tokens
    if is_visible and len(ages) and _has_flash(flat, v, rule):
        out, lse = _run_flash(flat, k, v, rule)
    else:
        distances = None if is_visible else (_measure_distances(shape, num_between, q.device), ages.to(q.device))
        out, lse = _run_blocks(flat, k, v, rule, distances)
    out = out.view(*shape, v.size(2)).permute(1, 2, 0, 3, 4).flatten(2, 3)
    return out, lse.view(shape).permute(1, 2, 0, 3).flatten(2, 3)


def _has_flash(q: Tensor, v: Tensor, rule: Rule) -> bool:
    is_plain = rule.softcap is None and v.size(-1) == q.size(-1)
    return is_plain and (q.device.type == "cpu" or has_varlen(q, rule))


def _run_flash(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Part:
    """torch's flash attention, with a group's query heads as more queries of its key/value head."""
    rows = q[None], k[None], v[None]
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*rows, 0.0, False, scale=rule.scale)
    else:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(*rows, 0.0, False, False, scale=rule.scale)
    return out[0], lse[0]


def _measure_distances(shape: torch.Size, num_between: int, device: torch.device) -> Tensor:
    """Tokens from the prefix's end to each query, [Q n g]."""
    steps = torch.arange(shape[2], device=device) + num_between
    return steps[None, :, None].expand(shape[1:]).flatten()


def _run_blocks(q: Tensor, k: Tensor, v: Tensor, rule: Rule, distances: tuple[Tensor, Tensor] | None) -> Part:
    """An online softmax over blocks of keys. q [k, M, D]. `distances`: of each query and of each key to the prefix's
    end, where the window hides some keys."""
    precision = get_precision(q)
    q = q.to(precision)
    maximum = q.new_full(q.shape[:2], -math.inf)
    total, mixed = torch.zeros_like(maximum), q.new_zeros(*q.shape[:2], v.size(2))
    block = max(1, MAX_LOGITS // (q.size(0) * q.size(1)))
    for start in range(0, k.size(1), block):
        keys, values = (row[:, start : start + block].to(precision) for row in (k, v))
        logits = _compute_logits(q, keys, rule)
        if distances is not None:
            own = distances[0][:, None] + distances[1][start : start + block]
            logits = logits.masked_fill(own >= (rule.window_tokens or 0), -math.inf)
        highest = torch.maximum(maximum, logits.amax(-1))
        finite = highest.masked_fill(highest == -math.inf, 0.0)
        weights, rescale = torch.exp(logits - finite[..., None]), torch.exp(maximum - finite)
        total, mixed = total * rescale + weights.sum(-1), mixed * rescale[..., None] + weights @ values
        maximum = highest
    return mixed / total.clamp_min(torch.finfo(precision).tiny)[..., None], maximum + torch.log(total)


def _compute_logits(q: Tensor, k: Tensor, rule: Rule) -> Tensor:
    logits = (q @ k.mT) * rule.scale
    return logits if rule.softcap is None else torch.tanh(logits / rule.softcap) * rule.softcap


def attend_to_own(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Part:
    """Takes q [Q, n, h, D], k [Q, k, t, D] and v [Q, k, t, V]; the last n of the t tokens are the queries' own."""
    precision, groups = get_precision(q), (k.size(1), q.size(2) // k.size(1))
    queries = q.to(precision).unflatten(2, groups).permute(0, 2, 3, 1, 4)  # [Q, k, g, n, D]
    keys, values = (row.to(precision)[:, :, None] for row in (k, v))  # [Q, k, 1, t, D]
    logits = _compute_logits(queries, keys, rule)
    num_keys, window = k.size(2), rule.window_tokens
    if q.size(1) > 1 or (window is not None and window < num_keys):  # one token alone sees all before it
        at = torch.arange(num_keys, device=q.device)
        distance = at[num_keys - q.size(1) :, None] - at
        is_hidden = distance < 0
        if window is not None:
            is_hidden |= distance >= window
        logits = logits.masked_fill(is_hidden, -math.inf)
    lse = torch.logsumexp(logits, -1)
    out = torch.exp(logits - lse[..., None]) @ values
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2, 3)


def join_parts(parts: list[Part], sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The attention to all tokens of the parts, from the attention to each part's."""
    (out, lse), *others = [(out.to(lse.dtype).flatten(0, 1), lse.flatten(0, 1).mT) for out, lse in parts]
    out, lse = out.clone(), lse.clone()
    for other in others:
        merge(out, lse, *other)
    if sinks is not None:
        out, _ = add_sinks(out, lse, sinks)
    return out.view(parts[0][0].shape).to(dtype)
