"""Ulysses attention: one all-to-all trades each rank's slice of the row for a subset of the heads, a second trades the
result back. The backward has two more, or three where slices were saved and are exchanged again. On a ring, ranks hold
shares of the row's queries, and one more all-to-all each way trades the keys that these need. Values are those of one
rank; a key/value head that several ranks use gets the sum of their gradients.

Takes tensors and an axis, no recipe and no model. Keeps no state between calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ulysses_cli.train.attention.documents import Documents, KernelCall, KernelCalls
from ulysses_cli.train.attention.exchange import exchange_in, exchange_out
from ulysses_cli.train.attention.heads import Chunk, HeadPlan, Span, plan_heads
from ulysses_cli.train.attention.kernels.operators import attend, compute_sink_gradient, list_options, run_backward
from ulysses_cli.train.attention.kernels.rule import Rule
from ulysses_cli.train.attention.keys import fetch_keys, return_gradients
from ulysses_cli.train.memory.saved_results import is_saving_results, save_for_recompute
from ulysses_cli.train.processes.sequence_axis import NO_AXIS, SequenceAxis


@torch.compiler.disable
def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    rule: Rule,
    *,
    axis: SequenceAxis,
    ring: SequenceAxis = NO_AXIS,
    kernel: str,
    sinks: Tensor | None = None,
    num_head_chunks: int = 1,
) -> Tensor:
    """Exact causal attention inside documents of rows that are split over the ranks of `axis`, or of both axes.

    Takes q [B, S, heads, D], k [B, S, kv_heads, D] and v [B, S, kv_heads, V], any strides; returns [B, S, heads, V].
    `documents` describes the whole rows, and their order on a ring. Collective over both axes, with the same shapes on
    all their ranks: each call is two all-to-alls of the axis, or three where V is not D, and one of the ring where its
    ranks need keys of each other.
    """
    batch, tokens, heads, dim = q.shape
    for name, tensor, width in (("k", k, dim), ("v", v, v.size(3))):
        if tensor.dtype != q.dtype or tensor.shape != (batch, tokens, k.size(2), width):
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}; with q {q.dtype} {list(q.shape)} it must be {q.dtype} "
                f"{[batch, tokens, k.size(2), width]}"
            )
    documents.check_num_tokens(batch, tokens, axis.size * ring.size)
    plan = plan_heads(heads, k.size(2), axis.size, num_head_chunks)
    calls = documents.plan_calls(rule.window_tokens, ring)
    call = _Call(calls, rule, axis, ring, kernel, plan, is_saving_results())
    out: Tensor = _Attention.apply(q, k, v, sinks, call)
    return out


@dataclass(frozen=True, eq=False)
class _Call:
    """The arguments of a call besides its tensors."""

    kernel_calls: KernelCalls
    rule: Rule
    axis: SequenceAxis
    ring: SequenceAxis
    kernel: str
    plan: HeadPlan
    saves_output: bool  # the layer is recomputed in the backward and gets the saved output

    def fetch_keys(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """This rank's queries, and the keys and values that they attend to."""
        q, k, v = rows
        return [q, *fetch_keys(k, v, self.kernel_calls.plan, self.ring)]

    def list_kernel_calls(self, chunk: Chunk) -> list[tuple[Span, Span, KernelCall]]:
        """Runs of heads, and of tokens, that a kernel takes at once."""
        runs = self.plan.list_runs(chunk, self.axis.rank)
        return [(*run, part) for part in self.kernel_calls.parts for run in runs]


class _Attention(torch.autograd.Function):
    """With one chunk, the kernel's whole rows are saved for the backward. With several chunks, and in a checkpointed
    layer, only this rank's slices are saved and the backward exchanges them: whole rows exist for one chunk of heads at
    a time, and a recomputation needs neither the kernel nor a collective."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: _Call) -> Tensor:
        ctx.call, ctx.num_kv_heads, ctx.dim = call, k.size(2), q.size(3)
        ctx.saves_rows = len(call.plan.chunks) == 1 and not call.saves_output
        if ctx.saves_rows:
            rows, result, lse = _attend_at_once(q, k, v, sinks, call)
            ctx.save_for_backward(*rows, result, lse, sinks)
            return exchange_out([result], [call.plan.chunks[0].queries], call.axis, q.size(0), num_heads=[q.size(2)])[0]
        out, *all_lse = save_for_recompute(lambda: _attend_by_chunks(q, k, v, sinks, call))
        ctx.save_for_backward(q, k, v, out, sinks, *all_lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return (_backward_at_once if len(ctx.call.plan.chunks) == 1 else _backward_by_chunks)(ctx, dout)


def _attend_at_once(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: _Call
) -> tuple[list[Tensor], Tensor, Tensor]:
    chunk = call.plan.chunks[0]
    rows = exchange_in([q, k, v], [chunk.queries, chunk.keys, chunk.keys], call.axis)
    return rows, *_attend(rows, sinks, chunk, call)


def _attend_by_chunks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: _Call) -> tuple[Tensor, ...]:
    """The output [B, S, heads, D] and each chunk's log-sum-exp."""
    if len(call.plan.chunks) == 1:
        _, result, lse = _attend_at_once(q, k, v, sinks, call)
        spans = [call.plan.chunks[0].queries]
        return exchange_out([result], spans, call.axis, q.size(0), num_heads=[q.size(2)])[0], lse
    out = torch.empty((*q.shape[:3], v.size(3)), dtype=q.dtype, device=q.device)
    all_lse = []
    for chunk in call.plan.chunks:
        rows = exchange_in([q, k, v], [chunk.queries, chunk.keys, chunk.keys], call.axis)
        result, lse = _attend(rows, sinks, chunk, call)
        del rows
        exchange_out([result], [chunk.queries], call.axis, q.size(0), [out])
        all_lse.append(lse)
    return out, *all_lse


def _backward_at_once(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    call: _Call = ctx.call
    chunk, batch, counts = call.plan.chunks[0], dout.size(0), [dout.size(2), ctx.num_kv_heads, ctx.num_kv_heads]
    spans = [chunk.queries, chunk.keys, chunk.keys]
    if ctx.saves_rows:
        *rows, result, lse, sinks = ctx.saved_tensors
        (drows,) = exchange_in([dout], [chunk.queries], call.axis)
    else:
        q, k, v, out, sinks, lse = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()
        slices, results = [q, k, v], [dout, out]
        del q, k, v, out
        rows = exchange_in(slices, spans, call.axis)  # apart from the results: half the buffers at a time
        drows, result = exchange_in(results, [chunk.queries, chunk.queries], call.axis)
    wanted_sinks = sinks if ctx.needs_input_grad[3] else None
    grads, dsinks = _attend_backward(rows, drows, result, lse, wanted_sinks, chunk, call)
    # Returning gradients needs none of the kernel's inputs. Releasing them here keeps the peak low.
    ctx.maybe_clear_saved_tensors()
    del rows, result, drows
    if not call.plan.adds_up:
        return *exchange_out(grads, spans, call.axis, batch, num_heads=counts), dsinks, None
    into = _make_gradients(dout, counts, ctx.dim, adds=True)
    exchange_out(grads, spans, call.axis, batch, into, adds=[False, True, True])
    return *(grad.to(dout.dtype) for grad in into), dsinks, None


def _backward_by_chunks(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    call: _Call = ctx.call
    q, k, v, out, sinks, *all_lse = ctx.saved_tensors
    counts, adds = [q.size(2), k.size(2), k.size(2)], call.plan.adds_up
    into = _make_gradients(dout, counts, ctx.dim, adds=adds)
    wanted_sinks = sinks if ctx.needs_input_grad[3] else None
    total_dsinks: Tensor | None = None
    for chunk, lse in zip(call.plan.chunks, all_lse, strict=True):
        spans = [chunk.queries, chunk.keys, chunk.keys]
        *rows, drows, result = exchange_in([q, k, v, dout, out], [*spans, chunk.queries, chunk.queries], call.axis)
        grads, dsinks = _attend_backward(rows, drows, result, lse, wanted_sinks, chunk, call)
        del rows, drows, result
        exchange_out(grads, spans, call.axis, q.size(0), into, adds=[False, adds, adds])
        del grads  # else they stay allocated together with those of the next chunk
        if dsinks is not None:
            total_dsinks = dsinks if total_dsinks is None else total_dsinks + dsinks
    return *(grad.to(dout.dtype) for grad in into), total_dsinks, None


def _make_gradients(dout: Tensor, counts: Sequence[int], dim: int, *, adds: bool) -> list[Tensor]:
    """Allocates gradients; queries and keys have `dim` numbers. With `adds`, those of keys and values are sums, in
    float32 or better."""
    batch, tokens, _, value_dim = dout.shape
    precision = torch.promote_types(dout.dtype, torch.float32) if adds else dout.dtype
    dtypes = (dout.dtype, precision, precision)
    make = torch.zeros if adds else torch.empty
    return [
        make(batch, tokens, n, width, dtype=dtype, device=dout.device)
        for n, dtype, width in zip(counts, dtypes, (dim, dim, value_dim), strict=True)
    ]


def _attend(rows: Sequence[Tensor], sinks: Tensor | None, chunk: Chunk, call: _Call) -> tuple[Tensor, Tensor]:
    """Runs the kernel on this rank's tokens and heads, with the keys of the whole row that these attend to. Returns
    result [T, h, D] and log-sum-exp [h, T]."""
    first, rows = chunk.queries[call.axis.rank].start, call.fetch_keys(rows)
    calls = call.list_kernel_calls(chunk)
    whole: tuple[Tensor, Tensor] | None = None
    for queries, keys, part in calls:
        q, k, v = _cut(rows, queries, keys, part)
        own_sinks = None if sinks is None else sinks[first + queries.start : first + queries.stop]
        result, lse = attend(q, k, v, own_sinks, *list_options(part.documents, call.kernel, call.rule))
        if len(calls) == 1:
            return result, lse
        if whole is None:
            tokens, heads, _ = rows[0].shape
            whole = result.new_empty(tokens, heads, result.size(2)), lse.new_empty(heads, tokens)
        whole[0][part.queries, slice(*queries)] = result
        whole[1][slice(*queries), part.queries] = lse
    assert whole is not None
    return whole


def _attend_backward(
    rows: Sequence[Tensor],
    drows: Tensor,
    result: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    chunk: Chunk,
    call: _Call,
) -> tuple[list[Tensor], Tensor | None]:
    """Returns gradients of the rows' queries, keys and values, and of the sinks: zero but for this rank's heads. Keys
    of other ranks are fetched again, so that none is kept from the forward."""
    fetched = call.fetch_keys(rows)
    grads = _run_backward(fetched, drows, result, lse, chunk, call)
    del fetched
    grads[1:] = return_gradients(grads[1], grads[2], call.kernel_calls.plan, call.ring, drows.dtype)
    if sinks is None:
        return grads, None
    dsinks, heads = torch.zeros_like(sinks), slice(*chunk.queries[call.axis.rank])
    dsinks[heads] = compute_sink_gradient(drows, result, lse, sinks[heads])
    return grads, dsinks


def _run_backward(
    rows: Sequence[Tensor], drows: Tensor, result: Tensor, lse: Tensor, chunk: Chunk, call: _Call
) -> list[Tensor]:
    """Gradients of queries, and of all keys and values that they attend to. A key of several parts gets the sum of its
    gradients: that of two is rounded once, more are summed in float32 or better. Each part uses the log-sum-exp of its
    queries over all of their keys, so gradients of parts need no correction."""
    calls, whole = call.list_kernel_calls(chunk), list[Tensor]()
    for queries, keys, part in calls:
        own = slice(*queries)
        own_lse = lse[own, part.queries]
        tensors = (drows[part.queries, own], *_cut(rows, queries, keys, part), result[part.queries, own])
        lse_here = own_lse if len(calls) == 1 else own_lse.contiguous()
        grads = run_backward(*tensors, lse_here, *list_options(part.documents, call.kernel, call.rule))
        if len(calls) == 1:
            return list(grads)
        if not whole:
            precise = torch.promote_types(drows.dtype, torch.float32)
            precision = precise if len(call.kernel_calls.parts) > 2 else drows.dtype
            whole = [torch.empty_like(rows[0]), *(torch.zeros_like(row, dtype=precision) for row in rows[1:])]
        whole[0][part.queries, own] = grads[0]
        for total, grad in zip(whole[1:], grads[1:], strict=True):
            total[part.keys, slice(*keys)] += grad
    return whole


def _cut(rows: Sequence[Tensor], queries: Span, keys: Span, part: KernelCall) -> tuple[Tensor, ...]:
    q, k, v = rows
    return q[part.queries, slice(*queries)], k[part.keys, slice(*keys)], v[part.keys, slice(*keys)]
