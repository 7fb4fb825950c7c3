"""Moves blocks of keys and values between the ranks of a ring while others are computed, and their gradients back. For
`rounds.py`.

Each round with keys of other ranks has one collective each way, and the plan says which rounds there are: every rank
starts them in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses_cli.plan.rows.order import count_tokens
from ulysses_cli.plan.rows.rounds import Round
from ulysses_cli.train.attention.keys import add_runs, copy_runs, make_block, view_block
from ulysses_cli.train.processes.sequence_axis import SequenceAxis
from ulysses_cli.train.telemetry.clock import part_of_step


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
