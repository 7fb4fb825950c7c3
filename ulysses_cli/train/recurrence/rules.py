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

# Takes tensors [1, T, h, ...] of one document and these heads, returns [1, T, h, D].
Rule = Callable[[Sequence[Tensor], Sequence[Tensor], slice], Tensor]


def apply_delta_rule(
    rule: Callable[..., tuple[Tensor, Any]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    documents: Documents,
    axis: SequenceAxis,
    options: dict[str, Any],
) -> Tensor:
    """Takes query and key [B, S, key heads, Dk], value [B, S, heads, Dv], beta [B, S, heads], and the log of the decay
    g [B, S, heads] or, for each channel, [B, S, heads, Dk]. Returns [B, S, heads, Dv]."""
    has_channels = g.dim() == 4

    def run(shared: Sequence[Tensor], own: Sequence[Tensor], heads: slice) -> Tensor:
        (q, k), (v, decay, strength) = shared, own
        decay = decay if has_channels else decay[..., 0]
        return rule(q, k, v, g=decay, beta=strength[..., 0], **options)[0]

    own = [value, g if has_channels else g[..., None], beta[..., None]]
    return run_on_whole_rows(run, [query, key], own, documents, axis)


def apply_scan(
    scan: Callable[..., Tensor],
    hidden: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    of_heads: dict[str, Tensor | None],
    documents: Documents,
    axis: SequenceAxis,
    options: dict[str, Any],
) -> Tensor:
    """Mamba2's scan. Takes hidden [B, S, heads, D], dt [B, S, heads], b and c [B, S, groups, N]; returns
    [B, S, heads, D]. `of_heads`: parameters [heads]. A rank uses those of its own heads; their gradients are zero for
    other heads, so that the sum over ranks is right, as it is for every weight."""

    def run(shared: Sequence[Tensor], own: Sequence[Tensor], heads: slice) -> Tensor:
        (x, steps), (b_rows, c_rows) = own, shared
        parameters = {name: None if whole is None else whole[heads] for name, whole in of_heads.items()}
        return scan(x, steps[..., 0], parameters.pop("A"), b_rows, c_rows, **parameters, **options)

    return run_on_whole_rows(run, [b, c], [hidden, dt[..., None]], documents, axis)


def run_on_whole_rows(
    rule: Rule, shared: Sequence[Tensor], own: Sequence[Tensor], documents: Documents, axis: SequenceAxis
) -> Tensor:
    """`own`: tensors [B, S, heads, D]; `shared`: tensors [B, S, groups, D], where a group serves heads / groups heads
    that adjoin. Returns the rule's results as slices with all heads. Collective over the axis."""
    batch, tokens, num_heads, _ = own[0].shape
    documents.check_num_tokens(batch, tokens, axis.size)
    plan = plan_heads(num_heads, shared[0].size(2), axis.size)
    chunk = plan.chunks[0]
    spans = [chunk.keys] * len(shared) + [chunk.queries] * len(own)
    all_rows = gather_rows([*shared, *own], spans, axis)
    shared_rows, own_rows = all_rows[: len(shared)], all_rows[len(shared) :]
    first = chunk.queries[axis.rank].start
    results = []
    for heads, groups in plan.list_runs(chunk, axis.rank):
        rows = [row[:, slice(*heads)] for row in own_rows]
        group_rows = [row[:, slice(*groups)] for row in shared_rows]
        parts = [
            rule([row[None, begin:end] for row in group_rows], [row[None, begin:end] for row in rows],
                 slice(first + heads.start, first + heads.stop))[0]
            for begin, end in documents.walk()
        ]  # fmt: skip
        results.append(_join(parts, 0))
    return scatter_rows(_join(results, 1), chunk.queries, axis, batch)


def _join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
