"""Attention on [tokens, heads, head_dim] with document bounds, by what torch itself brings.

Each kernel is a forward that also returns the log-sum-exp, and a backward from it. No autograd, no sinks, no groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ulysses_cli.train.documents import Documents, walk_bounds

aten = torch.ops.aten
FLEX_BLOCK = 128
BLOCK_TOKENS = 512  # blockwise: scores exist for this many queries times this many keys at once


@dataclass(frozen=True)
class Rule:
    """How logits are made. `window_tokens` counts the token itself; None looks back to the document's start."""

    scale: float
    window_tokens: int | None = None
    softcap: float | None = None

    def covers(self, tokens: int) -> bool:
        """The window never cuts anything off in a document of this length."""
        return self.window_tokens is None or self.window_tokens >= tokens


def forward_sdpa(q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: Rule) -> tuple[Tensor, Tensor]:
    """torch's flash attention where it serves, on a CPU document by document; otherwise blockwise."""
    if _has_varlen(q, rule):
        return forward_varlen(q, k, v, documents, rule)
    if len(documents.lengths) == 1:
        return _forward_document(q, k, v, rule)
    out, lse = torch.empty_like(q), _make_lse(q)
    for start, end in documents.walk():
        part = slice(start, end)
        out[part], lse[:, part] = _forward_document(q[part], k[part], v[part], rule)
    return out, lse


def backward_sdpa(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Documents, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    if _has_varlen(q, rule):
        return backward_varlen(dout, q, k, v, out, lse, documents, rule)
    if len(documents.lengths) == 1:
        return _backward_document(dout, q, k, v, out, lse, rule)
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for start, end in documents.walk():
        part = slice(start, end)
        found = _backward_document(dout[part], q[part], k[part], v[part], out[part], lse[:, part], rule)
        for whole, grad in zip(grads, found, strict=True):
            whole[part] = grad
    return grads


def _forward_document(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    if _needs_blocks(q, rule):
        return forward_blocks(q, k, v, rule)
    precise = _get_precision(q)  # the CPU's own backward sums bfloat16 gradients in bfloat16
    heads = [tensor.to(precise).transpose(0, 1)[None] for tensor in (q, k, v)]
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, True, scale=rule.scale)
    return out[0].transpose(0, 1).to(q.dtype), lse[0]


def _backward_document(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    if _needs_blocks(q, rule):
        return backward_blocks(dout, q, k, v, out, lse, rule)
    precise = _get_precision(q)
    heads = [tensor.to(precise).transpose(0, 1)[None] for tensor in (dout, q, k, v, out)]
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*heads, lse[None], 0.0, True, scale=rule.scale)
    dq, dk, dv = (grad[0].transpose(0, 1).to(q.dtype) for grad in grads)
    return dq, dk, dv


def forward_varlen(q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: Rule) -> tuple[Tensor, Tensor]:
    """All documents in one call of the flash kernel that torch ships."""
    bounds, longest = documents.cu_seqlens, documents.max_tokens
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, bounds, bounds, longest, longest, 0.0, True, False, scale=rule.scale, **_window_sides(rule)
    )
    return out, lse


def backward_varlen(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Documents, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    bounds, longest = documents.cu_seqlens, documents.max_tokens
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)  # state of a generator that is not used
    dq, dk, dv = aten._flash_attention_backward(
        dout, q, k, v, out, lse, bounds, bounds, longest, longest, 0.0, True,
        no_dropout, no_dropout.new_empty(0), scale=rule.scale, **_window_sides(rule),
    )  # fmt: skip
    return dq, dk, dv


def forward_cudnn(q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: Rule) -> tuple[Tensor, Tensor]:
    """Document by document: cuDNN's causal kernel has no bounds in torch, and takes no document of one token. The only
    one's result is not copied."""
    if len(documents.lengths) == 1 and q.size(0) > 1:
        return _forward_cudnn_document(q, k, v, rule)
    out, lse = torch.empty_like(q), _make_lse(q)
    for start, end in documents.walk():
        part = slice(start, end)
        if end - start == 1:
            out[part], lse[:, part] = forward_blocks(q[part], k[part], v[part], rule)
        else:
            out[part], lse[:, part] = _forward_cudnn_document(q[part], k[part], v[part], rule)
    return out, lse


def _forward_cudnn_document(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    heads = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(*heads, None, True, 0.0, True, False, scale=rule.scale)
    return out[0].transpose(0, 1), lse[0].reshape(q.size(1), q.size(0))


def backward_cudnn(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Documents, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    if len(documents.lengths) == 1 and q.size(0) > 1:
        return _backward_cudnn_document(dout, q, k, v, out, lse, rule)
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for start, end in documents.walk():
        part = slice(start, end)
        backward = backward_blocks if end - start == 1 else _backward_cudnn_document
        found = backward(dout[part], q[part], k[part], v[part], out[part], lse[:, part], rule)
        for whole, grad in zip(grads, found, strict=True):
            whole[part] = grad
    return grads


def _backward_cudnn_document(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    heads = [tensor.transpose(0, 1)[None] for tensor in (dout, q, k, v, out)]
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout that is not used
    raw = aten._scaled_dot_product_cudnn_attention_backward(
        *heads, lse[None, ..., None].contiguous(), seed, seed, None, None, None, q.size(0), q.size(0),
        0.0, True, scale=rule.scale,
    )  # fmt: skip
    dq, dk, dv = (grad[0].transpose(0, 1) for grad in raw)
    return dq, dk, dv


def forward_flex(q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: Rule) -> tuple[Tensor, Tensor]:
    """Compiled flex attention; what may be looked at is stored by blocks, made from the bounds once per row."""
    return _call_flex(q, k, v, documents, rule)


def backward_flex(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Documents, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Flex hands out no backward of its own, so its forward runs again under autograd. With sinks, `out` and `lse` are
    the corrected ones; the factor between the two normalisers turns the cotangent of one into that of the other."""
    with torch.enable_grad():
        inputs = tuple(tensor.detach().requires_grad_() for tensor in (q, k, v))
        plain_out, plain_lse = _call_flex(inputs[0], inputs[1], inputs[2], documents, rule)
        share = torch.exp(plain_lse.detach() - lse)  # 1 where there are no sinks
        dlse = ((1 - share) * (dout * out).sum(-1).mT).to(plain_lse.dtype)
        scaled = (dout * share.mT[..., None]).to(dout.dtype)
        dq, dk, dv = torch.autograd.grad((plain_out, plain_lse), inputs, (scaled, dlse))
    return dq, dk, dv


def forward_blocks(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """One document in plain torch, any rule, any dtype, on any device; scores exist for one block at a time."""
    precision = _get_precision(q)
    groups = (k.size(1), q.size(1) // k.size(1))
    out, lse = torch.empty_like(q), _make_lse(q)
    for first in range(0, q.size(0), BLOCK_TOKENS):
        queries = slice(first, min(first + BLOCK_TOKENS, q.size(0)))
        part = q[queries].to(precision).unflatten(1, groups)
        top = part.new_full((*groups, part.size(0)), -math.inf)
        total, mixed = torch.zeros_like(top), torch.zeros_like(part)
        for keys in _walk_keys(queries, rule):
            logits, _ = _compute_logits(part, k[keys].to(precision), queries, keys, rule)
            new_top = torch.maximum(top, logits.amax(-1))
            weights = torch.exp(logits - new_top[..., None])
            shrink = torch.exp(top - new_top)
            total = total * shrink + weights.sum(-1)
            mixed = mixed * shrink.permute(2, 0, 1)[..., None]
            mixed += torch.einsum("hgqk,khd->qhgd", weights, v[keys].to(precision))
            top = new_top
        out[queries] = (mixed / total.permute(2, 0, 1)[..., None]).flatten(1, 2)
        lse[:, queries] = (top + torch.log(total)).flatten(0, 1)
    return out, lse


def backward_blocks(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one document, block by block from the log-sum-exp."""
    precision = _get_precision(q)
    groups = (k.size(1), q.size(1) // k.size(1))
    dq = torch.empty_like(q)
    dk, dv = torch.zeros_like(k, dtype=precision), torch.zeros_like(v, dtype=precision)
    for first in range(0, q.size(0), BLOCK_TOKENS):
        queries = slice(first, min(first + BLOCK_TOKENS, q.size(0)))
        part, dpart = (tensor[queries].to(precision).unflatten(1, groups) for tensor in (q, dout))
        mean = (dpart * out[queries].to(precision).unflatten(1, groups)).sum(-1).permute(1, 2, 0)
        dqueries = torch.zeros_like(part)
        for keys in _walk_keys(queries, rule):
            key, value = k[keys].to(precision), v[keys].to(precision)
            logits, slope = _compute_logits(part, key, queries, keys, rule)
            weights = torch.exp(logits - lse[:, queries].unflatten(0, groups)[..., None])
            dlogits = weights * (torch.einsum("qhgd,khd->hgqk", dpart, value) - mean[..., None]) * slope
            dqueries += torch.einsum("hgqk,khd->qhgd", dlogits, key)
            dk[keys] += torch.einsum("hgqk,qhgd->khd", dlogits, part)
            dv[keys] += torch.einsum("hgqk,qhgd->khd", weights, dpart)
        dq[queries] = dqueries.flatten(1, 2)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _compute_logits(
    part: Tensor, key: Tensor, queries: slice, keys: slice, rule: Rule
) -> tuple[Tensor, Tensor | float]:
    """Logits of a block, -inf where a query may not look, and their slope with respect to q.k."""
    logits = torch.einsum("qhgd,khd->hgqk", part, key) * rule.scale
    slope: Tensor | float = rule.scale
    if rule.softcap is not None:
        bent = torch.tanh(logits / rule.softcap)
        logits, slope = bent * rule.softcap, (1 - bent * bent) * rule.scale
    distance = torch.arange(queries.start, queries.stop, device=key.device)[:, None]
    distance = distance - torch.arange(keys.start, keys.stop, device=key.device)
    hidden = distance < 0
    if rule.window_tokens is not None:
        hidden |= distance >= rule.window_tokens
    return logits.masked_fill(hidden, -math.inf), slope


def _walk_keys(queries: slice, rule: Rule) -> list[slice]:
    """Blocks of keys that some query of the block may look at, nearest first, so that none is empty of meaning."""
    first = 0 if rule.window_tokens is None else max(0, queries.start - rule.window_tokens + 1)
    starts = range(queries.start, first - BLOCK_TOKENS, -BLOCK_TOKENS)
    return [slice(max(start, first), min(start + BLOCK_TOKENS, queries.stop)) for start in starts]


def _call_flex(q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: Rule) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    softcap = rule.softcap

    def bend(score: Tensor, _b: Tensor, _h: Tensor, _q: Tensor, _k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    mask = make_block_mask(documents.lengths, rule.window_tokens, q.device)
    compiled = _compile_flex() if q.device.type == "cuda" else flex_attention
    heads = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
    out, aux = compiled(
        *heads, score_mod=bend if softcap else None, block_mask=mask, scale=rule.scale,
        enable_gqa=q.size(1) != k.size(1), return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out[0].transpose(0, 1), aux.lse[0]


@lru_cache(maxsize=1)
def _compile_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


@lru_cache(maxsize=2)  # of one row: layers with and without a window. Its tables grow with the square of the blocks
def make_block_mask(lengths: tuple[int, ...], window_tokens: int | None, device: torch.device) -> Any:
    """For each block of queries the blocks of keys that some of them may look at: a run, from the bounds alone. No
    [tokens, tokens] mask is ever made."""
    from torch.nn.attention.flex_attention import BlockMask

    tokens = sum(lengths)
    starts = torch.repeat_interleave(
        torch.tensor([start for start, _ in walk_bounds(lengths)]), torch.tensor(lengths)
    )  # of each token's document, on the host
    num_blocks = -(-tokens // FLEX_BLOCK)
    first_query = torch.arange(num_blocks) * FLEX_BLOCK
    earliest = starts[first_query]
    if window_tokens is not None:
        earliest = torch.maximum(earliest, first_query - window_tokens + 1)
    first_key = earliest // FLEX_BLOCK
    counts = torch.arange(num_blocks) - first_key + 1
    indices = (first_key[:, None] + torch.arange(num_blocks)).clamp(max=num_blocks - 1)
    owner = starts.to(device)

    def may_look(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = (query >= key) & (owner[query] == owner[key])
        return allowed if window_tokens is None else allowed & (query - key < window_tokens)

    return BlockMask.from_kv_blocks(
        counts[None, None].to(device, torch.int32), indices[None, None].to(device, torch.int32),
        BLOCK_SIZE=FLEX_BLOCK, mask_mod=may_look, seq_lengths=(tokens, tokens),
    )  # fmt: skip


def _has_varlen(q: Tensor, rule: Rule) -> bool:
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    return q.device.type == "cuda" and is_half and rule.softcap is None and q.size(2) <= 256 and q.size(2) % 8 == 0


def _needs_blocks(q: Tensor, rule: Rule) -> bool:
    return q.device.type != "cpu" or rule.softcap is not None or not rule.covers(q.size(0))


def _window_sides(rule: Rule) -> dict[str, int]:
    """flash kernels count the tokens before the own one."""
    return {} if rule.window_tokens is None else {"window_size_left": rule.window_tokens - 1, "window_size_right": 0}


def _get_precision(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _make_lse(q: Tensor) -> Tensor:
    return torch.empty(q.size(1), q.size(0), dtype=_get_precision(q), device=q.device)
