"""Synthetic documents for `verify` and `bench`. For proofs they are written to a file of tokens, which `prepare` packs;
for timing they are rows.

`cut_row` computes what a row must hold from the documents alone, so that a proof can compare it with the packed row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulysses_cli.data.store import PackedRows
from ulysses_cli.plan.rows.packing import IGNORE_INDEX

Numbers = NDArray[np.int64]
Labelled = tuple[Numbers, Numbers]  # tokens, and the label of each position


@dataclass(frozen=True, eq=False)
class Document:
    """Tokens, and which of them are targets of the loss."""

    tokens: Numbers
    is_target: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Part:
    """A slice of a row."""

    input_ids: Numbers
    labels: Numbers
    positions: Numbers
    classes: Numbers | None = None


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
    documents = []
    for number, length in enumerate(lengths):
        is_target = np.ones(length, np.bool_)
        if number % 3 == 2:
            is_target[: length * 3 // 4] = False  # a prompt: only the tokens after it are targets
        documents.append(Document(generator.integers(0, vocabulary, length), is_target))
    return documents


def write_documents(file: Path, documents: Sequence[Document]) -> None:
    """One JSON object per line, as `prepare` reads it: each label is at the position of its own token."""
    with open(file, "w", encoding="utf-8") as stream:
        for document in documents:
            labels = np.where(document.is_target, document.tokens, IGNORE_INDEX)
            stream.write(json.dumps({"input_ids": document.tokens.tolist(), "labels": labels.tolist()}) + "\n")


def cut_row(rows: PackedRows, row: int, documents: Sequence[Document]) -> list[Labelled]:
    """The content of a row, computed from the documents. Of the packer only its choice of pieces is used."""
    parts = [
        (documents[index].tokens[start:stop], documents[index].is_target[start:stop])
        for index, start, stop in rows.pieces(row)
    ]
    if rows.is_joined:
        pieces, flags = zip(*parts, strict=True)
        parts = [(np.concatenate(pieces), np.concatenate(flags))]
    labelled = []
    for tokens, is_target in parts:
        labels = np.full(len(tokens), IGNORE_INDEX)
        labels[:-1] = np.where(is_target[1:], tokens[1:], IGNORE_INDEX)
        labelled.append((tokens, labels))
    return labelled


class ChangedRows:
    """The same rows, but one has other tokens at [start, stop). All labels are unchanged."""

    def __init__(self, rows: PackedRows, row: int, start: int, stop: int, vocabulary: int) -> None:
        self.rows = rows
        self.row = row
        self.start = start
        self.stop = stop
        self.vocabulary = vocabulary

    def __len__(self) -> int:
        return len(self.rows)

    def get_lengths(self, row: int) -> tuple[int, ...]:
        return self.rows.get_lengths(row)

    def count_targets(self, row: int) -> int:
        return self.rows.count_targets(row)

    def read(self, row: int, start: int, stop: int) -> Any:
        part = self.rows.read(row, start, stop)
        if row != self.row:
            return part
        index = np.arange(start, stop)
        is_changed = (index >= self.start) & (index < self.stop)
        other = (part.input_ids + 1 + self.vocabulary // 2) % self.vocabulary
        return Part(np.where(is_changed, other, part.input_ids), part.labels, part.positions)


class FullRows:
    """Rows of one document each, as long as the row: the most attention work that a length can have."""

    def __init__(self, row_tokens: int, vocabulary: int, seed: int = 5) -> None:
        self.tokens = np.random.default_rng(seed).integers(0, vocabulary, row_tokens)

    def __len__(self) -> int:
        return 1

    def get_lengths(self, row: int) -> tuple[int, ...]:
        return (len(self.tokens),)

    def count_targets(self, row: int) -> int:
        return len(self.tokens) - 1

    def read(self, row: int, start: int, stop: int) -> Any:
        """Padding follows the row's tokens, as a document of its own."""
        index = np.arange(start, stop)
        is_inside, has_next = index < len(self.tokens), index + 1 < len(self.tokens)
        own = self.tokens[np.minimum(index, len(self.tokens) - 1)]
        following = self.tokens[np.minimum(index + 1, len(self.tokens) - 1)]
        return Part(
            np.where(is_inside, own, 0),
            np.where(has_next, following, IGNORE_INDEX),
            np.where(is_inside, index, index - len(self.tokens)),
        )
