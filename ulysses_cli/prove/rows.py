"""Made-up documents: for proofs written as a file of tokens, which the real `prepare` packs; for timing as full rows.

What a row must hold is cut from the documents once more here, so that a proof has something to compare rows with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulysses_cli.data.rows import PackedRows
from ulysses_cli.data.steps import IGNORE_INDEX

Numbers = NDArray[np.int64]
Labelled = tuple[Numbers, Numbers]  # tokens, and what each position is to predict


@dataclass(frozen=True, eq=False)
class Document:
    """Tokens, and which of them are to be learned."""

    tokens: Numbers
    is_target: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Part:
    """Some tokens of a row."""

    input_ids: Numbers
    labels: Numbers
    positions: Numbers


def make_documents(
    row_tokens: int, num_rows: int, vocabulary: int, seed: int, *, is_packed: bool, has_long: bool
) -> list[Document]:
    """Enough for `num_rows` rows: some as long as a row, some short, some with few targets, one longer than a row."""
    lengths = [row_tokens * 3 // 2] if has_long else []
    for number in range(num_rows):
        if not is_packed or number % 3 == 1:
            lengths.append(row_tokens - number % 2 * 3)
        else:
            first, second = row_tokens * 5 // 8 + number % 5, row_tokens // 8 - 1
            lengths += [first, second, 2, max(2, row_tokens - first - second - 2 - number % 4)]
    generator = np.random.default_rng(seed)
    made = []
    for number, length in enumerate(lengths):
        is_target = np.ones(length, np.bool_)
        if number % 3 == 2:
            is_target[: length * 3 // 4] = False  # a prompt: only what follows is learned
        made.append(Document(generator.integers(0, vocabulary, length), is_target))
    return made


def write_documents(file: Path, documents: Sequence[Document]) -> None:
    """One JSON object a line, as `prepare` reads it: labels stand beside their own tokens."""
    with open(file, "w", encoding="utf-8") as stream:
        for document in documents:
            labels = np.where(document.is_target, document.tokens, IGNORE_INDEX)
            stream.write(json.dumps({"input_ids": document.tokens.tolist(), "labels": labels.tolist()}) + "\n")


def cut_row(rows: PackedRows, row: int, documents: Sequence[Document]) -> list[Labelled]:
    """What stands in a row, from the documents themselves: the packer says which parts, the rest is done again."""
    parts = [
        (documents[at].tokens[start:stop], documents[at].is_target[start:stop]) for at, start, stop in rows.pieces(row)
    ]
    if rows.is_joined:
        tokens, flags = zip(*parts, strict=True)
        parts = [(np.concatenate(tokens), np.concatenate(flags))]
    found = []
    for own, is_target in parts:
        labels = np.full(len(own), IGNORE_INDEX)
        labels[:-1] = np.where(is_target[1:], own[1:], IGNORE_INDEX)
        found.append((own, labels))
    return found


class ChangedRows:
    """Rows of which one has other tokens at [start, stop); what positions are to predict stays."""

    def __init__(self, rows: PackedRows, row: int, start: int, stop: int, vocabulary: int) -> None:
        self.rows, self.row, self.start, self.stop, self.vocabulary = rows, row, start, stop, vocabulary

    def __len__(self) -> int:
        return len(self.rows)

    def get_lengths(self, row: int) -> tuple[int, ...]:
        return self.rows.get_lengths(row)

    def count_targets(self, row: int) -> int:
        return self.rows.count_targets(row)

    def read(self, row: int, start: int, stop: int) -> Any:
        found = self.rows.read(row, start, stop)
        if row != self.row:
            return found
        at = np.arange(start, stop)
        is_hit = (at >= self.start) & (at < self.stop)
        other = (found.input_ids + 1 + self.vocabulary // 2) % self.vocabulary
        return Part(np.where(is_hit, other, found.input_ids), found.labels, found.positions)


class FullRows:
    """Rows of one document each, as long as they may be: the most work that a length can mean."""

    def __init__(self, row_tokens: int, vocabulary: int, seed: int = 5) -> None:
        self.tokens = np.random.default_rng(seed).integers(0, vocabulary, row_tokens)

    def __len__(self) -> int:
        return 1

    def get_lengths(self, row: int) -> tuple[int, ...]:
        return (len(self.tokens),)

    def count_targets(self, row: int) -> int:
        return len(self.tokens) - 1

    def read(self, row: int, start: int, stop: int) -> Any:
        """Behind the row's own tokens stands padding, a document of its own."""
        at = np.arange(start, stop)
        is_inside, has_next = at < len(self.tokens), at + 1 < len(self.tokens)
        own = self.tokens[np.minimum(at, len(self.tokens) - 1)]
        following = self.tokens[np.minimum(at + 1, len(self.tokens) - 1)]
        return Part(
            np.where(is_inside, own, 0),
            np.where(has_next, following, IGNORE_INDEX),
            np.where(is_inside, at, at - len(self.tokens)),
        )
