"""Trades keys and values between the ranks of a ring, and returns their gradients: one collective each way. Copies
keys that several documents share, and adds up their gradients. For `gathered.py`.

Ranks send only what others need. Which tokens these are is known from the documents' lengths on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses_cli.plan.rows.order import KeyPlan, Move, TokenRun, TokenRuns
from ulysses_cli.train.processes.sequence_axis import SequenceAxis
from ulysses_cli.train.telemetry.clock import part_of_step

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
