"""Ulysses attention: one all-to-all trades each rank's slice of the row for a subset of the heads, a second trades the
result back. The backward has two more, or three where slices were saved and are exchanged again. On a ring, ranks hold
shares of the row's queries, and one more all-to-all each way trades the keys that these need. Values are those of one
rank; a key/value head that several ranks use gets the sum of their gradients.

Takes tensors and an axis, no recipe and no model. Keeps no state between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ulysses_cli.train.attention.documents import Documents, KernelCalls, KernelHeads
from ulysses_cli.train.attention.exchange import exchange_in, exchange_out
from ulysses_cli.train.attention.gathered import attend_gathered, backward_gathered
from ulysses_cli.train.attention.heads import Chunk, HeadPlan, plan_heads
from ulysses_cli.train.attention.kernel_task import KernelTask
from ulysses_cli.train.attention.kernels.operators import compute_sink_gradient
from ulysses_cli.train.attention.kernels.rule import Rule
from ulysses_cli.train.attention.rounds import attend_in_rounds, backward_in_rounds
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
    calls = documents.plan_calls(rule.window_tokens, ring, measure_heads(plan, axis, kernel, max(dim, v.size(3))))
    call = _Call(calls, rule, axis, ring, kernel, plan, is_saving_results())
    out: Tensor = _Attention.apply(q, k, v, sinks, call)
    return out


def measure_heads(plan: HeadPlan, axis: SequenceAxis, kernel: str, head_dim: int) -> KernelHeads:
    """Of this rank's largest chunk."""
    chunks = [(chunk.queries[axis.rank].num_heads, chunk.keys[axis.rank].num_heads) for chunk in plan.chunks]
    return KernelHeads(kernel, max(queries for queries, _ in chunks), max(keys for _, keys in chunks), head_dim)


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

    def make_task(self, chunk: Chunk) -> KernelTask:
        runs = self.plan.list_runs(chunk, self.axis.rank)
        return KernelTask(self.kernel_calls, runs, self.ring, self.kernel, self.rule)


class Way(NamedTuple):
    forward: Callable[[Sequence[Tensor], Tensor | None, KernelTask], tuple[Tensor, Tensor]]
    backward: Callable[[Sequence[Tensor], Tensor, Tensor, Tensor, KernelTask], list[Tensor]]


GATHERED, IN_ROUNDS = Way(attend_gathered, backward_gathered), Way(attend_in_rounds, backward_in_rounds)


def choose_way(calls: KernelCalls) -> Way:
    """How keys of other ranks reach the kernel: the same on all ranks of a ring."""
    return IN_ROUNDS if calls.rounds else GATHERED


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
    own_sinks = None if sinks is None else sinks[slice(*chunk.queries[call.axis.rank])]
    return choose_way(call.kernel_calls).forward(rows, own_sinks, call.make_task(chunk))


def _attend_backward(
    rows: Sequence[Tensor],
    drows: Tensor,
    result: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    chunk: Chunk,
    call: _Call,
) -> tuple[list[Tensor], Tensor | None]:
    """Returns gradients of the rows' queries, keys and values, and of the sinks: zero but for this rank's heads."""
    grads = choose_way(call.kernel_calls).backward(rows, drows, result, lse, call.make_task(chunk))
    if sinks is None:
        return grads, None
    dsinks, heads = torch.zeros_like(sinks), slice(*chunk.queries[call.axis.rank])
    dsinks[heads] = compute_sink_gradient(drows, result, lse, sinks[heads])
    return grads, dsinks
