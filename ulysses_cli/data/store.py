"""Token stores and rows on disk. A store holds one source: token ids, target flags, document boundaries, places of
origin. Rows are read from stores slice by slice: tokens, shifted labels, positions, document boundaries.

Stores are written by appending and read by memory map. Damaged or missing rows are refused. Knows no tokenizer, no
rank and no step: any process may read any part of any row, and only that part is read from disk."""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ulysses_cli.data.transaction import find_damage, read_manifest
from ulysses_cli.plan.problem import Where
from ulysses_cli.plan.rows.packing import IGNORE_INDEX, Piece, RowPieces
from ulysses_cli.plan.rows.ring import MAX_BRANCHES, count_most_shared

FORMAT = 9
TARGET, TURN = 1, 2  # flags of a token: the loss counts it; a turn begins at it, so a document may be cut before it
SAID, THOUGHT, CALL = 4, 8, 16  # the assistant says it; as a thought; as a call of a tool
WANTED = 32  # a target of an answer that its label wants
TURN_BITS = 8  # flags of a token have so many bits
Ids = NDArray[Any]
Flags = NDArray[np.uint8]
Weights = NDArray[np.float32]


def choose_dtype(vocabulary: int) -> np.dtype[Any]:
    """The smallest unsigned integer that holds every id."""
    return next(np.dtype(t) for t in (np.uint8, np.uint16, np.uint32) if vocabulary - 1 <= np.iinfo(t).max)


def hash_document(ids: Ids) -> int:
    """A 64-bit hash of a document's tokens, without its loss mask. Equal documents have equal hashes, so a split keeps
    them together."""
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")


@dataclass
class Batch:
    """Documents to be appended to a store. `flags` is None when every token is a target."""

    ids: Ids
    lengths: Sequence[int]
    hashes: Sequence[int]
    files: Sequence[str]
    lines: Sequence[int]
    flags: Flags | None = None
    weights: Weights | None = None  # of each token as a target; None: 1


class StoreWriter:
    """Appends documents to the files of a store. flags.bin is written only if some document has flags, weights.bin only
    if one has weights."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self.folder = folder
        self.dtype = choose_dtype(vocabulary)
        self.num_tokens = self.num_targets = self.max_id = 0
        self.target_weight = 0.0
        self._lengths, self._lines = array("q"), array("q")
        self._hashes, self._files = array("Q"), array("L")
        self._names: dict[str, int] = {}
        self._tokens = open(folder / "tokens.bin", "wb")  # noqa: SIM115 - closed by finish
        self._flags: Any = None
        self._weights: Any = None

    def append(self, batch: Batch) -> None:
        plain = np.full(len(batch.ids), TARGET, np.uint8), np.ones(len(batch.ids), np.float32)
        self._flags = self._write_values(self._flags, "flags.bin", batch.flags, plain[0])
        self._weights = self._write_values(self._weights, "weights.bin", batch.weights, plain[1])
        self._tokens.write(batch.ids.astype(self.dtype, copy=False).tobytes())
        is_target = (plain[0] if batch.flags is None else batch.flags & TARGET) > 0
        self.num_targets += int(np.count_nonzero(is_target))
        given = plain[1] if batch.weights is None else batch.weights
        self.target_weight += float(given.sum(dtype=np.float64, where=is_target))
        self.max_id = max(self.max_id, int(batch.ids.max(initial=0)))
        self.num_tokens += len(batch.ids)
        self._lengths.extend(batch.lengths)
        self._hashes.extend(batch.hashes)
        self._lines.extend(batch.lines)
        self._files.extend(self._names.setdefault(name, len(self._names)) for name in batch.files)

    def _write_values(self, file: Any, name: str, values: NDArray[Any] | None, plain: NDArray[Any]) -> Any:
        """Appends a value for each token of a batch to a file, which is opened when the first batch has values."""
        if values is not None and file is None:
            file = open(self.folder / name, "wb")  # noqa: SIM115 - closed by finish
            for at in range(0, self.num_tokens, 1 << 24):
                file.write(values.dtype.type(1).tobytes() * min(1 << 24, self.num_tokens - at))
        if file is not None:
            file.write((plain if values is None else values).tobytes())
        return file

    def finish(self) -> dict[str, Any]:
        """Closes the files and returns the store's facts for its manifest."""
        for file in (self._tokens, self._flags, self._weights):
            if file is not None:
                file.close()
        offsets = np.zeros(len(self._lengths) + 1, np.int64)
        np.cumsum(np.asarray(self._lengths, np.int64), out=offsets[1:])
        np.save(self.folder / "offsets.npy", offsets)
        np.save(self.folder / "hashes.npy", np.asarray(self._hashes, np.uint64))
        np.save(self.folder / "files.npy", np.asarray(self._files, np.uint32))
        np.save(self.folder / "lines.npy", np.asarray(self._lines, np.int64))
        return {
            "format": FORMAT,
            "dtype": self.dtype.name,
            "num_documents": len(self._lengths),
            "num_tokens": self.num_tokens,
            "num_targets": self.num_targets,
            "target_weight": None if self._weights is None else self.target_weight,
            "max_id": self.max_id,
            "files": list(self._names),
        }


class TokenStore:
    """The documents of one source, memory-mapped, so that every rank can open them at little cost."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.num_tokens: int = self.manifest["num_tokens"]
        self.offsets: NDArray[np.int64] = np.load(folder / "offsets.npy", mmap_mode="r")
        dtype = np.dtype(self.manifest["dtype"])
        empty = self.num_tokens == 0
        self.tokens: Ids = np.empty(0, dtype) if empty else np.memmap(folder / "tokens.bin", dtype, "r")
        has_flags = not empty and (folder / "flags.bin").exists()
        self.flags: Flags | None = np.memmap(folder / "flags.bin", np.uint8, "r") if has_flags else None
        has_weights = not empty and (folder / "weights.bin").exists()
        self.weights: Weights | None = np.memmap(folder / "weights.bin", np.float32, "r") if has_weights else None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @cached_property
    def hashes(self) -> NDArray[np.uint64]:
        hashes: NDArray[np.uint64] = np.load(self.folder / "hashes.npy")
        return hashes

    def read(self, document: int, start: int, stop: int) -> tuple[Ids, Flags | None]:
        """Tokens [start, stop) of a document and their flags, as views of the files. Flags None: all are targets."""
        first = int(self.offsets[document])
        at = slice(first + start, first + stop)
        return self.tokens[at], None if self.flags is None else self.flags[at]

    def count_targets(self, document: int, start: int, stop: int) -> int:
        """The number of targets in [start, stop), without its first token, which no token of the part predicts."""
        if self.flags is None or stop - start < 2:
            return max(0, stop - start - 1)
        first = int(self.offsets[document])
        return int(np.count_nonzero(self.flags[first + start + 1 : first + stop] & TARGET))

    def weigh_targets(self, document: int, start: int, stop: int) -> float:
        """The sum of the weights of targets in [start, stop)."""
        first = int(self.offsets[document])
        at = slice(first + start, first + stop)
        is_target = np.ones(max(0, stop - start), bool) if self.flags is None else (self.flags[at] & TARGET) > 0
        if self.weights is None:
            return float(np.count_nonzero(is_target))
        return float(self.weights[at].sum(dtype=np.float64, where=is_target))

    def find_turns(self, document: int) -> list[int]:
        """The tokens that begin a turn: a cut before one of them splits no turn."""
        if self.flags is None:
            return []
        part = self.flags[int(self.offsets[document]) : int(self.offsets[document + 1])]
        return [int(at) for at in np.flatnonzero(part & TURN)]

    @cached_property
    def lines(self) -> NDArray[np.int64]:
        """The line or row that each document came from."""
        lines: NDArray[np.int64] = np.load(self.folder / "lines.npy", mmap_mode="r")
        return lines

    def locate(self, document: int) -> Where:
        """The file and line, or row, that a document came from."""
        name = self.manifest["files"][int(np.load(self.folder / "files.npy", mmap_mode="r")[document])]
        line = int(self.lines[document])
        if not line:
            return Where(name)
        return Where(name, line, 1) if self.manifest.get("has_lines", True) else Where(f"{name}, row {line}")


def count_shared(stem: tuple[Ids, Flags], branch: tuple[Ids, Flags]) -> int:
    """How many first tokens of a document one copy of another can serve: those that are the same, but for the token
    before the branch's first target, which predicts another one in each."""
    shortest = min(len(stem[0]), len(branch[0]))
    is_same = stem[0][:shortest] == branch[0][:shortest]
    num_common = shortest if is_same.all() else int(np.argmin(is_same))
    targets = np.flatnonzero(branch[1][1:] & TARGET)
    return min(num_common, int(targets[0]) if len(targets) else len(branch[0]) - 1)


def join_branches(
    lengths: Sequence[int], count: Callable[[int, int], int], capacity: int
) -> tuple[list[int], list[int]]:
    """Joins documents, from the last one back, to units: the last of each is the stem, with which others share what
    they begin with, as long as a row holds them and as plans count the copies of keys that they need.
    `count(stem, document)` is how many tokens these share. Returns the first document of each unit with the number of
    documents, and what each shares."""
    firsts, all_shared = [len(lengths)], [0] * len(lengths)
    stem, size, shared = len(lengths), 0, 0
    for document in range(len(lengths) - 1, -1, -1):
        own = count(stem, document) if stem < len(lengths) else 0
        whole = size + lengths[document] - own
        if own and whole <= capacity and shared + own <= count_most_shared(whole, MAX_BRANCHES):
            all_shared[document], size, shared = own, whole, shared + own
        else:
            firsts += [document + 1] if stem < len(lengths) else []
            stem, size, shared = document, lengths[document], 0
    return [*([0] if lengths else []), *firsts[::-1]], all_shared


class UnitStore(TokenStore):
    """The same store with documents that stand in one row as one: both answers of a pair, or the texts of a split chat.
    `shares_prompts`: what others of a unit begin with as its stem does counts once. The stem of a pair is its first
    document, that of others is the last."""

    def __init__(self, folder: Path, capacity: int, *, shares_prompts: bool) -> None:
        super().__init__(folder)
        self.documents = TokenStore(folder)
        self.shares_prompts = shares_prompts
        self.is_paired = self.manifest.get("kind") in ("preference", "unpaired")
        self.shared = np.zeros(len(self.documents), np.int64)  # of each document, with its stem
        self.firsts = np.arange(0, len(self.documents) + 1, 2 if self.is_paired else 1)
        if shares_prompts and self.flags is not None:
            if self.is_paired:
                self.shared[1::2] = [self._count_pair(first) for first in self.firsts[:-1].tolist()]
            else:
                self.firsts = np.asarray(self._join_chats(capacity), np.int64)
        self.offsets = self.offsets[self.firsts]

    def list_members(self, unit: int) -> range:
        """Its documents, the stem first."""
        members = range(int(self.firsts[unit]), int(self.firsts[unit + 1]))
        return members if self.is_paired else members[::-1]

    def _read_whole(self, document: int) -> tuple[Ids, Flags]:
        ids, flags = self.documents.read(document, 0, int(self.documents.lengths[document]))
        assert flags is not None
        return ids, flags

    def _count_pair(self, first: int) -> int:
        pair = self._read_whole(first), self._read_whole(first + 1)
        return min(count_shared(*pair), count_shared(*pair[::-1]))

    def _join_chats(self, capacity: int) -> list[int]:
        files, lines = np.load(self.folder / "files.npy", mmap_mode="r"), self.documents.lines
        is_next = (files[1:] == files[:-1]) & (lines[1:] == lines[:-1]) & (lines[1:] > 0)

        def count(stem: int, document: int) -> int:
            return count_shared(self._read_whole(stem), self._read_whole(document)) if is_next[document] else 0

        firsts, self.shared[:] = join_branches(self.documents.lengths.tolist(), count, capacity)
        return firsts

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        ends = np.concatenate([[0], np.cumsum(self.documents.lengths - self.shared)])
        return np.diff(ends[self.firsts])

    def count_targets(self, document: int, start: int, stop: int) -> int:
        """Of all documents of a unit, whole: what others begin with as the stem does holds none of their targets."""
        members = self.list_members(document)
        if len(members) == 1:
            return self.documents.count_targets(members[0], start, stop)
        return sum(self.documents.count_targets(at, 0, int(self.documents.lengths[at])) for at in members)

    @cached_property
    def hashes(self) -> NDArray[np.uint64]:
        hashes: NDArray[np.uint64] = self.documents.hashes[self.firsts[:-1]]
        return hashes

    def locate(self, document: int) -> Where:
        return super().locate(int(self.firsts[document]))


Split = Literal["train", "eval"]

PARTS = ("documents", "starts", "stops", "offsets", "shared", "targets")


@dataclass(frozen=True)
class RowSlice:
    """Tokens [start, stop) of a row, int64 each. labels[i] is the token that position i must predict, or -100.
    `classes`, of that token in a chat: its flags in the store, and above TURN_BITS which turn of the assistant it is
    in, from 0; None where there are no flags. `weights`: how often that token counts in the loss; None: once."""

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    classes: NDArray[np.int64] | None = None
    weights: Weights | None = None


class PackedRows:
    """The rows of one split. Documents are numbered over all sources, in the recipe's order."""

    def __init__(self, folder: Path, split: Split) -> None:
        _check(folder)
        manifest = read_manifest(folder)
        self.max_length: int = manifest["max_length"]
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
        self._documents, self._starts, self._stops, self._offsets, self._shared, self._targets = parts
        self.has_weights = any(store.weights is not None for store in self.stores)
        self._weights = np.load(folder / f"{split}-weights.npy", mmap_mode="r") if self.has_weights else None

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def get_lengths(self, row: int) -> tuple[int, ...]:
        """The length of each document in the row, in order, without padding. One length when attention crosses
        documents."""
        lengths = self._measure(row)
        return (int(lengths.sum()),) if self.is_joined else tuple(lengths.tolist())

    def get_shared(self, row: int) -> tuple[int, ...]:
        """How many first tokens of each document stand in the row as those of another: a rejected answer begins behind
        them, and so does a text of a split chat."""
        return (0,) if self.is_joined else tuple(self._shared[slice(*self._bounds(row))].tolist())

    def count_tokens(self, row: int) -> int:
        return int(self._measure(row).sum())

    def count_targets(self, row: int) -> int:
        """Positions with a label."""
        return int(self._targets[row])

    def weigh_targets(self, row: int) -> float | None:
        """The sum of their weights; None where rows have none."""
        return None if self._weights is None else float(self._weights[row])

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
            for piece, shared in zip(self.pieces(row), self._shared[slice(*self._bounds(row))].tolist(), strict=True):
                if piece.start == shared:
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
        weights = np.ones(size, np.float32) if self.has_weights else None
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
            if weights is not None:
                given = self._read_weights(first_piece + at, first - begin, last + 1 - begin)[1:]
                weights[first - start : first - start + len(given)] = given
            if self.is_joined and last == end < num_tokens:
                labels[here.stop - 1] = self._read_piece(first_piece + at + 1, 0, 1)[1][0]
                if weights is not None:
                    weights[here.stop - 1] = self._read_weights(first_piece + at + 1, 0, 1)[0]
            if not self.is_joined:
                positions[here] -= begin - int(self._shared[first_piece + at])
        return RowSlice(ids, labels, positions, classes, weights)

    def _read_piece(self, index: int, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens [start, stop) of a piece, or fewer at its end, and the same tokens with -100 where one is no target.
        The caller shifts them into labels."""
        store, document = self.find_document(int(self._documents[index]))
        begin, end = int(self._starts[index]), int(self._stops[index])
        ids, flags = store.read(document, begin + start, min(begin + stop, end))
        tokens = ids.astype(np.int64)
        targets = tokens if flags is None else np.where(flags & TARGET, tokens, IGNORE_INDEX)
        return tokens, targets

    def _read_weights(self, index: int, start: int, stop: int) -> Weights:
        store, document = self.find_document(int(self._documents[index]))
        first = int(store.offsets[document]) + int(self._starts[index])
        stop = min(stop, int(self._stops[index]) - int(self._starts[index]))
        found = store.weights
        return np.ones(stop - start, np.float32) if found is None else np.asarray(found[first + start : first + stop])

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


def save_rows(folder: Path, split: Split, rows: RowPieces, shared: Any, targets: Any, weights: Any = None) -> None:
    """Writes the files that PackedRows maps. `shared`: of each piece, how many tokens before it are those of another;
    `targets` holds the number of positions with a label in each row, `weights` the sum of their weights, where some
    store has weights."""
    arrays = (rows.documents, rows.starts, rows.stops, rows.offsets, shared, targets)
    for part, values in zip(PARTS, arrays, strict=True):
        np.save(folder / f"{split}-{part}.npy", np.asarray(values, np.int64))
    if weights is not None:
        np.save(folder / f"{split}-weights.npy", np.asarray(weights, np.float64))
