"""Trades keys and values between the ranks of a ring, and returns their gradients: one collective each way. For
`gathered.py`.

Ranks send only what others need. Which tokens these are is known from the documents' lengths on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses_cli.plan.rows.order import KeyPlan, Move, TokenRun
from ulysses_cli.train.processes.sequence_axis import SequenceAxis
from ulysses_cli.train.telemetry.clock import part_of_step

# Shapes. n tokens of this rank, m keys that its queries attend to, h key/value heads on this rank, D and V numbers of a
# key and of a value. k and v travel side by side, h x (D + V) numbers for each token.


def fetch_keys(k: Tensor, v: Tensor, plan: KeyPlan | None, ring: SequenceAxis) -> tuple[Tensor, Tensor]:
    """Takes this rank's k [n, h, D] and v [n, h, V], returns the keys and values that its queries attend to, [m, h, D]
    and [m, h, V]. Collective over the ring; a plan in which no rank needs another's keys has no collective."""
    if plan is None or not plan.is_shared:
        return k, v
    heads, dim = k.shape[1:]
    outgoing = plan.moves[ring.rank]
    incoming = [source[ring.rank] for source in plan.moves]
    send = k.new_empty(_count(outgoing, ring), heads * (dim + v.size(2)))
    at = 0
    for target, moves in enumerate(outgoing):
        for move in moves if target != ring.rank else ():
            copy_joined(send[at : at + _measure(move)], k, v, move.source)
            at += _measure(move)
    received = send.new_empty(_count(incoming, ring), send.size(1))
    _trade(received, send, incoming, outgoing, ring)
    del send
    keys, at = received.new_empty(plan.num_keys, received.size(1)), 0
    for source, moves in enumerate(incoming):
        for move in moves:
            target = keys[slice(*move.target)]
            if source == ring.rank:
                copy_joined(target, k, v, move.source)
                continue
            target.copy_(received[at : at + _measure(move)])
            at += _measure(move)
    return split_joined(keys, heads, dim)


def return_gradients(
    dkeys: Tensor, dvalues: Tensor, plan: KeyPlan | None, ring: SequenceAxis, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The reverse: takes gradients of the keys [m, h, D] and values [m, h, V] that this rank's queries attend to,
    returns those of its own tokens, summed over all ranks of the ring in float32 or better. They travel as `dtype`."""
    if plan is None or not plan.is_shared:
        return dkeys.to(dtype), dvalues.to(dtype)
    heads, dim = dkeys.shape[1:]
    outgoing = [source[ring.rank] for source in plan.moves]  # to those whose tokens they are
    incoming = plan.moves[ring.rank]
    send = torch.empty(_count(outgoing, ring), heads * (dim + dvalues.size(2)), dtype=dtype, device=dkeys.device)
    at = 0
    for source, moves in enumerate(outgoing):
        for move in moves if source != ring.rank else ():
            copy_joined(send[at : at + _measure(move)], dkeys, dvalues, move.target)
            at += _measure(move)
    received = send.new_empty(_count(incoming, ring), send.size(1))
    _trade(received, send, incoming, outgoing, ring)
    del send
    own = plan.moves[ring.rank][ring.rank]
    num_own = sum(_measure(move) for move in own)
    total = received.new_zeros(num_own, received.size(1), dtype=torch.promote_types(dtype, torch.float32))
    for move in own:
        copy_joined(total[slice(*move.source)], dkeys, dvalues, move.target)
    at = 0
    for target, moves in enumerate(incoming):
        for move in moves if target != ring.rank else ():
            total[slice(*move.source)] += received[at : at + _measure(move)]
            at += _measure(move)
    return split_joined(total.to(dtype), heads, dim)


def _trade(
    received: Tensor, send: Tensor, incoming: Sequence[Sequence[Move]], outgoing: Sequence[Sequence[Move]],
    ring: SequenceAxis,
) -> None:  # fmt: skip
    """One collective on the ring. All its ranks reach it, since they derive the same plan from the same lengths."""
    splits = (
        [0 if rank == ring.rank else sum(map(_measure, moves)) for rank, moves in enumerate(part)]
        for part in (incoming, outgoing)
    )
    with part_of_step("exchange"):
        dist.all_to_all_single(received, send, *splits, group=ring.group)


def _measure(move: Move) -> int:
    return move.source.stop - move.source.start


def _count(moves_by_rank: Sequence[Sequence[Move]], ring: SequenceAxis) -> int:
    """Tokens that travel to or from other ranks."""
    return sum(_measure(move) for rank, moves in enumerate(moves_by_rank) if rank != ring.rank for move in moves)


def copy_joined(target: Tensor, k: Tensor, v: Tensor, run: TokenRun) -> None:
    """Copies a run of tokens of keys and values into rows of the joined form."""
    part, (heads, dim) = slice(*run), k.shape[1:]
    keys, values = split_joined(target, heads, dim)
    keys.copy_(k[part])
    values.copy_(v[part])


def split_joined(joined: Tensor, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """Views rows of the joined form as keys and values."""
    return joined[:, : heads * dim].unflatten(1, (heads, dim)), joined[:, heads * dim :].unflatten(1, (heads, -1))
