"""Applies a kernel for one document to each document of a call. A single document's results are not copied."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ulysses_cli.train.attention.documents import Documents
from ulysses_cli.train.attention.kernels.rule import Rule, make_lse

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
