"""Attention of one document in plain torch: any rule, any dtype, any device. Logits exist for one block at a time.
Queries are the last of the keys, or stand behind all of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ulysses_cli.train.attention.kernels.rule import Rule, get_precision, make_lse

BLOCK_TOKENS = 512  # logits exist for this many queries times this many keys at once


def forward_blocks(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Returns out, shaped like q, and log-sum-exp [heads, tokens] of one document, by an online softmax."""
    precision = get_precision(q)
    groups, num_before = (k.size(1), q.size(1) // k.size(1)), _count_before(q, k, rule)
    out, lse = torch.empty_like(q), make_lse(q)
    for first in range(0, q.size(0), BLOCK_TOKENS):
        queries = slice(first, min(first + BLOCK_TOKENS, q.size(0)))
        part = q[queries].to(precision).unflatten(1, groups)
        maximum = part.new_full((*groups, part.size(0)), -math.inf)
        total, mixed = torch.zeros_like(maximum), torch.zeros_like(part)
        places = slice(queries.start + num_before, queries.stop + num_before)
        for keys in _walk_keys(places, k.size(0), rule):
            logits, _ = _compute_logits(part, k[keys].to(precision), places, keys, rule)
            new_maximum = torch.maximum(maximum, logits.amax(-1))
            weights = torch.exp(logits - new_maximum[..., None])
            rescale = torch.exp(maximum - new_maximum)
            total = total * rescale + weights.sum(-1)
            mixed = mixed * rescale.permute(2, 0, 1)[..., None]
            mixed += torch.einsum("hgqk,khd->qhgd", weights, v[keys].to(precision))
            maximum = new_maximum
        out[queries] = (mixed / total.permute(2, 0, 1)[..., None]).flatten(1, 2)
        lse[:, queries] = (maximum + torch.log(total)).flatten(0, 1)
    return out, lse


def backward_blocks(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one document, block by block from the log-sum-exp."""
    precision = get_precision(q)
    groups, num_before = (k.size(1), q.size(1) // k.size(1)), _count_before(q, k, rule)
    dq = torch.empty_like(q)
    dk, dv = torch.zeros_like(k, dtype=precision), torch.zeros_like(v, dtype=precision)
    for first in range(0, q.size(0), BLOCK_TOKENS):
        queries = slice(first, min(first + BLOCK_TOKENS, q.size(0)))
        part, dpart = (tensor[queries].to(precision).unflatten(1, groups) for tensor in (q, dout))
        mean = (dpart * out[queries].to(precision).unflatten(1, groups)).sum(-1).permute(1, 2, 0)
        dqueries = torch.zeros_like(part)
        places = slice(queries.start + num_before, queries.stop + num_before)
        for keys in _walk_keys(places, k.size(0), rule):
            key, value = k[keys].to(precision), v[keys].to(precision)
            logits, slope = _compute_logits(part, key, places, keys, rule)
            weights = torch.exp(logits - lse[:, queries].unflatten(0, groups)[..., None])
            dlogits = weights * (torch.einsum("qhgd,khd->hgqk", dpart, value) - mean[..., None]) * slope
            dqueries += torch.einsum("hgqk,khd->qhgd", dlogits, key)
            dk[keys] += torch.einsum("hgqk,qhgd->khd", dlogits, part)
            dv[keys] += torch.einsum("hgqk,qhgd->khd", weights, dpart)
        dq[queries] = dqueries.flatten(1, 2)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _compute_logits(part: Tensor, key: Tensor, places: slice, keys: slice, rule: Rule) -> tuple[Tensor, Tensor | float]:
    """Returns logits of a block, -inf where a query may not attend, and their derivative with respect to q.k. `places`
    are those of the queries among the keys."""
    logits = torch.einsum("qhgd,khd->hgqk", part, key) * rule.scale
    slope: Tensor | float = rule.scale
    if rule.softcap is not None:
        tanh = torch.tanh(logits / rule.softcap)
        logits, slope = tanh * rule.softcap, (1 - tanh * tanh) * rule.scale
    distance = torch.arange(places.start, places.stop, device=key.device)[:, None]
    distance = distance - torch.arange(keys.start, keys.stop, device=key.device)
    is_masked = distance < 0
    if rule.window_tokens is not None:
        is_masked |= distance >= rule.window_tokens
    return logits.masked_fill(is_masked, -math.inf), slope


def _count_before(q: Tensor, k: Tensor, rule: Rule) -> int:
    """The keys before the first query's own."""
    return k.size(0) - q.size(0) if rule.is_causal else k.size(0)


def _walk_keys(places: slice, num_keys: int, rule: Rule) -> list[slice]:
    """Blocks of keys that some query of the block attends to, nearest first: in the first block every query has a
    key."""
    first = 0 if rule.window_tokens is None else max(0, places.start - rule.window_tokens + 1)
    last = places.start if places.start < num_keys else (num_keys - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    starts = range(last, first - BLOCK_TOKENS, -BLOCK_TOKENS)
    return [slice(max(start, first), min(start + BLOCK_TOKENS, places.stop, num_keys)) for start in starts]
