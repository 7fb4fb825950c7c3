"""Cuts what a rank of a ring attends to into rounds: its own keys first, then those of each other rank, one at a time.

A rank then holds two blocks of keys instead of a row's. Integers only, and the same rounds on all ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from ulysses_cli.plan.rows.order import (
    Move,
    Order,
    QueryPart,
    TokenRun,
    TokenRuns,
    count_tokens,
    cut_runs,
    join_parts,
    plan_keys,
)

MAX_SHARES = 1.5  # keys that a rank fetches at once, its own included, over its own tokens; more come in rounds


class Round(NamedTuple):
    """The keys of the rank `shift` places before this one in the ring, as far as this rank's queries attend to them:
    `num_keys` in rising order. Meanwhile the rank `shift` places after gets `sent` of this rank's own tokens. In the
    first round, `shift` 0, keys are this rank's own and queries the last of them; later, queries stand behind all."""

    shift: int
    parts: tuple[QueryPart, ...]
    num_keys: int
    sent: TokenRuns


Rounds = tuple[Round, ...]
Moves = tuple[tuple[tuple[Move, ...], ...], ...]


class _Piece(NamedTuple):
    """Tokens of one document, and the place of the first among the tokens of its rank or block."""

    document: int
    tokens: TokenRun
    place: int

    @property
    def places(self) -> TokenRun:
        return TokenRun(self.place, self.place + self.tokens.stop - self.tokens.start)


@lru_cache(maxsize=64)
def plan_rounds(
    lengths: tuple[int, ...], order: Order, window_tokens: int | None, rank: int, max_shares: float = MAX_SHARES
) -> Rounds:
    """Returns the rounds of a rank, or none where one fetch is as good: where no rank attends to more keys than
    `max_shares`, and under windows, whose ends no kernel's mask can shift. A round in which no rank needs anything is
    left out on all of them."""
    if window_tokens is not None and window_tokens < max(lengths):
        return ()
    moves, size = plan_keys(lengths, order, None, rank).moves, len(order)
    most = max(sum(_count_moved(moves, source, target) for source in range(size)) for target in range(size))
    if most <= max_shares * count_tokens(order[rank]):
        return ()
    starts = list(accumulate(lengths, initial=0))
    own = list(_list_pieces(order[rank], starts))
    rounds = [Round(0, (_join_own(own),), count_tokens(order[rank]), ())]
    for shift in range(1, size):
        if not any(moves[source][(source + shift) % size] for source in range(size)):
            continue
        source, target = (rank - shift) % size, (rank + shift) % size
        needed = (run for move in moves[source][rank] for run in cut_runs(order[source], *move.source))
        block = list(_list_pieces(needed, starts))
        sent = tuple(move.source for move in moves[rank][target])
        num_keys = _count_moved(moves, source, rank)
        rounds.append(Round(shift, tuple(join_parts(_match(own, block))), num_keys, sent))
    return tuple(rounds)


def _count_moved(moves: Moves, source: int, target: int) -> int:
    return count_tokens(move.source for move in moves[source][target])


def _list_pieces(runs: Iterable[TokenRun], starts: list[int]) -> Iterator[_Piece]:
    """Cuts runs where documents end."""
    place = 0
    for run in runs:
        start = run.start
        while start < run.stop:
            document = bisect_right(starts, start) - 1
            stop = min(run.stop, starts[document + 1])
            yield _Piece(document, TokenRun(start, stop), place)
            place, start = place + stop - start, stop


def _join_own(own: list[_Piece]) -> QueryPart:
    """One causal call. A rank's tokens of a document are in order, whatever lies between them in the row."""
    lengths: dict[int, int] = {}
    for piece in own:
        lengths[piece.document] = lengths.get(piece.document, 0) + piece.tokens.stop - piece.tokens.start
    whole, counts = TokenRun(0, own[-1].places.stop), tuple(lengths.values())
    return QueryPart(whole, whole, counts, counts)


def _match(own: list[_Piece], block: list[_Piece]) -> Iterator[QueryPart]:
    """Pairs queries with the keys of the same document before them. Queries that see the same keys are one piece."""
    by_document: dict[int, list[_Piece]] = {}
    for piece in block:
        by_document.setdefault(piece.document, []).append(piece)
    last: tuple[TokenRun, TokenRun] | None = None
    for piece in own:
        before = [keys for keys in by_document.get(piece.document, ()) if keys.tokens.start < piece.tokens.start]
        if not before:
            continue
        queries, keys = piece.places, TokenRun(before[0].place, before[-1].places.stop)
        if last is not None and last[1] == keys and last[0].stop == queries.start:
            queries = TokenRun(last[0].start, queries.stop)
        elif last is not None:
            yield _make_part(*last)
        last = queries, keys
    if last is not None:
        yield _make_part(*last)


def _make_part(queries: TokenRun, keys: TokenRun) -> QueryPart:
    return QueryPart(queries, keys, (queries.stop - queries.start,), (keys.stop - keys.start,))
