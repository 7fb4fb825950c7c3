"""Reads rows of prepared data from disk, slice by slice: tokens, shifted labels, positions, document boundaries.
Refuses rows that are damaged or missing.

Knows no rank and no step: any process may read any part of any row, and only that part is read from disk.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ulysses_cli.data.steps import IGNORE_INDEX
from ulysses_cli.data.store import SAID, TARGET, TURN, TURN_BITS, Flags, Ids, TokenStore
from ulysses_cli.data.transaction import find_damage, read_manifest
from ulysses_cli.plan.rows.packing import Piece, RowPieces

Split = Literal["train", "eval"]

PARTS = ("documents", "starts", "stops", "offsets", "targets")


@dataclass(frozen=True)
class RowSlice:
    """Tokens [start, stop) of a row, int64 each. labels[i] is the token that position i must predict, or -100.
    `classes`, of that token in a chat: its flags in the store, and above TURN_BITS which turn of the assistant it is
    in, from 0; None where there are no flags."""

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    classes: NDArray[np.int64] | None = None


class PackedRows:
    """The rows of one split. Documents are numbered over all sources, in the recipe's order."""

    def __init__(self, folder: Path, split: Split) -> None:
        _check(folder)
        manifest = read_manifest(folder)
        self.capacity: int = manifest["max_length"]
        self.pad_id: int = manifest["pad_id"]
        self.is_joined: bool = manifest["attend_across_documents"]
        self.shares_prompts: bool = manifest.get("shares_prompts", False)
        folders = [folder.parents[1] / "tokens" / name for name in manifest["stores"]]
        for store in folders:
            _check(store)
        self.stores = [TokenStore(store) for store in folders]
        self._bases = [0]
        for store in self.stores:
            self._bases.append(self._bases[-1] + len(store))
        parts = (np.load(folder / f"{split}-{part}.npy", mmap_mode="r") for part in PARTS)
        self._documents, self._starts, self._stops, self._offsets, self._targets = parts

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def get_lengths(self, row: int) -> tuple[int, ...]:
        """The length of each document in the row, in order, without padding. One length when attention crosses
        documents."""
        lengths = self._measure(row)
        return (int(lengths.sum()),) if self.is_joined else tuple(lengths.tolist())

    def get_shared(self, row: int) -> tuple[int, ...]:
        """How many first tokens of each document stand in the row as those of another: in rows of pairs a rejected
        answer begins behind them."""
        starts = self._starts[slice(*self._bounds(row))]
        if not self.shares_prompts:
            return (0,) * (1 if self.is_joined else len(starts))
        return tuple(starts.tolist())

    def count_tokens(self, row: int) -> int:
        return int(self._measure(row).sum())

    def count_targets(self, row: int) -> int:
        """Positions with a label."""
        return int(self._targets[row])

    def pieces(self, row: int) -> list[Piece]:
        """The parts of documents that make up the row, in order."""
        at = slice(*self._bounds(row))
        return [
            Piece(*map(int, piece))
            for piece in zip(self._documents[at], self._starts[at], self._stops[at], strict=True)
        ]

    def list_pieces(self, source: int, limit: int) -> list[Piece]:
        """The first `limit` pieces of one source, in the order of the rows."""
        documents = np.asarray(self._documents)
        places = np.flatnonzero((documents >= self._bases[source]) & (documents < self._bases[source + 1]))[:limit]
        return [Piece(*(int(part[at]) for part in (self._documents, self._starts, self._stops))) for at in places]

    def walk_documents(self) -> Iterator[tuple[Ids, Flags | None]]:
        """The tokens and flags of each document in the rows, up to where it is cut."""
        for row in range(len(self)):
            for piece in self.pieces(row):
                if not piece.start:
                    store, document = self.find_document(piece.document)
                    yield store.read(document, 0, piece.stop)

    def find_document(self, document: int) -> tuple[TokenStore, int]:
        """A document's store, and its number in that store."""
        index = bisect_right(self._bases, document) - 1
        return self.stores[index], document - self._bases[index]

    def read(self, row: int, start: int, stop: int) -> RowSlice:
        """Tokens [start, stop) of the row. Padding follows the row's tokens, with positions that start at 0 again."""
        size = stop - start
        first_piece, end_piece = self._bounds(row)
        ends = np.cumsum(self._measure(row))
        num_tokens = int(ends[-1])
        ids = np.full(size, self.pad_id, np.int64)
        labels = np.full(size, IGNORE_INDEX, np.int64)
        positions = np.arange(start, stop, dtype=np.int64)
        positions[max(0, num_tokens - start) :] -= num_tokens
        classes = np.zeros(size, np.int64) if any(store.flags is not None for store in self.stores) else None
        for at in range(int(np.searchsorted(ends, start, "right")), end_piece - first_piece):
            end = int(ends[at])
            begin = end - int(self._stops[first_piece + at] - self._starts[first_piece + at])
            if begin >= stop:
                break
            first, last = max(start, begin), min(stop, end)
            here = slice(first - start, last - start)
            tokens, targets = self._read_piece(first_piece + at, first - begin, last + 1 - begin)
            ids[here] = tokens[: last - first]
            labels[first - start : first - start + len(targets) - 1] = targets[1:]
            if classes is not None:
                found = self._classify(first_piece + at, first - begin, last + 1 - begin)[1:]
                classes[first - start : first - start + len(found)] = found
            if self.is_joined and last == end < num_tokens:
                labels[here.stop - 1] = self._read_piece(first_piece + at + 1, 0, 1)[1][0]
            if not self.is_joined:
                positions[here] -= begin - int(self._starts[first_piece + at]) * self.shares_prompts
        return RowSlice(ids, labels, positions, classes)

    def _read_piece(self, index: int, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens [start, stop) of a piece, or fewer at its end, and the same tokens with -100 where one is no target.
        The caller shifts them into labels."""
        store, document = self.find_document(int(self._documents[index]))
        begin, end = int(self._starts[index]), int(self._stops[index])
        ids, flags = store.read(document, begin + start, min(begin + stop, end))
        tokens = ids.astype(np.int64)
        targets = tokens if flags is None else np.where(flags & TARGET, tokens, IGNORE_INDEX)
        return tokens, targets

    def _classify(self, index: int, start: int, stop: int) -> NDArray[np.int64]:
        """Flags and turns of tokens [start, stop) of a piece. A turn begins where the assistant begins to say
        something, counted from the document's begin."""
        store, document = self.find_document(int(self._documents[index]))
        begin, end = int(self._starts[index]), int(self._stops[index])
        _, flags = store.read(document, 0, min(begin + stop, end))
        if flags is None:
            return np.zeros(0, np.int64)
        is_said = (flags & SAID) > 0
        begins = np.diff(is_said, prepend=False) | ((flags & TURN) > 0)  # of two turns with nothing between them, too
        turns = np.cumsum(begins & is_said) - 1
        codes: NDArray[np.int64] = flags.astype(np.int64) | np.maximum(turns, 0) << TURN_BITS
        return codes[begin + start :]

    def _bounds(self, row: int) -> tuple[int, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return int(self._offsets[row]), int(self._offsets[row + 1])

    def _measure(self, row: int) -> NDArray[np.int64]:
        at = slice(*self._bounds(row))
        return np.asarray(self._stops[at] - self._starts[at])


def _check(folder: Path) -> None:
    damage = find_damage(folder)
    if damage:
        raise ValueError(f"{damage}; run `ulysses prepare` again")


def hash_content(prepared: Path) -> str:
    """Of rows and tokens, from the hashes that were taken when they were made. Machines that each prepared the data
    compare it."""
    rows = read_manifest(prepared)
    stores = [read_manifest(prepared.parents[1] / "tokens" / name) for name in rows["stores"]]
    content = [each.get("sha256") for each in (rows, *stores)]  # None where an earlier version made them
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def open_rows(prepared: Path, split: Split) -> PackedRows:
    """Opens one split of a folder that prepare_data made."""
    return PackedRows(Path(prepared), split)


def save_rows(folder: Path, split: Split, rows: RowPieces, targets: Any) -> None:
    """Writes the files that PackedRows maps. `targets` holds the number of positions with a label in each row."""
    arrays = (rows.documents, rows.starts, rows.stops, rows.offsets, targets)
    for part, values in zip(PARTS, arrays, strict=True):
        np.save(folder / f"{split}-{part}.npy", np.asarray(values, np.int64))
