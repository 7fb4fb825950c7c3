"""Writes and reads the token store of one source: token ids, target flags, document boundaries, places of origin.

Written by appending, read by memory map. Knows no tokenizer and no row.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulysses_cli.data.transaction import read_manifest
from ulysses_cli.plan.problem import Where

FORMAT = 7
TARGET, TURN = 1, 2  # flags of a token: the loss counts it; a turn begins at it, so a document may be cut before it
SAID, THOUGHT, CALL = 4, 8, 16  # the assistant says it; as a thought; as a call of a tool
WANTED = 32  # a target of an answer that its label wants
TURN_BITS = 8  # flags of a token have so many bits
Ids = NDArray[Any]
Flags = NDArray[np.uint8]


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


class StoreWriter:
    """Appends documents to the files of a store. flags.bin is written only if some document has flags."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self.folder = folder
        self.dtype = choose_dtype(vocabulary)
        self.num_tokens = self.num_targets = self.max_id = 0
        self._lengths, self._lines = array("q"), array("q")
        self._hashes, self._files = array("Q"), array("L")
        self._names: dict[str, int] = {}
        self._tokens = open(folder / "tokens.bin", "wb")  # noqa: SIM115 - closed by finish
        self._flags: Any = None

    def append(self, batch: Batch) -> None:
        if batch.flags is not None and self._flags is None:
            self._flags = open(self.folder / "flags.bin", "wb")  # noqa: SIM115 - closed by finish
            for at in range(0, self.num_tokens, 1 << 24):
                self._flags.write(bytes([TARGET]) * min(1 << 24, self.num_tokens - at))
        self._tokens.write(batch.ids.astype(self.dtype, copy=False).tobytes())
        if self._flags is not None:
            plain = np.full(len(batch.ids), TARGET, np.uint8)
            self._flags.write((plain if batch.flags is None else batch.flags).tobytes())
        targets = len(batch.ids) if batch.flags is None else int(np.count_nonzero(batch.flags & TARGET))
        self.num_targets += targets
        self.max_id = max(self.max_id, int(batch.ids.max(initial=0)))
        self.num_tokens += len(batch.ids)
        self._lengths.extend(batch.lengths)
        self._hashes.extend(batch.hashes)
        self._lines.extend(batch.lines)
        self._files.extend(self._names.setdefault(name, len(self._names)) for name in batch.files)

    def finish(self) -> dict[str, Any]:
        """Closes the files and returns the store's facts for its manifest."""
        self._tokens.close()
        if self._flags is not None:
            self._flags.close()
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


def count_shared(first: tuple[Ids, Flags], second: tuple[Ids, Flags]) -> int:
    """How many first tokens of two answers to one prompt one copy can serve: those that are the same, but for the
    token before the first target, which predicts another one in each."""
    shortest = min(len(first[0]), len(second[0]))
    is_same = first[0][:shortest] == second[0][:shortest]
    num_common = shortest if is_same.all() else int(np.argmin(is_same))
    targets = (np.flatnonzero(flags[1:] & TARGET) for _, flags in (first, second))
    return min(num_common, *(int(found[0]) for found in targets if len(found)))


class PairStore(TokenStore):
    """The same store with two documents that follow each other as one: two answers to one prompt. `shares_prompts`: the
    tokens that both begin with count once."""

    def __init__(self, folder: Path, *, shares_prompts: bool) -> None:
        super().__init__(folder)
        self.documents = TokenStore(folder)
        self.shares_prompts = shares_prompts
        self.offsets = self.offsets[::2]

    @cached_property
    def shared(self) -> NDArray[np.int64]:
        """Of each pair, how many tokens of the second document are those of the first."""
        shared = np.zeros(len(self), np.int64)
        for pair in range(len(self)) if self.shares_prompts and self.flags is not None else ():
            first, second = (
                self.documents.read(each, 0, int(self.documents.lengths[each])) for each in (2 * pair, 2 * pair + 1)
            )
            assert first[1] is not None
            assert second[1] is not None
            shared[pair] = count_shared((first[0], first[1]), (second[0], second[1]))
        return shared

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets) - self.shared

    def count_targets(self, document: int, start: int, stop: int) -> int:
        """Of both answers, whole: what both begin with holds no target."""
        pair = range(2 * document, 2 * document + 2)
        return sum(self.documents.count_targets(at, 0, int(self.documents.lengths[at])) for at in pair)

    @cached_property
    def hashes(self) -> NDArray[np.uint64]:
        return np.load(self.folder / "hashes.npy")[::2]

    def locate(self, document: int) -> Where:
        return super().locate(2 * document)
