"""Packs documents into rows, from their lengths: which pieces of which documents each row holds, and, from the seed,
in which order each epoch takes the rows. Packing is done once; every epoch takes the same rows in another order.
Plain integers and the standard library; each step costs a few look-ups, whatever the number of rows."""

from __future__ import annotations

import hashlib
import heapq
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

IGNORE_INDEX = -100  # label of a position without a target, as in torch's cross_entropy
NUM_TRIES = 24  # rows with the least work that are tried for a large piece before the fullest row that fits
WORD_BITS = 1024


class Bins:
    """Rows while they are filled. `by_room` and `by_work` may hold outdated entries, which look-ups skip."""

    def __init__(self, num_rows: int, capacity: int) -> None:
        self.capacity = capacity
        self.rooms = [capacity] * num_rows
        self.works = [0.0] * num_rows
        self.members: list[list[int]] = [[] for _ in range(num_rows)]
        self.by_room: dict[int, list[int]] = {capacity: list(range(num_rows - 1, -1, -1))}
        self.present = NumberSet(capacity)
        self.present.add(capacity)
        self.by_work = [(0.0, row) for row in range(num_rows)]

    def find_lightest(self, length: int) -> int | None:
        """Among the few rows with the least work, the first that has room."""
        tried: list[tuple[float, int]] = []
        lightest = None
        while self.by_work and len(tried) < NUM_TRIES and lightest is None:
            work, row = heapq.heappop(self.by_work)
            if work != self.works[row]:
                continue  # outdated: the heap holds a newer entry of this row
            if self.rooms[row] >= length:
                lightest = row
            tried.append((work, row))
        for entry in tried:
            heapq.heappush(self.by_work, entry)
        return lightest

    def find_fullest(self, length: int) -> int:
        """The row with the smallest room that suffices; a new one when there is none."""
        while True:
            room = self.present.find_from(length)
            if room is None:
                self.rooms.append(self.capacity)
                self.works.append(0.0)
                self.members.append([])
                heapq.heappush(self.by_work, (0.0, len(self.rooms) - 1))
                return len(self.rooms) - 1
            rows = self.by_room[room]
            while rows and self.rooms[rows[-1]] != room:
                rows.pop()
            if rows:
                return rows[-1]
            del self.by_room[room]
            self.present.remove(room)

    def put(self, member: int, length: int, work: float, row: int) -> None:
        self.members[row].append(member)
        self.rooms[row] -= length
        self.works[row] += work
        room = self.rooms[row]
        if room:
            heapq.heappush(self.by_work, (self.works[row], row))
            if room not in self.by_room:
                self.by_room[room] = []
                self.present.add(room)
            self.by_room[room].append(row)


class NumberSet:
    """A set of whole numbers up to a bound that finds the next member from any number on: a tree of words of bits."""

    def __init__(self, bound: int) -> None:
        self.levels: list[dict[int, int]] = [{}]
        while bound >= WORD_BITS:
            bound //= WORD_BITS
            self.levels.append({})

    def add(self, number: int) -> None:
        for level in self.levels:
            number, bit = divmod(number, WORD_BITS)
            level[number] = level.get(number, 0) | 1 << bit

    def remove(self, number: int) -> None:
        for level in self.levels:
            number, bit = divmod(number, WORD_BITS)
            level[number] &= ~(1 << bit)
            if level[number]:
                return
            del level[number]

    def find_from(self, number: int) -> int | None:
        """The smallest member that is at least `number`."""
        for depth, level in enumerate(self.levels):
            word, bit = divmod(number, WORD_BITS)
            rest = level.get(word, 0) >> bit
            if rest:
                number += (rest & -rest).bit_length() - 1
                for lower in reversed(self.levels[:depth]):
                    lowest = lower[number]
                    number = number * WORD_BITS + (lowest & -lowest).bit_length() - 1
                return number
            number = word + 1
        return None


HEAVY_SHARE = 0.95  # long documents, up to this share of all squared lengths, are spread by work; others fill gaps
SPARE_SHARE = 0.002  # room above the number of tokens, so that the last documents still fit into a gap


class RowCost(NamedTuple):
    """Cost of a row: `per_token` x tokens + `per_pair` x (query, key) pairs of attention."""

    per_token: float = 1.0
    per_pair: float = 0.0

    def of(self, tokens: int, num_shared: int = 0) -> float:
        """Of tokens that follow `num_shared` others, which cost nothing here."""
        return self.per_token * tokens + self.per_pair * tokens * (tokens + 1 + 2 * num_shared) / 2


class Piece(NamedTuple):
    """Tokens [start, stop) of a document."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class RowPieces:
    """Pieces in the order of their rows; row i holds pieces [offsets[i], offsets[i + 1])."""

    capacity: int
    documents: array[int]
    starts: array[int]
    stops: array[int]
    offsets: array[int]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def get_row(self, index: int) -> list[Piece]:
        part = range(self.offsets[index], self.offsets[index + 1])
        return [Piece(self.documents[at], self.starts[at], self.stops[at]) for at in part]

    def count_tokens(self) -> int:
        return sum(self.stops) - sum(self.starts)

    def compute_efficiency(self) -> float:
        """Share of the rows' room that holds tokens."""
        return self.count_tokens() / (self.capacity * max(1, len(self)))

    def compute_work(self, index: int, work: RowCost) -> float:
        return sum(work.of(piece.stop - piece.start) for piece in self.get_row(index))


@dataclass(frozen=True)
class Cut:
    """Pieces that fit a row, and counts of the documents that were cut."""

    pieces: list[Piece]
    num_split: int = 0
    num_truncated: int = 0
    num_dropped: int = 0
    num_torn: int = 0
    lost_tokens: int = 0


def cut_documents(
    lengths: Sequence[int],
    capacity: int,
    strategy: Literal["split", "truncate", "drop", "raise"],
    find_places: Callable[[int], Sequence[int]] | None = None,
) -> Cut:
    """Cuts documents to at most `capacity` tokens. Every lost token is counted.

    `find_places`: the tokens of a document before which a cut is harmless, in order; cuts elsewhere count as torn.
    """
    pieces: list[Piece] = []
    num_long = num_torn = lost = 0
    for document, length in enumerate(lengths):
        if length <= capacity:
            if length:
                pieces.append(Piece(document, 0, length))
            continue
        if strategy == "raise":
            raise ValueError(f"document {document} has {length} tokens, more than the {capacity} of a row")
        num_long += 1
        if strategy == "split":
            parts, torn = _split(document, length, capacity, find_places(document) if find_places else ())
            pieces += parts
            num_torn += torn if find_places else 0
        elif strategy == "truncate":
            pieces.append(Piece(document, 0, capacity))
            lost += length - capacity
        else:
            lost += length
    counts = {"split": "num_split", "truncate": "num_truncated", "drop": "num_dropped"}
    return Cut(pieces, num_torn=num_torn, lost_tokens=lost, **{counts[strategy]: num_long} if num_long else {})


def _split(document: int, length: int, capacity: int, places: Sequence[int]) -> tuple[list[Piece], int]:
    """Pieces as long as the places allow, and the number of cuts elsewhere. Leaves no tail of one token, because
    nothing predicts it."""
    pieces: list[Piece] = []
    start = num_torn = 0
    while length - start > capacity:
        stop = start + capacity - int(length - start == capacity + 1 and capacity > 2)
        at = bisect_right(places, stop) - 1
        if at >= 0 and places[at] > start + 1:
            stop = places[at]
        else:
            num_torn += 1
        pieces.append(Piece(document, start, stop))
        start = stop
    return [*pieces, Piece(document, start, length)], num_torn


def pack_documents(pieces: Sequence[Piece], capacity: int, work: RowCost) -> RowPieces:
    """Packs whole pieces. Large ones go to the rows with the least work, small ones fill the smallest gap that fits;
    both in falling order of length, so the result depends only on the lengths."""
    lengths = [piece.stop - piece.start for piece in pieces]
    if lengths and not 0 < min(lengths) <= max(lengths) <= capacity:
        raise ValueError(f"pieces have 1 to {capacity} tokens, found {min(lengths)} to {max(lengths)}")
    order = sorted(range(len(pieces)), key=lambda at: (-lengths[at], at))
    num_rows = -(-int(sum(lengths) * (1 + SPARE_SHARE)) // capacity)
    bins = Bins(num_rows, capacity)
    squares = sum(length * length for length in lengths)
    seen = 0
    for at in order:
        length = lengths[at]
        row = bins.find_lightest(length) if seen < HEAVY_SHARE * squares else None
        seen += length * length
        bins.put(at, length, work.of(length), bins.find_fullest(length) if row is None else row)
    return _collect(pieces, [sorted(members) for members in bins.members if members], capacity)


def pack_stream(pieces: Sequence[Piece], capacity: int, seed: int) -> RowPieces:
    """One stream of all pieces in an order from the seed, cut at every `capacity` tokens. A one-token last row takes a
    token from the row before it."""
    rows: list[list[Piece]] = [[]]
    room = capacity
    for at in range(len(pieces)):
        document, start, stop = pieces[shuffle_index(at, len(pieces), seed)]
        while start < stop:
            if not room:
                rows.append([])
                room = capacity
            taken = min(room, stop - start)
            rows[-1].append(Piece(document, start, start + taken))
            start, room = start + taken, room - taken
    document, start, stop = rows[-1][0] if rows[-1] else (0, 0, 0)
    if len(rows) > 1 and stop - start == 1 == len(rows[-1]) and capacity > 2:
        last = rows[-2].pop()
        if last.stop - last.start > 1:
            rows[-2].append(last._replace(stop=last.stop - 1))
        follows = (last.document, last.stop) == (document, start)
        moved = last._replace(start=last.stop - 1)
        rows[-1] = [moved._replace(stop=stop)] if follows else [moved, rows[-1][0]]
    flat = [piece for row in rows for piece in row]
    ends = iter(range(len(flat)))
    return _collect(flat, [[next(ends) for _ in row] for row in rows if row], capacity)


def pack_alone(pieces: Sequence[Piece], capacity: int) -> RowPieces:
    """One piece per row."""
    return _collect(pieces, [[at] for at in range(len(pieces))], capacity)


def shuffle_index(index: int, size: int, seed: int, epoch: int = 0) -> int:
    """Where `index` goes in the epoch's order: a permutation of range(size) that is computed and not stored.

    A Feistel network of six rounds over the next even power of two, repeated until the result is inside the range.
    """
    if size < 2:
        return index
    half = (size - 1).bit_length() + 1 >> 1
    mask = (1 << half) - 1
    keys = _make_keys(seed, epoch)
    while True:
        left, right = index >> half, index & mask
        for key in keys:
            mixed = (right ^ key) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
            mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ (mixed ^ mixed >> 29) & mask
        index = left << half | right
        if index < size:
            return index


class StreamPlace(NamedTuple):
    """One row of the endless stream of epochs."""

    epoch: int
    row: int


def locate_row(position: int, num_rows: int, seed: int) -> StreamPlace:
    """The row at a position of the stream. The position is the only state: any row of any epoch is computed at once."""
    epoch, index = divmod(position, num_rows)
    return StreamPlace(epoch, shuffle_index(index, num_rows, seed, epoch))


def share_rows(works: Sequence[float], num_groups: int, step: int = 0) -> list[list[int]]:
    """Deals the rows of one step to the data-parallel groups; returns [group][micro-step] -> row of the step.

    The groups wait for each other in every micro-step, so rows of one micro-step have similar work; the heaviest go
    first. The group that gets the heaviest row changes from step to step. If the rows do not divide evenly, the last
    micro-step has -1 for groups without a row.
    """
    order = sorted(range(len(works)), key=lambda at: (-works[at], at))
    order += [-1] * (-len(order) % num_groups)
    totals = [0.0] * num_groups
    shares: list[list[int]] = [[] for _ in range(num_groups)]
    for first in range(0, len(order), num_groups):
        lightest = sorted(range(num_groups), key=lambda group: (totals[group], (group - step) % num_groups))
        for row, group in zip(order[first : first + num_groups], lightest, strict=True):
            shares[group].append(row)
            totals[group] += works[row] if row >= 0 else 0.0
    return shares


def _make_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    digest += hashlib.sha256(digest).digest()
    return tuple(int.from_bytes(digest[at : at + 8], "big") for at in range(0, 48, 8))


def _collect(pieces: Sequence[Piece], rows: Sequence[Sequence[int]], capacity: int) -> RowPieces:
    documents = array("q")
    starts = array("q")
    stops = array("q")
    offsets = array("q", [0])
    for row in rows:
        for at in row:
            piece = pieces[at]
            documents.append(piece.document)
            starts.append(piece.start)
            stops.append(piece.stop)
        offsets.append(len(documents))
    return RowPieces(capacity, documents, starts, stops, offsets)
