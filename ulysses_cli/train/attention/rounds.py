"""Ring Attention: a rank's keys and values arrive block by block, and results of blocks are merged by their
log-sum-exp in float32 or better. Kernels' backwards get the log-sum-exp and the result of all blocks: a block's own
would give wrong gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ulysses_cli.plan.rows.rounds import Round
from ulysses_cli.train.attention.blocks import ReturningGradients, walk_blocks
from ulysses_cli.train.attention.documents import KernelCall
from ulysses_cli.train.attention.kernel_task import KernelTask, cut
from ulysses_cli.train.attention.kernels.merging import add_sinks, merge
from ulysses_cli.train.attention.kernels.operators import attend, list_options, run_backward
from ulysses_cli.train.attention.kernels.rule import Rule, get_precision, make_lse
from ulysses_cli.train.attention.keys import make_block, view_block


def attend_in_rounds(rows: Sequence[Tensor], sinks: Tensor | None, task: KernelTask) -> tuple[Tensor, Tensor]:
    """Takes q [n, heads, D], k and v [n, kv_heads, D or V] and the sinks of these heads; returns out [n, heads, V] and
    log-sum-exp [heads, n]. Collective over the ring, in each round but the first."""
    q, k, v = rows
    precision = get_precision(q)
    out, lse = q.new_empty((*q.shape[:2], v.size(2)), dtype=precision), make_lse(q)
    for each, parts, rule, keys, values in _walk(k, v, task):
        for query_heads, key_heads, part in task.walk(parts):
            tensors = cut((q, keys, values), query_heads, key_heads, part)
            part_out, part_lse = attend(*tensors, None, *list_options(part.documents, task.kernel, rule))
            own = out[part.queries, query_heads], lse[query_heads, part.queries]
            if each.shift == 0:  # the first round has all queries
                own[0].copy_(part_out)
                own[1].copy_(part_lse)
            else:
                merge(*own, part_out, part_lse)
            del part_out, tensors
        del keys, values
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return out.to(q.dtype), lse


def backward_in_rounds(
    rows: Sequence[Tensor], dout: Tensor, out: Tensor, lse: Tensor, task: KernelTask
) -> list[Tensor]:
    """Returns the gradients of the rows, summed in float32 or better and rounded once. Those of other ranks' keys
    travel in the model's precision. Collective over the ring, twice in each round but the first."""
    q, k, v = rows
    precision = get_precision(q)
    dq = torch.zeros(q.shape, dtype=precision, device=q.device)
    returning = ReturningGradients(k, v, task.ring, precision)
    for each, parts, rule, keys, values in _walk(k, v, task):
        is_own, joined = each.shift == 0, None
        sums = returning.sums
        if not is_own:  # the sum of two calls is rounded once, more are summed in float32 or better
            joined = make_block((k, v), keys.size(0), precision if len(parts) > 2 else q.dtype).zero_()
            sums = view_block(joined, (k, v))
        for query_heads, key_heads, part in task.walk(parts):
            own = part.queries, query_heads
            tensors = dout[own], *cut((q, keys, values), query_heads, key_heads, part), out[own]
            own_lse = lse[query_heads, part.queries].contiguous()
            grads = run_backward(*tensors, own_lse, *list_options(part.documents, task.kernel, rule))
            for total, place, grad in zip((dq, *sums), (own, *[(part.keys, key_heads)] * 2), grads, strict=True):
                total[place] += grad
            del tensors, grads
        del keys, values, sums
        if joined is not None:
            returning.send(joined.to(q.dtype), each)
    returning.wait()
    return [dq.to(q.dtype), *(total.to(q.dtype) for total in returning.sums)]


def _walk(
    k: Tensor, v: Tensor, task: KernelTask
) -> Iterator[tuple[Round, tuple[KernelCall, ...], Rule, Tensor, Tensor]]:
    """Yields each round with its kernel calls, its rule, and its block of keys and values. Windows end no earlier than
    documents here."""
    rounds = task.calls.rounds
    blocks = walk_blocks(k, v, [each for each, _ in rounds], task.ring)
    for each, parts in rounds:
        keys, values = next(blocks)  # zip would keep a block while the next is made
        yield each, parts, replace(task.rule, window_tokens=None, is_causal=each.shift == 0), keys, values
        del keys, values
