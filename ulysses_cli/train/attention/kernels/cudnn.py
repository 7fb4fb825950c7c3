"""cuDNN's causal kernel, document by document: in torch it takes no bounds, and no document of one token."""

from __future__ import annotations

import torch
from torch import Tensor

from ulysses_cli.train.attention.documents import Documents
from ulysses_cli.train.attention.kernels.blockwise import backward_blocks, forward_blocks
from ulysses_cli.train.attention.kernels.per_document import backward_per_document, forward_per_document
from ulysses_cli.train.attention.kernels.rule import Rule

aten = torch.ops.aten


def forward_cudnn(q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: Rule) -> tuple[Tensor, Tensor]:
    return forward_per_document(_forward_document, q, k, v, documents, rule)


def backward_cudnn(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Documents, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    return backward_per_document(_backward_document, dout, q, k, v, out, lse, documents, rule)


def _forward_document(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    if q.size(0) == 1:
        return forward_blocks(q, k, v, rule)
    heads = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(*heads, None, True, 0.0, True, False, scale=rule.scale)
    return out[0].transpose(0, 1), lse[0].reshape(q.size(1), q.size(0))


def _backward_document(
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
