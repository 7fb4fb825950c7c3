"""How many keys the ranks of a ring hold and trade in a row of documents of one length, for memory and speed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ulysses_cli.plan.rows.order import Ring, TokenRuns, count_tokens, deal_row, plan_keys

MAX_DOCUMENTS = 4096  # beyond, documents are so short that ranks trade next to nothing


@dataclass(frozen=True)
class RingShare:
    """Of the rank with most, over the tokens whose queries it has: keys that it attends to, those fetched from others
    and those sent to others. Of the rank with most keys, the queries of its largest kernel call, and its calls."""

    keys: float
    fetched: float
    sent: float
    largest_part: float
    num_parts: int


NO_RING = RingShare(keys=1.0, fetched=0.0, sent=0.0, largest_part=1.0, num_parts=1)


@lru_cache(maxsize=4096)
def measure_ring(row_tokens: int, document_tokens: int | None, ring: Ring, window_tokens: int | None) -> RingShare:
    """`document_tokens` None: one document fills the row."""
    if ring.size == 1:
        return NO_RING
    row_tokens -= row_tokens % ring.size
    length = max(min(document_tokens or row_tokens, row_tokens), -(-row_tokens // MAX_DOCUMENTS))
    lengths = (*[length] * (row_tokens // length), *([row_tokens % length] if row_tokens % length else []))
    order, own = deal_row(lengths, ring), row_tokens // ring.size
    plans = [plan_keys(lengths, order, window_tokens, rank) for rank in range(ring.size)]
    if not plans[0].is_shared:
        return NO_RING

    def count_moved(source: int, target: int) -> int:
        moved: TokenRuns = tuple(move.source for move in plans[0].moves[source][target])
        return count_tokens(moved) if source != target else 0

    ranks, widest = range(ring.size), max(plans, key=lambda plan: plan.num_keys)
    return RingShare(
        keys=widest.num_keys / own,
        fetched=max(sum(count_moved(source, rank) for source in ranks) for rank in ranks) / own,
        sent=max(sum(count_moved(rank, target) for target in ranks) for rank in ranks) / own,
        largest_part=max(part.queries.stop - part.queries.start for part in widest.parts) / own,
        num_parts=len(widest.parts),
    )
