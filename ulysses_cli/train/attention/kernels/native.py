"""The rule by which logits are computed, and attention by torch alone: its flash kernels where they can be used (all
documents in one call, or one by one), cuDNN's, compiled flex attention, else plain torch block by block.

Results over parts of the keys are joined by their log-sum-exp; all weights are at most 1, so nothing overflows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from ulysses_cli.plan.attention import FLASH_CAPABILITY
from ulysses_cli.train.attention.documents import Documents, walk_bounds
from ulysses_cli.train.choosing import compile_for_all_threads


@dataclass(frozen=True)
class Rule:
    """Scale, window and softcap of logits. `window_tokens` counts the token itself; None reaches the document's
    start. Not causal: all keys of a document stand before its queries, as in a round of a ring, and no window ends."""

    scale: float
    window_tokens: int | None = None
    softcap: float | None = None
    is_causal: bool = True

    def covers(self, tokens: int) -> bool:
        """Whether the window spans a whole document of this length."""
        return self.window_tokens is None or self.window_tokens >= tokens


def get_precision(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def make_lse(q: Tensor) -> Tensor:
    return torch.empty(q.size(1), q.size(0), dtype=get_precision(q), device=q.device)


# Shapes. out [n, h, V] and log-sum-exp [h, n] of n queries and h heads.


def merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Adds the result of another block of keys to that of the blocks before, in place. `out` is in float32 or better.
    A block without weight, -inf, adds nothing."""
    total = torch.logaddexp(lse, part_lse)
    reference = total.clamp(min=torch.finfo(total.dtype).min)  # else -inf - -inf is not a number
    weight, part_weight = (torch.exp(each - reference).mT[..., None] for each in (lse, part_lse))
    out.mul_(weight).addcmul_(part_out, part_weight)
    lse.copy_(total)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Changes out in place; returns it and the raised log-sum-exp. `sinks` [h] have weight but no value."""
    raised = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out.mul_(torch.exp(lse - raised).mT[..., None]), raised


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


Forward = Callable[[Tensor, Tensor, Tensor, Rule], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Rule], tuple[Tensor, Tensor, Tensor]]


def forward_per_document(
    forward: Forward, q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: Rule
) -> tuple[Tensor, Tensor]:
    if len(documents.lengths) == 1:
        return forward(q, k, v, rule)
    out, lse = torch.empty_like(q), make_lse(q)
    for queries, keys in documents.walk():
        out[queries], lse[:, queries] = forward(q[queries], k[keys], v[keys], rule)
    return out, lse


def backward_per_document(
    backward: Backward,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Documents,
    rule: Rule,
) -> tuple[Tensor, Tensor, Tensor]:
    if len(documents.lengths) == 1:
        return backward(dout, q, k, v, out, lse, rule)
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for queries, keys in documents.walk():
        part_grads = backward(dout[queries], q[queries], k[keys], v[keys], out[queries], lse[:, queries], rule)
        for whole, part, grad in zip(grads, (queries, keys, keys), part_grads, strict=True):
            whole[part] = grad
    return grads


aten = torch.ops.aten


def forward_varlen(q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: Rule) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, *list_bounds(documents), 0.0, rule.is_causal, False, scale=rule.scale, **_window_sides(rule)
    )
    return out, lse


def backward_varlen(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Documents, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)  # state of an unused generator
    dq, dk, dv = aten._flash_attention_backward(
        dout, q, k, v, out, lse, *list_bounds(documents), 0.0, rule.is_causal,
        no_dropout, no_dropout.new_empty(0), scale=rule.scale, **_window_sides(rule),
    )  # fmt: skip
    return dq, dk, dv


def list_bounds(documents: Documents) -> tuple[Tensor, Tensor, int, int]:
    """Returns bounds of queries and of keys, and the longest of both. Kernels take the queries for the last keys."""
    bounds = documents.cu_seqlens, documents.key_cu_seqlens
    return *bounds, documents.max_tokens, documents.max_key_tokens


def has_varlen(q: Tensor, rule: Rule) -> bool:
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    fits = rule.softcap is None and q.size(2) <= 256 and q.size(2) % 8 == 0
    return q.device.type == "cuda" and is_half and fits and has_flash(q.device)


@cache
def has_flash(device: torch.device) -> bool:
    """Whether this GPU is new enough for flash kernels in bfloat16. AMD's GPUs number their generations otherwise."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


def _window_sides(rule: Rule) -> dict[str, int]:
    """flash kernels count the tokens before the query's own."""
    return {} if rule.window_tokens is None else {"window_size_left": rule.window_tokens - 1, "window_size_right": 0}


def forward_sdpa(q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: Rule) -> tuple[Tensor, Tensor]:
    if has_varlen(q, rule):
        return forward_varlen(q, k, v, documents, rule)
    return forward_per_document(_forward_sdpa_document, q, k, v, documents, rule)


def backward_sdpa(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Documents, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    if has_varlen(q, rule):
        return backward_varlen(dout, q, k, v, out, lse, documents, rule)
    return backward_per_document(_backward_sdpa_document, dout, q, k, v, out, lse, documents, rule)


def _forward_sdpa_document(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    if _needs_blocks(q, k, rule):
        return forward_blocks(q, k, v, rule)
    precision = get_precision(q)  # the CPU's own backward sums bfloat16 gradients in bfloat16
    heads = [tensor.to(precision).transpose(0, 1)[None] for tensor in (q, k, v)]
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, rule.is_causal, scale=rule.scale)
    return out[0].transpose(0, 1).to(q.dtype), lse[0]


def _backward_sdpa_document(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    if _needs_blocks(q, k, rule):
        return backward_blocks(dout, q, k, v, out, lse, rule)
    precision = get_precision(q)
    heads = [tensor.to(precision).transpose(0, 1)[None] for tensor in (dout, q, k, v, out)]
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *heads, lse[None], 0.0, rule.is_causal, scale=rule.scale
    )
    dq, dk, dv = (grad[0].transpose(0, 1).to(q.dtype) for grad in grads)
    return dq, dk, dv


def _needs_blocks(q: Tensor, k: Tensor, rule: Rule) -> bool:
    """torch's kernel on a CPU takes the queries for the first of more keys, where ours are the last."""
    has_more_keys = rule.is_causal and k.size(0) > q.size(0)
    return q.device.type != "cpu" or rule.softcap is not None or has_more_keys or not rule.covers(q.size(0))


def forward_cudnn(q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: Rule) -> tuple[Tensor, Tensor]:
    return forward_per_document(_forward_cudnn_document, q, k, v, documents, rule)


def backward_cudnn(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Documents, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    return backward_per_document(_backward_cudnn_document, dout, q, k, v, out, lse, documents, rule)


def _forward_cudnn_document(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    if q.size(0) == 1:
        return forward_blocks(q, k, v, rule)
    heads = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(*heads, None, True, 0.0, True, False, scale=rule.scale)
    return out[0].transpose(0, 1), lse[0].reshape(q.size(1), q.size(0))


def _backward_cudnn_document(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    if q.size(0) == 1:
        return backward_blocks(dout, q, k, v, out, lse, rule)
    heads = [tensor.transpose(0, 1)[None] for tensor in (dout, q, k, v, out)]
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of an unused dropout
    raw_grads = aten._scaled_dot_product_cudnn_attention_backward(
        *heads, lse[None, ..., None].contiguous(), seed, seed, None, None, None, q.size(0), q.size(0),
        0.0, True, scale=rule.scale,
    )  # fmt: skip
    dq, dk, dv = (grad[0].transpose(0, 1) for grad in raw_grads)
    return dq, dk, dv


FLEX_BLOCK = 128
MAX_USUAL_DIM = 256
# Blocks of torch's own choice for wider heads exceed a GPU's shared memory: a block of 32 tokens of 512 bfloat16 is
# 32 KB, and a kernel holds three of them forward, six backward.
NUM_BLOCKS_HELD = 6
WIDE_BLOCKS = (32, 16)  # tokens; a tensor core takes no fewer than 16
BLOCK_NAMES = ("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")


def forward_flex(q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: Rule) -> tuple[Tensor, Tensor]:
    return _call_flex(q, k, v, documents, rule)


def backward_flex(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Documents, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Flex attention has no separate backward, so its forward runs again under autograd. With sinks or in
    rounds, `out` and `lse` are those of more than these keys; the factor between the two normalisers turns the
    cotangent of one into that of the other."""
    with torch.enable_grad():
        inputs = tuple(tensor.detach().requires_grad_() for tensor in (q, k, v))
        plain_out, plain_lse = _call_flex(inputs[0], inputs[1], inputs[2], documents, rule)
        share = torch.exp(plain_lse.detach() - lse)  # 1 where these are all keys
        dlse = (share * (dout * (plain_out.detach() - out)).sum(-1).mT).to(plain_lse.dtype)
        scaled = (dout * share.mT[..., None]).to(dout.dtype)
        dq, dk, dv = torch.autograd.grad((plain_out, plain_lse), inputs, (scaled, dlse))
    return dq, dk, dv


def _call_flex(q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: Rule) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    softcap = rule.softcap

    def apply_softcap(score: Tensor, _b: Tensor, _h: Tensor, _q: Tensor, _k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    mask = make_block_mask(documents.lengths, documents.key_lengths, rule, q.device)
    compiled = _compile_flex() if q.device.type == "cuda" else flex_attention
    heads = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
    out, aux = compiled(
        *heads, score_mod=apply_softcap if softcap else None, block_mask=mask, scale=rule.scale,
        enable_gqa=q.size(1) != k.size(1), return_aux=AuxRequest(lse=True),
        kernel_options=pick_options(q.size(2), q.element_size(), q.device),
    )  # fmt: skip
    return out[0].transpose(0, 1), aux.lse[0]


def pick_options(head_dim: int, element_size: int, device: torch.device) -> dict[str, int] | None:
    """For wide heads, the largest blocks of which a kernel's fit into the GPU's shared memory. None: torch's choice."""
    if head_dim <= MAX_USUAL_DIM or device.type != "cuda":
        return None
    room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    able = [tokens for tokens in WIDE_BLOCKS if NUM_BLOCKS_HELD * tokens * head_dim * element_size <= room]
    tokens = max(able, default=min(WIDE_BLOCKS))
    return {**dict.fromkeys(BLOCK_NAMES, tokens), "num_stages": 1, "num_warps": tokens // 4}


@lru_cache(maxsize=1)
def _compile_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # past the limit torch runs it without a kernel, which holds all scores
    return compile_for_all_threads(flex_attention, dynamic=True)


@lru_cache(maxsize=2)  # one row's layers with and without a window. Tables grow with the square of the blocks
def make_block_mask(lengths: tuple[int, ...], key_lengths: tuple[int, ...], rule: Rule, device: torch.device) -> Any:
    """Lists, for each block of queries, the blocks of keys that any of them attends to: one contiguous run, computed
    from the bounds alone. No [tokens, tokens] mask is made. A document's queries are the last of its keys, or
    stand behind all of them."""
    from torch.nn.attention.flex_attention import BlockMask

    num_queries, num_keys, counts = sum(lengths), sum(key_lengths), torch.tensor(lengths)
    bounds = [*zip(walk_bounds(lengths), walk_bounds(key_lengths), strict=True)]
    # of each query, on the host: where its document's keys start, and its own place among the keys
    starts = torch.repeat_interleave(torch.tensor([keys[0] for _, keys in bounds]), counts)
    shifts = torch.repeat_interleave(torch.tensor([keys[1] - queries[1] for queries, keys in bounds]), counts)
    ends = torch.repeat_interleave(torch.tensor([keys[1] for _, keys in bounds]), counts)
    window_tokens, places = rule.window_tokens, torch.arange(num_queries) + shifts if rule.is_causal else ends - 1
    num_blocks, num_key_blocks = -(-num_queries // FLEX_BLOCK), -(-num_keys // FLEX_BLOCK)
    first_query = torch.arange(num_blocks) * FLEX_BLOCK
    last_query = (first_query + FLEX_BLOCK - 1).clamp(max=num_queries - 1)
    earliest = starts[first_query]
    if window_tokens is not None:
        earliest = torch.maximum(earliest, places[first_query] - window_tokens + 1)
    first_key = earliest // FLEX_BLOCK
    num_read = places[last_query] // FLEX_BLOCK - first_key + 1
    indices = (first_key[:, None] + torch.arange(num_key_blocks)).clamp(max=num_key_blocks - 1)
    start, place = starts.to(device), places.to(device)

    def is_allowed(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = (place[query] >= key) & (key >= start[query])
        return allowed if window_tokens is None else allowed & (place[query] - key < window_tokens)

    return BlockMask.from_kv_blocks(
        num_read[None, None].to(device, torch.int32), indices[None, None].to(device, torch.int32),
        BLOCK_SIZE=FLEX_BLOCK, mask_mod=is_allowed, seq_lengths=(num_queries, num_keys),
    )  # fmt: skip
