"""Attention on a ring of ranks: keys and values of other ranks arrive in one collective, or block by block in rounds
whose results are merged by their log-sum-exp in float32 or better (Ring Attention). Gradients return the same way.

Ranks send only what others need. This and the rounds are known from the plan and the documents' lengths on every
rank, so that all start each collective in the same order. Takes tensors and an axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses_cli.plan.rows.ring import KeyPlan, Move, Round, TokenRun, TokenRuns, count_tokens
from ulysses_cli.train.attention.documents import KernelCall, KernelCalls
from ulysses_cli.train.attention.heads import Span
from ulysses_cli.train.attention.kernels.native import Rule, add_sinks, get_precision, make_lse, merge
from ulysses_cli.train.attention.kernels.operators import attend, list_options, run_backward
from ulysses_cli.train.choosing import call_operator
from ulysses_cli.train.clock import part_of_step
from ulysses_cli.train.processes.groups import SequenceAxis


@dataclass(frozen=True, eq=False)
class KernelTask:
    """`runs`: query heads and their key heads that a kernel takes at once."""

    calls: KernelCalls
    runs: Sequence[tuple[Span, Span]]
    ring: SequenceAxis
    kernel: str
    rule: Rule

    def walk(self, parts: Iterable[KernelCall]) -> Iterator[tuple[slice, slice, KernelCall]]:
        """Yields the heads and the tokens of each kernel call."""
        for part in parts:
            for queries, keys in self.runs:
                yield slice(*queries), slice(*keys), part


def cut(rows: Sequence[Tensor], queries: slice, keys: slice, part: KernelCall) -> tuple[Tensor, Tensor, Tensor]:
    """The queries, keys and values of a kernel call."""
    q, k, v = rows
    return q[part.queries, queries], k[part.keys, keys], v[part.keys, keys]


Pair = tuple[Tensor, Tensor]  # keys and values, or their gradients

# Shapes. n tokens of this rank, m keys that its queries attend to, h key/value heads on this rank, D and V numbers of a
# key and of a value. A block of tokens travels as one flat tensor, all its keys before all its values: where it arrives
# both are contiguous, and a kernel addresses no more than it reads.


def fetch_keys(k: Tensor, v: Tensor, plan: KeyPlan | None, ring: SequenceAxis) -> tuple[Tensor, Tensor]:
    """Takes this rank's k [n, h, D] and v [n, h, V], returns the keys and values that its queries attend to, [m, h, D]
    and [m, h, V], as kernels take them. Collective over the ring; a plan in which no rank needs another's keys has no
    collective."""
    if plan is None:
        return k, v
    keys, values = _fetch(k, v, plan, ring) if plan.is_shared else (k, v)
    if not plan.layout:
        return keys, values
    return _lay_out(keys, plan.layout), _lay_out(values, plan.layout)


def _lay_out(tensor: Tensor, layout: TokenRuns) -> Tensor:
    return torch.cat([tensor[slice(*run)] for run in layout])


def _fetch(k: Tensor, v: Tensor, plan: KeyPlan, ring: SequenceAxis) -> tuple[Tensor, Tensor]:
    """Keys and values in the row's order, each once."""
    outgoing = plan.moves[ring.rank]
    incoming = [source[ring.rank] for source in plan.moves]
    send = make_block((k, v), _count(outgoing, ring))
    blocks = _cut_blocks(send, (k, v), outgoing, ring)
    for target, moves in enumerate(outgoing):
        if target != ring.rank:
            copy_runs(blocks[target], (k, v), [move.source for move in moves])
    received = make_block((k, v), _count(incoming, ring))
    _trade(received, send, (k, v), incoming, outgoing, ring)
    del send, blocks
    keys, values = k.new_empty(plan.num_keys, *k.shape[1:]), v.new_empty(plan.num_keys, *v.shape[1:])
    blocks = _cut_blocks(received, (k, v), incoming, ring)
    for source, moves in enumerate(incoming):
        at = 0
        for move in moves:
            size = _measure(move)
            run = slice(*move.source) if source == ring.rank else slice(at, at + size)
            for total, part in zip((keys, values), (k, v) if source == ring.rank else blocks[source], strict=True):
                total[slice(*move.target)] = part[run]
            at += size
    return keys, values


def return_gradients(
    dkeys: Tensor, dvalues: Tensor, plan: KeyPlan | None, ring: SequenceAxis, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The reverse: takes gradients of the keys [m, h, D] and values [m, h, V] that this rank's queries attend to,
    returns those of its own tokens, summed over documents and over all ranks of the ring in float32 or better. They
    travel as `dtype`."""
    precision = torch.promote_types(dtype, torch.float32)
    if plan is not None and plan.layout:
        sums = [grad.new_zeros(plan.num_keys, *grad.shape[1:], dtype=precision) for grad in (dkeys, dvalues)]
        add_runs(sums, (dkeys, dvalues), plan.layout)
        dkeys, dvalues = sums
    if plan is None or not plan.is_shared:
        return dkeys.to(dtype), dvalues.to(dtype)
    grads = dkeys, dvalues
    outgoing = [source[ring.rank] for source in plan.moves]  # to those whose tokens they are
    incoming = plan.moves[ring.rank]
    send = make_block(grads, _count(outgoing, ring), dtype)
    blocks = _cut_blocks(send, grads, outgoing, ring)
    for source, moves in enumerate(outgoing):
        if source != ring.rank:
            copy_runs(blocks[source], grads, [move.target for move in moves])
    received = make_block(grads, _count(incoming, ring), dtype)
    _trade(received, send, grads, incoming, outgoing, ring)
    del send, blocks
    own = plan.moves[ring.rank][ring.rank]
    num_own = sum(_measure(move) for move in own)
    totals = [grad.new_zeros(num_own, *grad.shape[1:], dtype=precision) for grad in grads]
    blocks = _cut_blocks(received, grads, incoming, ring)
    for total, grad in zip(totals, grads, strict=True):
        for move in own:
            total[slice(*move.source)] = grad[slice(*move.target)]
    for target, moves in enumerate(incoming):
        if target != ring.rank:
            add_runs(totals, blocks[target], [move.source for move in moves])
    dk, dv = (total.to(dtype) for total in totals)
    return dk, dv


def _trade(
    received: Tensor, send: Tensor, like: Pair, incoming: Sequence[Sequence[Move]], outgoing: Sequence[Sequence[Move]],
    ring: SequenceAxis,
) -> None:  # fmt: skip
    """One collective on the ring. All its ranks reach it, since they derive the same plan from the same lengths."""
    splits = ([tokens * _count_width(like) for tokens in _count_by_rank(part, ring)] for part in (incoming, outgoing))
    with part_of_step("exchange"):
        dist.all_to_all_single(received, send, *splits, group=ring.group)


def _measure(move: Move) -> int:
    return move.source.stop - move.source.start


def _count_by_rank(moves_by_rank: Sequence[Sequence[Move]], ring: SequenceAxis) -> list[int]:
    """Tokens that travel to or from each other rank."""
    return [0 if rank == ring.rank else sum(map(_measure, moves)) for rank, moves in enumerate(moves_by_rank)]


def _count(moves_by_rank: Sequence[Sequence[Move]], ring: SequenceAxis) -> int:
    return sum(_count_by_rank(moves_by_rank, ring))


def _cut_blocks(
    flat: Tensor, like: Pair, moves_by_rank: Sequence[Sequence[Move]], ring: SequenceAxis
) -> list[tuple[Tensor, Tensor]]:
    """Views what travels as each rank's block."""
    sizes = [tokens * _count_width(like) for tokens in _count_by_rank(moves_by_rank, ring)]
    return [view_block(part, like) for part in flat.split(sizes)]


def _count_width(like: Pair) -> int:
    """Numbers of a token in a block."""
    return sum(tensor.size(1) * tensor.size(2) for tensor in like)


def make_block(like: Pair, num_tokens: int, dtype: torch.dtype | None = None) -> Tensor:
    """A flat tensor for keys and values, or their gradients, with heads like these."""
    return like[0].new_empty(num_tokens * _count_width(like), dtype=dtype)


def view_block(flat: Tensor, like: Pair) -> tuple[Tensor, Tensor]:
    """Views a block's keys [m, h, D] and values [m, h, V], both contiguous."""
    (heads, dim), (_, value_dim) = like[0].shape[1:], like[1].shape[1:]
    num_tokens = flat.numel() // _count_width(like)
    keys, values = flat.split([num_tokens * heads * dim, num_tokens * heads * value_dim])
    return keys.view(num_tokens, heads, dim), values.view(num_tokens, heads, value_dim)


def copy_runs(block: Pair, source: Pair, runs: Sequence[TokenRun]) -> None:
    """Copies runs of tokens of keys and values into a block."""
    at = 0
    for run in runs:
        for target, part in zip(block, source, strict=True):
            target[at : at + run.stop - run.start] = part[slice(*run)]
        at += run.stop - run.start


def add_runs(totals: Sequence[Tensor], block: Pair, runs: Sequence[TokenRun]) -> None:
    """Adds a block to runs of tokens of keys and values."""
    at = 0
    for run in runs:
        for total, part in zip(totals, block, strict=True):
            total[slice(*run)] += part[at : at + run.stop - run.start]
        at += run.stop - run.start


@dataclass(eq=False)
class _Transfer:
    """A collective under way. `send` must live until it has ended."""

    received: Tensor
    send: Tensor
    work: Any

    def wait(self) -> Tensor:
        with part_of_step("exchange"):
            self.work.wait()
        return self.received


def walk_blocks(k: Tensor, v: Tensor, rounds: Sequence[Round], ring: SequenceAxis) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the keys [m, h, D] and values [m, h, V] of each round; those of the next travel meanwhile. The caller
    releases them before it asks for the next, so that no third block exists."""
    coming: _Transfer | None = None
    for at in range(len(rounds)):
        keys, values = (k, v) if coming is None else view_block(coming.wait(), (k, v))
        coming = _start_fetch(k, v, rounds[at + 1], ring) if at + 1 < len(rounds) else None
        yield keys, values
        del keys, values


def _start_fetch(k: Tensor, v: Tensor, after: Round, ring: SequenceAxis) -> _Transfer:
    send = make_block((k, v), count_tokens(after.sent))
    copy_runs(view_block(send, (k, v)), (k, v), after.sent)
    received = make_block((k, v), after.num_keys)
    return _start(received, send, ring, source=ring.rank - after.shift, target=ring.rank + after.shift)


class ReturningGradients:
    """Sums of the gradients of this rank's keys [n, h, D] and values [n, h, V], in float32 or better. Those of other
    ranks' blocks return to them while the next block is computed."""

    def __init__(self, k: Tensor, v: Tensor, ring: SequenceAxis, precision: torch.dtype) -> None:
        self.sums = torch.zeros(k.shape, dtype=precision, device=k.device), v.new_zeros(v.shape, dtype=precision)
        self._ring = ring
        self._coming: tuple[Round, _Transfer] | None = None

    def send(self, joined: Tensor, after: Round) -> None:
        """Takes the gradients of a round's block. Collective over the ring."""
        self.wait()
        received = make_block(self.sums, count_tokens(after.sent), joined.dtype)
        source, target = self._ring.rank + after.shift, self._ring.rank - after.shift
        self._coming = after, _start(received, joined, self._ring, source=source, target=target)

    def wait(self) -> None:
        """Adds what was under way."""
        if self._coming is None:
            return
        (after, transfer), self._coming = self._coming, None
        add_runs(self.sums, view_block(transfer.wait(), self.sums), after.sent)


def _start(received: Tensor, send: Tensor, ring: SequenceAxis, *, source: int, target: int) -> _Transfer:
    """Starts one collective on the ring, in which each rank sends to one other. All its ranks reach it: they derive
    the same rounds from the same lengths."""
    incoming, outgoing = ([0] * ring.size for _ in range(2))
    incoming[source % ring.size], outgoing[target % ring.size] = received.size(0), send.size(0)
    with part_of_step("exchange"):
        work = dist.all_to_all_single(received, send, incoming, outgoing, group=ring.group, async_op=True)
    return _Transfer(received, send, work)


def attend_gathered(rows: Sequence[Tensor], sinks: Tensor | None, task: KernelTask) -> tuple[Tensor, Tensor]:
    """Takes q [n, heads, D], k and v [n, kv_heads, D or V] and the sinks of these heads; returns out [n, heads, V] and
    log-sum-exp [heads, n]. Collective over the ring where its ranks need keys of each other."""
    rows = _fetch_all_keys(rows, task)
    calls = list(task.walk(task.calls.parts))
    whole: tuple[Tensor, Tensor] | None = None
    for queries, keys, part in calls:
        q, k, v = cut(rows, queries, keys, part)
        own_sinks = None if sinks is None else sinks[queries]
        out, lse = call_operator(attend, q, k, v, own_sinks, *list_options(part.documents, task.kernel, task.rule))
        if len(calls) == 1:
            return out, lse
        if whole is None:
            tokens, heads, _ = rows[0].shape
            whole = out.new_empty(tokens, heads, out.size(2)), lse.new_empty(heads, tokens)
        whole[0][part.queries, queries] = out
        whole[1][queries, part.queries] = lse
    assert whole is not None
    return whole


def backward_gathered(rows: Sequence[Tensor], dout: Tensor, out: Tensor, lse: Tensor, task: KernelTask) -> list[Tensor]:
    """Returns the gradients of the rows. Keys of other ranks are fetched again, so that none is kept from the
    forward."""
    fetched = _fetch_all_keys(rows, task)
    grads = _run_kernels(fetched, dout, out, lse, task)
    del fetched
    grads[1:] = return_gradients(grads[1], grads[2], task.calls.plan, task.ring, dout.dtype)
    return grads


def _fetch_all_keys(rows: Sequence[Tensor], task: KernelTask) -> list[Tensor]:
    """This rank's queries, and the keys and values that they attend to."""
    q, k, v = rows
    return [q, *fetch_keys(k, v, task.calls.plan, task.ring)]


def _run_kernels(rows: Sequence[Tensor], dout: Tensor, out: Tensor, lse: Tensor, task: KernelTask) -> list[Tensor]:
    """Gradients of queries, and of all keys and values that they attend to. A key of several parts gets the sum of its
    gradients: that of two is rounded once, more are summed in float32 or better. Each part uses the log-sum-exp of its
    queries over all of their keys, so gradients of parts need no correction."""
    calls, whole = list(task.walk(task.calls.parts)), list[Tensor]()
    for queries, keys, part in calls:
        own_lse = lse[queries, part.queries]
        tensors = (dout[part.queries, queries], *cut(rows, queries, keys, part), out[part.queries, queries])
        lse_here = own_lse if len(calls) == 1 else own_lse.contiguous()
        grads = run_backward(*tensors, lse_here, *list_options(part.documents, task.kernel, task.rule))
        if len(calls) == 1:
            return list(grads)
        if not whole:
            precise = torch.promote_types(dout.dtype, torch.float32)
            precision = precise if len(task.calls.parts) > 2 else dout.dtype
            whole = [torch.empty_like(rows[0]), *(torch.zeros_like(row, dtype=precision) for row in rows[1:])]
        whole[0][part.queries, queries] = grads[0]
        for total, grad in zip(whole[1:], grads[1:], strict=True):
            total[part.keys, keys] += grad
    return whole


def attend_in_rounds(rows: Sequence[Tensor], sinks: Tensor | None, task: KernelTask) -> tuple[Tensor, Tensor]:
    """Takes q [n, heads, D], k and v [n, kv_heads, D or V] and the sinks of these heads; returns out [n, heads, V] and
    log-sum-exp [heads, n]. Collective over the ring, in each round but the first."""
    q, k, v = rows
    precision = get_precision(q)
    out, lse = q.new_empty((*q.shape[:2], v.size(2)), dtype=precision), make_lse(q)
    for each, parts, rule, keys, values in _walk(k, v, task):
        for query_heads, key_heads, part in task.walk(parts):
            tensors = cut((q, keys, values), query_heads, key_heads, part)
            part_out, part_lse = call_operator(attend, *tensors, None, *list_options(part.documents, task.kernel, rule))
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
