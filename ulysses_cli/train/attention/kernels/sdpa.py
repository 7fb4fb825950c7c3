"""torch's flash attention where it can be used: on a GPU in one call, on a CPU document by document; else blockwise."""

from __future__ import annotations

import torch
from torch import Tensor

from ulysses_cli.train.attention.documents import Documents
from ulysses_cli.train.attention.kernels.blockwise import backward_blocks, forward_blocks
from ulysses_cli.train.attention.kernels.per_document import backward_per_document, forward_per_document
from ulysses_cli.train.attention.kernels.rule import Rule, get_precision
from ulysses_cli.train.attention.kernels.varlen import backward_varlen, forward_varlen, has_varlen

aten = torch.ops.aten


def forward_sdpa(q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: Rule) -> tuple[Tensor, Tensor]:
    if has_varlen(q, rule):
        return forward_varlen(q, k, v, documents, rule)
    return forward_per_document(_forward_document, q, k, v, documents, rule)


def backward_sdpa(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Documents, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    if has_varlen(q, rule):
        return backward_varlen(dout, q, k, v, out, lse, documents, rule)
    return backward_per_document(_backward_document, dout, q, k, v, out, lse, documents, rule)


def _forward_document(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    if _needs_blocks(q, k, rule):
        return forward_blocks(q, k, v, rule)
    precision = get_precision(q)  # the CPU's own backward sums bfloat16 gradients in bfloat16
    heads = [tensor.to(precision).transpose(0, 1)[None] for tensor in (q, k, v)]
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, rule.is_causal, scale=rule.scale)
    return out[0].transpose(0, 1).to(q.dtype), lse[0]


def _backward_document(
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
