"""Ulysses attention: one all-to-all trades each rank's slice of the row for a subset of the heads, a second trades
the result back. The backward mirrors it. Values are those of one rank; a key/value head that several ranks use gets
the sum of their gradients. On a ring, ranks hold shares of the row's queries (ring.py). Heads may come in chunks, of
which the next can travel while one attends; the order of collectives follows from the chunks' numbers alone.

Takes tensors and an axis, no recipe and no model. Tensors are copied once into the send buffer and read in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ulysses_cli.plan.rows.indexing import wraps
from ulysses_cli.train.attention.documents import Documents, KernelCalls, KernelHeads
from ulysses_cli.train.attention.heads import Chunk, HeadPlan, Spans, find_pattern, plan_heads
from ulysses_cli.train.attention.kernels.native import Rule
from ulysses_cli.train.attention.kernels.operators import compute_sink_gradient
from ulysses_cli.train.attention.ring import (
    KernelTask,
    attend_gathered,
    attend_in_rounds,
    backward_gathered,
    backward_in_rounds,
)
from ulysses_cli.train.clock import part_of_step
from ulysses_cli.train.memory.checkpointing import is_saving_results, save_for_recompute
from ulysses_cli.train.processes.groups import NO_AXIS, SequenceAxis

# Shapes. B rows in a batch, S tokens of a row on this rank, P ranks that share it, T = B x P x S tokens in all,
# h heads of one tensor on one rank, w heads of all exchanged tensors on one rank, D head_dim.

Arrival = Callable[[], Sequence[Tensor]]  # waits for an exchange under way, once, and returns what came


def exchange_in(slices: list[Tensor], spans: Sequence[Spans], axis: SequenceAxis) -> list[Tensor]:
    """Takes tensors [B, S, all heads, D], returns tensors [T, h, D], usually views of one buffer. `spans` lists which
    heads of each tensor each rank gets. Neighbours with the same D share a collective; each other D has its own.

    `slices` is emptied: each tensor is released as soon as it is copied.
    """
    return [row for arrive in _start_in(slices, spans, axis) for row in arrive()]


def _start_in(
    slices: list[Tensor], spans: Sequence[Spans], axis: SequenceAxis, *, is_async: bool = False
) -> Iterator[Arrival]:
    """The same in two steps: a collective starts when the iterator is asked for it."""
    for part in _list_groups(slices):
        group = slices[: part.stop - part.start]
        del slices[: len(group)]
        yield _start_group_in(group, spans[part], axis, is_async)


def _start_group_in(slices: list[Tensor], spans: Sequence[Spans], axis: SequenceAxis, is_async: bool) -> Arrival:
    if axis.group is None:
        parts = [
            part[:, :, rank_spans[0].start : rank_spans[0].stop] for part, rank_spans in zip(slices, spans, strict=True)
        ]
        rows = [(part if part.stride(-1) == 1 else part.contiguous()).flatten(0, 1) for part in parts]
        return lambda: [_bound_reach(row) for row in rows]
    batch, tokens, _, dim = slices[0].shape
    widths = [sum(rank_spans[rank].num_heads for rank_spans in spans) for rank in range(axis.size)]
    send = slices[0].new_empty(sum(widths) * batch * tokens * dim)
    segments = _split(send, widths, batch, tokens, dim)
    offsets = [0] * axis.size
    for rank_spans in spans:
        _pack(slices.pop(0), segments, rank_spans, offsets)
        offsets = [offset + span.num_heads for offset, span in zip(offsets, rank_spans, strict=True)]
    width = widths[axis.rank]
    received = send.new_empty(axis.size, batch, tokens, width, dim)
    work = _all_to_all(received, send, [width] * axis.size, widths, axis, is_async)

    def arrive() -> list[Tensor]:
        nonlocal received, send
        _wait(work)
        del send
        # With one row in the batch, tokens arrive in the row's order and nothing is moved.
        rows = received.transpose(0, 1).reshape(-1, width, dim)
        del received
        return [_bound_reach(row) for row in rows.split([of_ranks[axis.rank].num_heads for of_ranks in spans], dim=1)]

    return arrive


def _bound_reach(row: Tensor) -> Tensor:
    """Kernels may address a row by its stride in 32 bits. A view of a buffer that is wider than the row is copied where
    such an address would wrap."""
    return row.contiguous() if wraps(row.size(0), row.stride(0)) else row


def exchange_out(
    parts: list[Tensor],
    spans: Sequence[Spans],
    axis: SequenceAxis,
    batch: int,
    into: Sequence[Tensor] | None = None,
    num_heads: Sequence[int] = (),
    *,
    adds: Sequence[bool] = (),
) -> Sequence[Tensor]:
    """The reverse: takes tensors [T, h, D], returns [B, S, all heads, D], written or, with `adds`, added into `into`.

    Heads that went to several ranks come back as a sum. `parts` is emptied: each is released as soon as it is copied.
    """
    arrivals = _start_out(parts, spans, axis, batch, into, num_heads, adds)
    return [result for arrive in arrivals for result in arrive()]


def _start_out(
    parts: list[Tensor],
    spans: Sequence[Spans],
    axis: SequenceAxis,
    batch: int,
    into: Sequence[Tensor] | None,
    num_heads: Sequence[int],
    adds: Sequence[bool],
    *,
    is_async: bool = False,
) -> Iterator[Arrival]:
    """The same in two steps: a collective starts when the iterator is asked for it."""
    adds = adds or [False] * len(parts)
    for part in _list_groups(parts):
        group = parts[: part.stop - part.start]
        del parts[: len(group)]
        own = None if into is None else into[part]
        yield _start_group_out(group, spans[part], axis, batch, own, num_heads[part], adds[part], is_async)


def _list_groups(tensors: Sequence[Tensor]) -> list[slice]:
    """Runs of neighbours with the same D. All ranks have the same shapes, and so the same runs."""
    dims = [tensor.size(-1) for tensor in tensors]
    starts = [at for at, dim in enumerate(dims) if at == 0 or dim != dims[at - 1]]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(dims)], strict=True)]


def _start_group_out(
    parts: list[Tensor],
    spans: Sequence[Spans],
    axis: SequenceAxis,
    batch: int,
    into: Sequence[Tensor] | None,
    num_heads: Sequence[int],
    adds: Sequence[bool],
    is_async: bool,
) -> Arrival:
    if axis.group is None:
        whole_parts = [part.unflatten(0, (batch, -1)) for part in parts]
        if into is None:
            return lambda: whole_parts
        for part, rank_spans, whole, add in zip(whole_parts, spans, into, adds, strict=True):
            target = whole[:, :, rank_spans[0].start : rank_spans[0].stop]
            target.add_(part) if add else target.copy_(part)
        return lambda: into
    counts = [part.size(1) for part in parts]
    total, _, dim = parts[0].shape
    tokens = total // (batch * axis.size)
    dtype, device = parts[0].dtype, parts[0].device
    rows = _join(parts)
    send = rows.unflatten(0, (batch, axis.size, tokens)).transpose(0, 1).contiguous()
    del rows
    widths = [sum(rank_spans[rank].num_heads for rank_spans in spans) for rank in range(axis.size)]
    received = send.new_empty(sum(widths) * batch * tokens * dim)
    work = _all_to_all(received, send, widths, [sum(counts)] * axis.size, axis, is_async)

    def arrive() -> Sequence[Tensor]:
        nonlocal received, send
        _wait(work)
        del send
        wholes = into or [torch.empty(batch, tokens, heads, dim, dtype=dtype, device=device) for heads in num_heads]
        segments = _split(received, widths, batch, tokens, dim)
        del received
        offsets = [0] * axis.size
        for rank_spans, whole, add in zip(spans, wholes, adds, strict=True):
            _unpack(whole, segments, rank_spans, offsets, add=add)
            offsets = [offset + span.num_heads for offset, span in zip(offsets, rank_spans, strict=True)]
        return wholes

    return arrive


def _all_to_all(
    received: Tensor, send: Tensor, widths_in: list[int], widths_out: list[int], axis: SequenceAxis, is_async: bool
) -> Any:
    """One collective on the axis. All its ranks reach it: they run the same layers on slices of the same rows. Under
    way, it needs both buffers."""
    splits: tuple[list[int], ...] = ()
    if len(set(widths_in)) > 1 or len(set(widths_out)) > 1:
        unit = send.numel() // sum(widths_out)
        splits = ([width * unit for width in widths_in], [width * unit for width in widths_out])
    with part_of_step("exchange"):
        return dist.all_to_all_single(received.view(-1), send.view(-1), *splits, group=axis.group, async_op=is_async)


def _wait(work: Any) -> None:
    """On a GPU its stream waits, and not the host. None: a collective that has ended."""
    if work is not None:
        with part_of_step("exchange"):
            work.wait()


def _split(buffer: Tensor, widths: list[int], batch: int, tokens: int, dim: int) -> list[Tensor] | Tensor:
    """Views a flat buffer as one [B, S, w, D] segment per rank, or as one [P, B, S, w, D] where all are equal."""
    if len(set(widths)) == 1:
        return buffer.view(len(widths), batch, tokens, widths[0], dim)
    sizes = [width * batch * tokens * dim for width in widths]
    parts = zip(buffer.split(sizes), widths, strict=True)
    return [part.view(batch, tokens, width, dim) for part, width in parts]


def _pack(part: Tensor, segments: list[Tensor] | Tensor, spans: Spans, offsets: list[int]) -> None:
    """Copies each rank's heads of a slice to its segment, in a single copy where the spans follow a pattern."""
    pattern = find_pattern(spans)
    if isinstance(segments, Tensor) and pattern is not None:
        target = segments[..., offsets[0] : offsets[0] + pattern.num_heads, :]
        target = target.unflatten(0, (pattern.num_distinct, pattern.num_copies))
        target.copy_(_view_heads(part, spans)[:, None].expand_as(target))
        return
    for segment, span, offset in zip(segments, spans, offsets, strict=True):
        segment[:, :, offset : offset + span.num_heads] = part[:, :, span.start : span.stop]


def _unpack(whole: Tensor, segments: list[Tensor] | Tensor, spans: Spans, offsets: list[int], *, add: bool) -> None:
    """The reverse of _pack. Heads that are in several segments are summed, in float32 or better."""
    pattern = find_pattern(spans)
    if isinstance(segments, Tensor) and pattern is not None:
        received = segments[..., offsets[0] : offsets[0] + pattern.num_heads, :]
        received = received.unflatten(0, (pattern.num_distinct, pattern.num_copies))
        precision = torch.promote_types(whole.dtype, torch.float32)
        summed = received[:, 0] if pattern.num_copies == 1 else received.sum(1, dtype=precision)
        target = _view_heads(whole, spans)
        target.add_(summed) if add else target.copy_(summed)
        return
    for segment, span, offset in zip(segments, spans, offsets, strict=True):
        target, part = whole[:, :, span.start : span.stop], segment[:, :, offset : offset + span.num_heads]
        target.add_(part) if add else target.copy_(part)


def _view_heads(whole: Tensor, spans: Spans) -> Tensor:
    """Views [B, S, all heads, D] as [distinct spans, B, S, h, D] without a copy."""
    pattern = find_pattern(spans)
    if pattern is None:
        raise AssertionError(f"no pattern in {spans}")
    windows = whole[:, :, pattern.start :].unfold(2, pattern.num_heads, pattern.step)[:, :, : pattern.num_distinct]
    return windows.permute(2, 0, 1, 4, 3)


def _join(parts: list[Tensor]) -> Tensor:
    """Joins tensors [T, h, D] along the heads. Empties the list, so that each part is released once it is copied."""
    if len(parts) == 1:
        return parts.pop()
    width = sum(part.size(1) for part in parts)
    joined = parts[0].new_empty(parts[0].size(0), width, parts[0].size(2))
    offset = 0
    while parts:
        part = parts.pop(0)
        joined[:, offset : offset + part.size(1)] = part
        offset += part.size(1)
    return joined


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
    overlaps: bool = False,
) -> Tensor:
    """Exact causal attention inside documents of rows that are split over the ranks of `axis`, or of both axes.

    Takes q [B, S, heads, D], k [B, S, kv_heads, D] and v [B, S, kv_heads, V], any strides; returns [B, S, heads, V].
    `documents` describes the whole rows, and their order on a ring. With `overlaps`, a chunk of heads travels while the
    one before attends. Collective over both axes, with the same shapes on all their ranks: each call is, for each
    chunk, two all-to-alls of the axis, or three where V is not D, and one of the ring where its ranks need keys of each
    other.
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
    call = _Call(calls, rule, axis, ring, kernel, plan, is_saving_results(), overlaps and axis.size > 1)
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
    overlaps: bool  # a chunk travels while the one before attends

    def make_task(self, chunk: Chunk) -> KernelTask:
        runs = self.plan.list_runs(chunk, self.axis.rank)
        return KernelTask(self.kernel_calls, runs, self.ring, self.kernel, self.rule)


class Implementation(NamedTuple):
    forward: Callable[[Sequence[Tensor], Tensor | None, KernelTask], tuple[Tensor, Tensor]]
    backward: Callable[[Sequence[Tensor], Tensor, Tensor, Tensor, KernelTask], list[Tensor]]


GATHERED, IN_ROUNDS = (
    Implementation(attend_gathered, backward_gathered),
    Implementation(attend_in_rounds, backward_in_rounds),
)


def choose_way(calls: KernelCalls) -> Implementation:
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
        out, lse = save_for_recompute(lambda: _attend_by_chunks(q, k, v, sinks, call))
        ctx.save_for_backward(q, k, v, out, sinks, lse)
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


def _attend_by_chunks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: _Call) -> tuple[Tensor, Tensor]:
    """The output [B, S, heads, D] and the log-sum-exp [h, T] of this rank's heads of all chunks."""
    if len(call.plan.chunks) == 1:
        _, result, own = _attend_at_once(q, k, v, sinks, call)
        spans = [call.plan.chunks[0].queries]
        return exchange_out([result], spans, call.axis, q.size(0), num_heads=[q.size(2)])[0], own
    out = torch.empty((*q.shape[:3], v.size(3)), dtype=q.dtype, device=q.device)
    num_heads = q.size(2) // call.axis.size
    lse: Tensor | None = None
    returning = _Returning([out], [False], call)
    for chunk, rows in _walk_chunks((q, k, v), call):
        result, own = _attend(rows, sinks, chunk, call)
        del rows
        returning.send([result], [chunk.queries])
        lse = own.new_empty(num_heads, own.size(1)) if lse is None else lse
        lse[call.plan.find_own(chunk, call.axis.rank)] = own
    assert lse is not None
    returning.wait()
    return out, lse


def _walk_chunks(tensors: Sequence[Tensor], call: _Call) -> Iterator[tuple[Chunk, list[Tensor]]]:
    """Yields each chunk with its rows of q, k and v, and in the backward of dout and out. If chunks overlap, those of
    the next travel while the caller computes; it releases the rows before it asks for the next."""
    chunks = call.plan.chunks
    coming = [*_start_chunk(tensors, chunks[0], call)] if call.overlaps else []
    for chunk, after in zip(chunks, (*chunks[1:], None), strict=True):
        arriving = coming or _start_chunk(tensors, chunk, call)
        coming = [*_start_chunk(tensors, after, call)] if call.overlaps and after is not None else []
        yield chunk, [row for arrive in arriving for row in arrive()]


def _start_chunk(tensors: Sequence[Tensor], chunk: Chunk, call: _Call) -> Iterator[Arrival]:
    spans = [chunk.queries, chunk.keys, chunk.keys, chunk.queries, chunk.queries][: len(tensors)]
    return _start_in([*tensors], spans, call.axis, is_async=call.overlaps)


class _Returning:
    """Writes or, with `adds`, adds chunks' results into `into` [B, S, all heads, D]. If chunks overlap, those of one
    travel while the next attends, and no more than these."""

    def __init__(self, into: Sequence[Tensor], adds: Sequence[bool], call: _Call) -> None:
        self._into, self._adds, self._call = into, adds, call
        self._coming: list[Arrival] = []

    def send(self, parts: list[Tensor], spans: Sequence[Spans]) -> None:
        """Empties `parts`."""
        self.wait()
        call, batch = self._call, self._into[0].size(0)
        arrivals = _start_out(parts, spans, call.axis, batch, self._into, (), self._adds, is_async=call.overlaps)
        if call.overlaps:
            self._coming = [*arrivals]
            return
        for arrive in arrivals:
            arrive()

    def wait(self) -> None:
        """Takes what was under way."""
        coming, self._coming = self._coming, []
        for arrive in coming:
            arrive()


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
    q, k, v, out, sinks, lse = ctx.saved_tensors
    counts, adds = [q.size(2), k.size(2), k.size(2)], call.plan.adds_up
    into = _make_gradients(dout, counts, ctx.dim, adds=adds)
    wanted_sinks = sinks if ctx.needs_input_grad[3] else None
    total_dsinks: Tensor | None = None
    returning = _Returning(into, [False, adds, adds], call)
    for chunk, (*rows, drows, result) in _walk_chunks((q, k, v, dout, out), call):
        chunk_lse = lse[call.plan.find_own(chunk, call.axis.rank)]
        grads, dsinks = _attend_backward(rows, drows, result, chunk_lse, wanted_sinks, chunk, call)
        del rows, drows, result
        returning.send(grads, [chunk.queries, chunk.keys, chunk.keys])
        del grads  # else they stay allocated together with those of the next chunk
        if dsinks is not None:
            total_dsinks = dsinks if total_dsinks is None else total_dsinks + dsinks
    returning.wait()
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
