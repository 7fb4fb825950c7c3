"""Delta rules and state-space scans on split rows: heads are exchanged, the model's own rule runs on whole rows of this
rank's heads, one document at a time, and the result is exchanged back. The state begins anew in each document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ulysses_cli.train.attention.documents import Documents
from ulysses_cli.train.attention.heads import plan_heads
from ulysses_cli.train.processes.sequence_axis import SequenceAxis
from ulysses_cli.train.recurrence.heads_exchange import gather_rows, scatter_rows


def apply_delta_rule(
    rule: Callable[..., tuple[Tensor, Any]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    documents: Documents,
    axis: SequenceAxis,
    **options: Any,
) -> Tensor:
    """query, key [B, S, key heads, Dk], value [B, S, heads, Dv], g [B, S, heads] or with a decay for each of Dk
    channels, beta [B, S, heads] -> [B, S, heads, Dv]."""
    plan = plan_heads(value.size(2), key.size(2), axis.size)
    queries, keys = plan.chunks[0].queries, plan.chunks[0].keys
    q, k = gather_rows([query, key], [keys, keys], axis)
    (v,) = gather_rows([value], [queries], axis)
    decay = _gather_small([g if g.dim() == 4 else g[..., None], beta[..., None]], [queries, queries], axis)
    gates = [part if g.dim() == 4 and at == 0 else part[..., 0] for at, part in enumerate(decay)]

    def run(begin: int, end: int) -> Tensor:
        part = slice(begin, end)
        results = []
        for own, shared in plan.list_runs(plan.chunks[0], axis.rank):
            heads, kv = slice(*own), slice(*shared)
            out, _ = rule(
                q[None, part, kv], k[None, part, kv], v[None, part, heads],
                g=gates[0][None, part, heads], beta=gates[1][None, part, heads], **options,
            )  # fmt: skip
            results.append(out[0])
        return torch.cat(results, 1)

    rows = _run_documents(run, documents)
    return scatter_rows(rows, queries, axis, value.size(0), value.size(2))


def apply_scan(
    scan: Callable[..., Tensor],
    hidden: Tensor,
    dt: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    documents: Documents,
    axis: SequenceAxis,
    *,
    skip: Tensor | None,
    dt_bias: Tensor | None,
    **options: Any,
) -> Tensor:
    """Mamba2: hidden [B, S, heads, D], dt [B, S, heads], b and c [B, S, groups, N]; decay, skip and dt_bias of all heads
    -> [B, S, heads, D]. What belongs to a head alone is sliced; its gradient is zero for the other ranks' heads, and sums
    up over ranks as every gradient does."""
    plan = plan_heads(hidden.size(2), b.size(2), axis.size)
    queries, keys = plan.chunks[0].queries, plan.chunks[0].keys
    (x,) = gather_rows([hidden], [queries], axis)
    b_rows, c_rows = gather_rows([b, c], [keys, keys], axis)
    (steps,) = gather_rows([dt[..., None]], [queries], axis)
    first = queries[axis.rank].start

    def run(begin: int, end: int) -> Tensor:
        part = slice(begin, end)
        results = []
        for own, shared in plan.list_runs(plan.chunks[0], axis.rank):
            heads, groups = slice(*own), slice(*shared)
            mine = slice(first + own.start, first + own.stop)
            out = scan(
                x[None, part, heads], steps[None, part, heads, 0], decay[mine], b_rows[None, part, groups],
                c_rows[None, part, groups], D=None if skip is None else skip[mine],
                dt_bias=None if dt_bias is None else dt_bias[mine], **options,
            )  # fmt: skip
            results.append(out[0])
        return torch.cat(results, 1)

    rows = _run_documents(run, documents)
    return scatter_rows(rows, queries, axis, hidden.size(0), hidden.size(2))


def _gather_small(parts: Sequence[Tensor], spans: Sequence[Any], axis: SequenceAxis) -> list[Tensor]:
    """Gates differ in width and dtype from what they gate: each goes by itself."""
    return [gather_rows([part], [span], axis)[0] for part, span in zip(parts, spans, strict=True)]


def _run_documents(run: Callable[[int, int], Tensor], documents: Documents) -> Tensor:
    results = [run(begin, end) for begin, end in documents.walk()]
    return results[0] if len(results) == 1 else torch.cat(results, 0)
