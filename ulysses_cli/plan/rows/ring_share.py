"""How many keys the ranks of a ring hold and trade in a row of documents of one length. The ledger and the speed model
ask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ulysses_cli.plan.rows.order import Order, Ring, TokenRuns, count_tokens, deal_row, plan_keys
from ulysses_cli.plan.rows.rounds import Rounds, plan_rounds

MAX_DOCUMENTS = 4096  # beyond, documents are so short that ranks trade next to nothing


class RoundShare(NamedTuple):
    """While one round's keys are computed, over a rank's tokens: its keys, those of the next round that arrive, what
    is sent for it, and what returns of the round before: its gradients and those of this rank's own keys."""

    is_own: bool
    keys: float
    arriving: float
    sent: float
    returning: float
    largest_part: float
    num_parts: int


@dataclass(frozen=True)
class RingShare:
    """Counts of keys of the rank that has most, as a ratio to its own tokens: keys that it attends to, fetches and
    sends. Also the queries of that rank's largest kernel call, and the number of its calls. Where keys come in rounds,
    `rounds` has those of every rank, alike ones once."""

    keys: float
    fetched: float
    sent: float
    largest_part: float
    num_parts: int
    rounds: tuple[RoundShare, ...] = ()


NO_RING = RingShare(keys=1.0, fetched=0.0, sent=0.0, largest_part=1.0, num_parts=1)


@lru_cache(maxsize=4096)
def measure_ring(row_tokens: int, document_tokens: int | None, ring: Ring, window_tokens: int | None) -> RingShare:
    """`document_tokens` None: one document fills the row."""
    if ring.size == 1:
        return NO_RING
    row_tokens -= row_tokens % ring.size
    length = max(min(document_tokens or row_tokens, row_tokens), -(-row_tokens // MAX_DOCUMENTS))
    lengths = (*[length] * (row_tokens // length), *([row_tokens % length] if row_tokens % length else []))
    order, own, ranks = deal_row(lengths, ring), row_tokens // ring.size, range(ring.size)
    plans = [plan_keys(lengths, order, window_tokens, rank) for rank in ranks]
    if not plans[0].is_shared:
        return NO_RING

    def count_moved(source: int, target: int) -> int:
        moved: TokenRuns = tuple(move.source for move in plans[0].moves[source][target])
        return count_tokens(moved) if source != target else 0

    widest = max(plans, key=lambda plan: plan.num_keys)
    shares = {share for rank in ranks for share in _list_shares(plan_rounds(lengths, order, window_tokens, rank), own)}
    return RingShare(
        keys=widest.num_keys / own,
        fetched=max(sum(count_moved(source, rank) for source in ranks) for rank in ranks) / own,
        sent=max(sum(count_moved(rank, target) for target in ranks) for rank in ranks) / own,
        largest_part=max(part.queries.stop - part.queries.start for part in widest.parts) / own,
        num_parts=len(widest.parts),
        rounds=tuple(sorted(shares)),
    )


def count_held_keys(lengths: tuple[int, ...], order: Order, window_tokens: int | None, rank: int) -> float:
    """The most keys that a rank holds at once: all that it attends to, or blocks of rounds with what is sent."""
    shares = _list_shares(plan_rounds(lengths, order, window_tokens, rank), 1)
    most = max((each.keys + each.arriving + each.sent for each in shares), default=0.0)
    return most or plan_keys(lengths, order, window_tokens, rank).num_keys


def _list_shares(rounds: Rounds, own: int) -> Iterator[RoundShare]:
    """Of one rank. What returned of the first round but one is there no longer when the third is computed."""
    for at, each in enumerate(rounds):
        before = rounds[at - 1] if at > 1 else None
        after = rounds[at + 1] if at + 1 < len(rounds) else None
        yield RoundShare(
            is_own=each.shift == 0,
            keys=each.num_keys / own,
            arriving=after.num_keys / own if after else 0.0,
            sent=count_tokens(after.sent) / own if after else 0.0,
            returning=(before.num_keys + count_tokens(before.sent)) / own if before else 0.0,
            largest_part=max((part.queries.stop - part.queries.start for part in each.parts), default=0) / own,
            num_parts=len(each.parts),
        )
