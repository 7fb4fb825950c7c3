"""Deals a row to the ranks of a ring so that all have the same work, cuts what each rank attends to into rounds (its
own keys first, then those of one other rank at a time), and counts the keys that ranks hold and trade. Integers
only. A pure function of the documents' lengths and the model's windows, so that all ranks derive the same. A
document may be a branch: it follows the document that its row shares among several."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, islice, pairwise
from operator import add
from typing import NamedTuple

MAX_BRANCHES = 4  # of one long document, whose keys are copied for each; more of shorter ones
CHUNKS = (1, 2, 4, 8, 16, 32)  # pieces of a row for each rank, fewest first: few pieces need few keys and few kernels
EVEN = 1.01  # largest work of a rank over the mean


def count_pairs(length: int, window_tokens: int | None, num_shared: int = 0) -> int:
    """(query, key) pairs of one causal document, whose queries follow `num_shared` keys."""
    if num_shared:
        return count_pairs(num_shared + length, window_tokens) - count_pairs(num_shared, window_tokens)
    window = min(window_tokens or length, length)
    return window * (window + 1) // 2 + (length - window) * window


class TokenRun(NamedTuple):
    """Tokens [start, stop)."""

    start: int
    stop: int


TokenRuns = tuple[TokenRun, ...]
Shared = tuple[int, ...]  # of each document, how many tokens of the last whole one are its own first; empty: 0 of each
Order = tuple[TokenRuns, ...]  # the tokens of each rank of a ring, in rising order


@dataclass(frozen=True)
class Ring:
    """Ranks that hold a share of each row's queries. `windows`: how many layers have each attention window; None is
    attention to the whole document. They say how much work a token is."""

    size: int = 1
    windows: tuple[tuple[int | None, int], ...] = ((None, 1),)


ALONE = Ring()


class Move(NamedTuple):
    """Tokens of one rank, by their place among its own, that another rank needs at `target` among its keys."""

    source: TokenRun
    target: TokenRun


class QueryPart(NamedTuple):
    """One call of a kernel: a slice of a rank's queries, a slice of its keys, and of each document in them the number
    of queries and of keys. A document's queries are the last of its keys."""

    queries: TokenRun
    keys: TokenRun
    lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]


@dataclass(frozen=True)
class KeyPlan:
    """What one rank of a ring attends to. `moves[source][target]` lists what the ranks of the ring need of each other,
    itself included; it is the same on all of them. `layout`: the keys as parts take them, by their places among all
    that the rank needs, some of them several times; empty where each is taken once and in order."""

    parts: tuple[QueryPart, ...]
    num_keys: int
    moves: tuple[tuple[tuple[Move, ...], ...], ...]
    layout: TokenRuns = ()

    @property
    def is_shared(self) -> bool:
        """Whether any rank of the ring needs keys of another: the same on all of them."""
        pairs = ((source, target) for source in range(len(self.moves)) for target in range(len(self.moves)))
        return any(self.moves[source][target] for source, target in pairs if source != target)


def count_shared_out(num_tokens: int, num_ranks: int, ring_size: int) -> int:
    """The most of `num_tokens` that ranks of a row hold in equal parts; on a ring, with two equal chunks for each."""
    multiple = num_ranks * (2 if ring_size > 1 else 1)
    return num_tokens // multiple * multiple


def count_tokens(runs: Iterable[TokenRun]) -> int:
    return sum(run.stop - run.start for run in runs)


@lru_cache(maxsize=256)
def deal_row(lengths: tuple[int, ...], ring: Ring, shared: Shared = ()) -> Order:
    """Returns the tokens of each rank. The row is cut into equal chunks, as many for each rank; the chunk with most
    work goes to the rank with least. With one document and two chunks this is the zigzag order."""
    total = sum(lengths)
    if total % ring.size:
        raise ValueError(f"a row of {total} tokens cannot be dealt to {ring.size} ranks")
    if ring.size == 1:
        return ((TokenRun(0, total),),)
    best: tuple[int, list[list[int]], int] | None = None
    for num_chunks in CHUNKS:
        if total % (ring.size * num_chunks):
            break
        width = total // (ring.size * num_chunks)
        works = _measure_chunks(lengths, width, ring, fill_shared(shared, lengths))
        dealt = _deal_chunks(works, ring.size, num_chunks)
        most = max(sum(works[chunk] for chunk in chunks) for chunks in dealt)
        if best is None or most < best[0]:
            best = most, dealt, width
        if most * ring.size <= EVEN * sum(works):
            break
    assert best is not None
    _, dealt, width = best
    return tuple(_join(TokenRun(chunk * width, (chunk + 1) * width) for chunk in chunks) for chunks in dealt)


def _measure_chunks(lengths: tuple[int, ...], width: int, ring: Ring, shared: Shared) -> list[int]:
    """(query, key) pairs of each chunk's queries, over all layers."""
    ends = list(accumulate(lengths))
    before = [0, *accumulate(map(partial(_count_all_pairs, ring), lengths, shared))]

    def count_until(token: int) -> int:
        document = bisect_right(ends, token)
        if document == len(lengths):
            return before[-1]
        own = token - (ends[document] - lengths[document])
        return before[document] + _count_all_pairs(ring, own, shared[document])

    bounds = [count_until(token) for token in range(0, ends[-1] + 1, width)]
    return [stop - start for start, stop in pairwise(bounds)]


def _count_all_pairs(ring: Ring, tokens: int, num_shared: int) -> int:
    """Of the first tokens of a document that are its own."""
    return sum(number * count_pairs(tokens, window, num_shared) for window, number in ring.windows)


def _deal_chunks(works: Sequence[int], num_ranks: int, num_chunks: int) -> list[list[int]]:
    """The chunk with most work goes to the rank with least, among those that have fewer than `num_chunks`. Ranks are
    numbered by their first chunk."""
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for chunk in sorted(range(len(works)), key=lambda chunk: (-works[chunk], chunk)):
        rank = min((rank for rank in range(num_ranks) if len(dealt[rank]) < num_chunks), key=lambda rank: loads[rank])
        dealt[rank].append(chunk)
        loads[rank] += works[chunk]
    return sorted(map(sorted, dealt))


def check_order(order: Order, num_tokens: int) -> None:
    """Raises ValueError unless each token belongs to exactly one rank and all ranks have the same number."""
    end = 0
    for start, stop in sorted(run for runs in order for run in runs):
        if start != end:
            fault = "two ranks" if start < end else "no rank"
            raise ValueError(f"tokens {min(start, end)} to {max(start, end)} of the rows belong to {fault} of the ring")
        end = stop
    if end != num_tokens or len({count_tokens(runs) for runs in order}) > 1:
        shares = ", ".join(str(count_tokens(runs)) for runs in order)
        raise ValueError(f"rows of {num_tokens} tokens are dealt to the ranks of a ring in shares of {shares}")


def deal_rows(lengths: Sequence[int], num_rows: int, ring: Ring, shared: Shared = ()) -> Order:
    """The same for rows of equal length that follow each other, each dealt on its own. `lengths` are the documents of
    all rows, with padding. Tokens count on from row to row."""
    row_tokens, rows, rest = sum(lengths) // num_rows, list(split_rows(lengths, num_rows)), iter(shared)
    dealt = [deal_row(row, ring, tuple(islice(rest, len(row)))) for row in rows]
    return tuple(
        _join(
            TokenRun(row * row_tokens + run.start, row * row_tokens + run.stop)
            for row, order in enumerate(dealt)
            for run in order[rank]
        )
        for rank in range(ring.size)
    )


def split_rows(lengths: Sequence[int], num_rows: int) -> Iterator[tuple[int, ...]]:
    """Yields the documents of each row."""
    row_tokens, start, filled = sum(lengths) // num_rows, 0, 0
    for at, length in enumerate(lengths):
        filled += length
        if filled == row_tokens:
            yield tuple(lengths[start : at + 1])
            start, filled = at + 1, 0


def cut_runs(runs: Iterable[TokenRun], start: int, stop: int) -> TokenRuns:
    """Tokens [start, stop) of those that the runs hold, counted from the first of them."""
    cut, passed = [], 0
    for run in runs:
        first, last = run.start + max(0, start - passed), run.start + min(stop - passed, run.stop - run.start)
        if first < last:
            cut.append(TokenRun(first, last))
        passed += run.stop - run.start
    return tuple(cut)


@lru_cache(maxsize=64)
def plan_keys(
    lengths: tuple[int, ...], order: Order, window_tokens: int | None, rank: int, shared: Shared = ()
) -> KeyPlan:
    """Returns what the queries of a rank of the ring attend to. Keys of a rank lie in rising order, each once."""
    starts = [0, *accumulate(lengths)]
    if any(shared):
        return _plan_branches(starts, order, window_tokens, rank, shared)
    keys = [_join(_reach(run, starts, window_tokens) for run in runs) for runs in order]
    moves = tuple(tuple(tuple(_list_moves(own, needed)) for needed in keys) for own in order)
    parts = join_parts(_make_parts(order[rank], keys[rank], starts, window_tokens))
    return KeyPlan(tuple(parts), count_tokens(keys[rank]), moves)


ANSWER_SHARE = 64  # of a row, the answers that make it dearest


def list_dearest(row_tokens: int, num_rows: int, num_branches: int) -> tuple[tuple[int, ...], Shared]:
    """Documents of rows that need the most memory, and how many tokens each shares: one document fills a row; where
    others share what it begins with, that is nearly all of it, and its keys are copied for each of them."""
    answer = row_tokens // ANSWER_SHARE
    if not num_branches or not answer:
        return (row_tokens,) * num_rows, (0,) * num_rows
    lengths = (row_tokens - num_branches * answer, *[answer] * num_branches)
    return lengths * num_rows, (0, *[lengths[0] - answer] * num_branches) * num_rows


def count_most_shared(num_tokens: int, num_branches: int) -> int:
    """The most tokens that branches share in so many tokens of a row, each counted for each of them."""
    if num_tokens < ANSWER_SHARE:
        return num_branches * num_tokens
    return sum(list_dearest(num_tokens, 1, num_branches)[1])


def fill_shared(shared: Shared, lengths: Sequence[int]) -> Shared:
    return tuple(shared) or (0,) * len(lengths)


def _plan_branches(
    starts: Sequence[int], order: Order, window_tokens: int | None, rank: int, shared: Shared
) -> KeyPlan:
    """One call for each run of queries, with the keys that each of its documents reaches, one after another. So keys
    are copied once per layer; a call of its own for each answer would need no copy, but two calls for each pair."""
    places, stem = list[tuple[int, int, int]](), 0
    for start, num_shared in zip(starts, shared, strict=False):
        stem = stem if num_shared else start
        places.append((start, stem, num_shared))
    reached = [[list(_reach_all(run, starts, places, window_tokens)) for run in runs] for runs in order]
    keys = [_join(sorted(key for run in runs for _, keys in run for key in keys)) for runs in reached]
    moves = tuple(tuple(tuple(_list_moves(own, needed)) for needed in keys) for own in order)
    layout = list[TokenRun]()
    parts = list[QueryPart]()
    query = 0
    at = 0
    for run in reached[rank]:
        lengths = tuple(length for length, _ in run)
        key_lengths = tuple(map(count_tokens, (keys for _, keys in run)))
        queries, taken = TokenRun(query, query + sum(lengths)), TokenRun(at, at + sum(key_lengths))
        parts.append(QueryPart(queries, taken, lengths, key_lengths))
        query, at = queries.stop, taken.stop
        for key in (key for _, keys in run for key in keys):
            place = _find_place(keys[rank], key.start)
            follows = bool(layout) and layout[-1].stop == place
            first = layout.pop().start if follows else place
            layout.append(TokenRun(first, place + key.stop - key.start))
    num_keys = count_tokens(keys[rank])
    is_plain = layout == [TokenRun(0, num_keys)]
    return KeyPlan(tuple(join_parts(parts)), num_keys, moves, () if is_plain else tuple(layout))


def _reach_all(
    run: TokenRun, starts: Sequence[int], places: Sequence[tuple[int, int, int]], window_tokens: int | None
) -> Iterator[tuple[int, TokenRuns]]:
    """Of each document in a run of queries: how many of these it has, and their keys. `places`: of each document in the
    row, where it and the last whole one begin, and how many tokens they share."""
    for start, stop in pairwise([run.start, *_list_inside(starts, run), run.stop]):
        begin, stem, num_shared = places[bisect_right(starts, start) - 1]
        first = max(0, num_shared + start - begin + 1 - window_tokens) if window_tokens is not None else 0
        runs = TokenRun(stem + first, stem + num_shared), TokenRun(begin + max(0, first - num_shared), stop)
        yield stop - start, tuple(keys for keys in runs if keys.start < keys.stop)


def _reach(run: TokenRun, starts: Sequence[int], window_tokens: int | None) -> TokenRun:
    """The keys of a run of queries: from the start of its first document or window."""
    first = starts[bisect_right(starts, run.start) - 1]
    return TokenRun(first if window_tokens is None else max(first, run.start - window_tokens + 1), run.stop)


def _join(runs: Iterable[TokenRun]) -> TokenRuns:
    """The union of runs whose starts rise, neighbours in one. Keys of a later run may start before an earlier one."""
    joined: list[TokenRun] = []
    for run in runs:
        start, stop = run
        while joined and start <= joined[-1].stop:
            last = joined.pop()
            start, stop = min(start, last.start), max(stop, last.stop)
        joined.append(TokenRun(start, stop))
    return tuple(joined)


def _list_moves(own: TokenRuns, needed: TokenRuns) -> Iterator[Move]:
    """Where the tokens of one rank lie among the keys that another needs."""
    source = 0
    for run in own:
        target = 0
        for keys in needed:
            first, last = max(run.start, keys.start), min(run.stop, keys.stop)
            if first < last:
                at, to = source + first - run.start, target + first - keys.start
                yield Move(TokenRun(at, at + last - first), TokenRun(to, to + last - first))
            target += keys.stop - keys.start
        source += run.stop - run.start


def _make_parts(
    runs: TokenRuns, keys: TokenRuns, starts: Sequence[int], window_tokens: int | None
) -> Iterator[QueryPart]:
    query = 0
    for run in runs:
        reached = _reach(run, starts, window_tokens)
        first = _find_place(keys, reached.start)
        bounds = [run.start, *_list_inside(starts, run), run.stop]
        lengths = tuple(stop - start for start, stop in pairwise(bounds))
        key_lengths = (lengths[0] + run.start - reached.start, *lengths[1:])
        num_queries, num_keys = run.stop - run.start, reached.stop - reached.start
        yield QueryPart(TokenRun(query, query + num_queries), TokenRun(first, first + num_keys), lengths, key_lengths)
        query += num_queries


def _list_inside(starts: Sequence[int], run: TokenRun) -> Sequence[int]:
    return starts[bisect_right(starts, run.start) : bisect_right(starts, run.stop - 1)]


def _find_place(keys: TokenRuns, token: int) -> int:
    """The place of a token among the keys."""
    passed = 0
    for run in keys:
        if run.start <= token < run.stop:
            return passed + token - run.start
        passed += run.stop - run.start
    raise AssertionError(f"token {token} is not among the keys {keys}")


def join_parts(parts: Iterable[QueryPart]) -> list[QueryPart]:
    """Neighbours whose queries and keys follow each other are one call."""
    joined: list[QueryPart] = []
    for part in parts:
        if joined and joined[-1].keys.stop == part.keys.start and joined[-1].queries.stop == part.queries.start:
            last = joined.pop()
            part = QueryPart(
                TokenRun(last.queries.start, part.queries.stop),
                TokenRun(last.keys.start, part.keys.stop),
                last.lengths + part.lengths,
                last.key_lengths + part.key_lengths,
            )
        joined.append(part)
    return joined


MAX_SHARES = 1.5  # keys that a rank fetches at once, its own included, over its own tokens; more come in rounds


class Round(NamedTuple):
    """The keys of the rank `shift` places before this one in the ring, as far as this rank's queries attend to them:
    `num_keys` in rising order. Meanwhile the rank `shift` places after gets `sent` of this rank's own tokens. In the
    first round, `shift` 0, keys are this rank's own and queries the last of them; later, queries stand behind all. In
    the last one, `shift` the ring's size, a rank sends itself the keys that its branches share with other documents."""

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
    lengths: tuple[int, ...], order: Order, window_tokens: int | None, rank: int, max_shares: float = MAX_SHARES,
    shared: Shared = (),
) -> Rounds:  # fmt: skip
    """Returns the rounds of a rank, or none where one fetch is as good: where no rank attends to more keys than
    `max_shares`, and under windows, whose ends no kernel's mask can shift. A round in which no rank needs anything is
    left out on all of them."""
    if window_tokens is not None and window_tokens < max(map(add, lengths, fill_shared(shared, lengths))):
        return ()
    moves, size = plan_keys(lengths, order, None, rank, shared).moves, len(order)
    most = max(sum(_count_moved(moves, source, target) for source in range(size)) for target in range(size))
    if most <= max_shares * count_tokens(order[rank]):
        return ()
    starts = list(accumulate(lengths, initial=0))
    own, stems = list(_list_pieces(order[rank], starts)), _find_stems(starts, shared)
    rounds = [Round(0, (_join_own(own),), count_tokens(order[rank]), ())]
    for shift in range(1, size):
        if not any(moves[source][(source + shift) % size] for source in range(size)):
            continue
        source, target = (rank - shift) % size, (rank + shift) % size
        needed = (run for move in moves[source][rank] for run in cut_runs(order[source], *move.source))
        block = list(_list_pieces(needed, starts))
        sent = tuple(move.source for move in moves[rank][target])
        num_keys = _count_moved(moves, source, rank)
        rounds.append(Round(shift, tuple(join_parts(_match_all(own, block, stems))), num_keys, sent))
    if any(any(_list_own_stems(list(_list_pieces(runs, starts)), stems)) for runs in order if stems):
        mine = list(_list_own_stems(own, stems))
        sent = tuple(piece.places for piece in mine)
        block = list(_list_pieces((piece.tokens for piece in mine), starts))
        rounds.append(Round(size, tuple(join_parts(_match(own, block, stems))), count_tokens(sent), sent))
    return tuple(rounds)


Stems = dict[
    int, tuple[int, int]
]  # of each branch, the document that it begins as, and the row's token where that ends


def _find_stems(starts: Sequence[int], shared: Shared) -> Stems:
    stems, stem = Stems(), 0
    for document, num_shared in enumerate(shared):
        stem = stem if num_shared else document
        if num_shared:
            stems[document] = stem, starts[stem] + num_shared
    return stems


def _list_own_stems(own: Sequence[_Piece], stems: Stems) -> Iterator[_Piece]:
    """What a rank's own branches share with documents, as far as that is on the rank too."""
    ends: dict[int, int] = {}
    for document, end in (stems[piece.document] for piece in own if piece.document in stems):
        ends[document] = max(end, ends.get(document, 0))
    for piece in own:
        stop = min(piece.tokens.stop, ends.get(piece.document, 0))
        if piece.tokens.start < stop:
            yield piece._replace(tokens=TokenRun(piece.tokens.start, stop))


def _match_all(own: list[_Piece], block: list[_Piece], stems: Stems) -> Iterator[QueryPart]:
    """With keys of the same document, and of the one that a branch begins as."""
    yield from _match(own, block)
    yield from _match(own, block, stems) if stems else ()


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


def _match(own: list[_Piece], block: list[_Piece], stems: Stems | None = None) -> Iterator[QueryPart]:
    """Pairs queries with the keys of the same document before them; with `stems` instead branches with the keys that
    they share. Queries that see the same keys are one piece."""
    by_document: dict[int, list[_Piece]] = {}
    for piece in block:
        by_document.setdefault(piece.document, []).append(piece)
    last: tuple[TokenRun, TokenRun] | None = None
    for piece in own:
        reads = (piece.document, piece.tokens.start) if stems is None else stems.get(piece.document)
        before = [keys for keys in by_document.get(reads[0], ()) if keys.tokens.start < reads[1]] if reads else []
        if not reads or not before:
            continue
        kept = before[-1]._replace(tokens=TokenRun(before[-1].tokens.start, min(before[-1].tokens.stop, reads[1])))
        queries, keys = piece.places, TokenRun(before[0].place, kept.places.stop)
        if last is not None and last[1] == keys and last[0].stop == queries.start:
            queries = TokenRun(last[0].start, queries.stop)
        elif last is not None:
            yield _make_part(*last)
        last = queries, keys
    if last is not None:
        yield _make_part(*last)


def _make_part(queries: TokenRun, keys: TokenRun) -> QueryPart:
    return QueryPart(queries, keys, (queries.stop - queries.start,), (keys.stop - keys.start,))


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
