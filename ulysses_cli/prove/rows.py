"""Synthetic documents for `verify` and `bench`. For proofs they are written to a file of tokens, which `prepare` packs;
for timing they are rows.

`cut_row` computes what a row must hold from the documents alone, so that a proof can compare it with the packed row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulysses_cli.data.steps import Rows
from ulysses_cli.data.store import PackedRows
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import count_branches
from ulysses_cli.plan.rows.packing import IGNORE_INDEX
from ulysses_cli.plan.rows.ring import ANSWER_SHARE, list_dearest

Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Document:
    """Tokens, and which of them are targets of the loss. `is_wanted`: of an answer that has a label."""

    tokens: Numbers
    is_target: NDArray[np.bool_]
    is_wanted: bool = False

    def shift(self) -> Numbers:
        """The label of each position."""
        labels = np.full(len(self.tokens), IGNORE_INDEX)
        labels[:-1] = np.where(self.is_target[1:], self.tokens[1:], IGNORE_INDEX)
        return labels


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


def describe_document(document: Document) -> dict[str, Any]:
    """A row as `prepare` reads it: each label is at the position of its own token."""
    labels = np.where(document.is_target, document.tokens, IGNORE_INDEX)
    return {"input_ids": document.tokens.tolist(), "labels": labels.tolist()}


def make_judged(row_tokens: int, num_rows: int, seed: int, *, has_partners: bool) -> list[dict[str, Any]]:
    """Rows of two answers to a prompt, each so long that no two share a row of tokens even with one copy of the prompt,
    with one between them that fits beside it; or of one answer with a label."""
    generator = np.random.default_rng(seed)

    def write(letters: str, size: int) -> str:
        return "".join(generator.choice([*letters], size))

    rows: list[dict[str, Any]] = []
    long = (row_tokens // 4, row_tokens // 7, row_tokens // 6)
    for sizes in [long, (2, 1, 1)] * num_rows if has_partners else [long] * num_rows:
        prompt, first, second = map(write, ("abcdefgh", "ijklmnop", "qrstuvwx"), sizes)
        rows.append({"prompt": prompt, "chosen": first, "rejected": second})
        if not has_partners:
            rows[-1] = {"prompt": prompt, "completion": first, "label": len(rows) % 3 > 0}
    return rows


def list_answers(rows: Sequence[Mapping[str, Any]], end: int) -> list[Document]:
    """The two documents of each row, from its letters; `end` is the token that ends an answer. One answer is followed
    by the same prompt with the answer of the row before."""
    documents = []
    for number, row in enumerate(rows):
        answers = row.get("chosen"), row.get("rejected")
        if "completion" in row:
            answers = row["completion"], rows[number - 1]["completion"]
        for answer in answers:
            tokens = np.array([*f"{row['prompt']}{answer}".encode(), end])
            is_target = np.arange(len(tokens)) >= len(row["prompt"])
            documents.append(Document(tokens, is_target, is_wanted=bool(row.get("label"))))
    return documents


def cut_row(rows: PackedRows, row: int, documents: Sequence[Document]) -> list[Document]:
    """The documents of a row, computed from those of the source. Of the packer only its choice of pieces is used. What
    another document's tokens stand for is there again."""
    parts = []
    for at, (index, start, stop) in enumerate(rows.pieces(row)):
        own, shared = documents[index], 0 if rows.is_joined else rows.get_shared(row)[at]
        kept = slice(start - shared, stop)
        parts.append(replace(own, tokens=own.tokens[kept], is_target=own.is_target[kept]))
    if not rows.is_joined:
        return parts
    tokens, flags = zip(*((part.tokens, part.is_target) for part in parts), strict=True)
    return [Document(np.concatenate(tokens), np.concatenate(flags))]


class ChangedRows:
    """The same rows, but one has other tokens at [start, stop). All labels are unchanged."""

    def __init__(self, rows: Rows, row: int, start: int, stop: int, vocabulary: int) -> None:
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

    def __getattr__(self, name: str) -> Any:
        """What rows may have beside."""
        return getattr(self.rows, name)

    def read(self, row: int, start: int, stop: int) -> Any:
        part = self.rows.read(row, start, stop)
        if row != self.row:
            return part
        index = np.arange(start, stop)
        is_changed = (index >= self.start) & (index < self.stop)
        other = (part.input_ids + 1 + self.vocabulary // 2) % self.vocabulary
        return Part(np.where(is_changed, other, part.input_ids), part.labels, part.positions)


class FullRows:
    """Rows as dear as their length can make them: one document that fills the row; of pairs a prompt that nearly does,
    with short answers that read one copy of it, or each its own. `num_targets`: of each document, at its end."""

    def __init__(self, recipe: Recipe, shape: ModelShape) -> None:
        num_tokens = self.num_targets = recipe.data.max_length
        self.lengths: tuple[int, ...] = (num_tokens,)
        self.shared: tuple[int, ...] = (0,)
        if recipe.preference is not None:
            self.lengths, self.shared = list_dearest(num_tokens, 1, count_branches(recipe, shape))
            if len(self.lengths) == 1:
                self.lengths, self.shared = (num_tokens - num_tokens // 2, num_tokens // 2), (0, 0)
            self.num_targets = max(1, num_tokens // ANSWER_SHARE)
        self.tokens = np.random.default_rng(5).integers(0, shape.vocab_size, num_tokens)

    def __len__(self) -> int:
        return 1

    def get_lengths(self, row: int) -> tuple[int, ...]:
        return self.lengths

    def get_shared(self, row: int) -> tuple[int, ...]:
        return self.shared

    def count_targets(self, row: int) -> int:
        return sum(min(length - 1, self.num_targets) for length in self.lengths)

    def read(self, row: int, start: int, stop: int) -> Any:
        """Padding follows the row's tokens, as a document of its own."""
        index, ends = np.arange(start, stop), np.cumsum(self.lengths)
        document = np.minimum(np.searchsorted(ends, index, "right"), len(ends) - 1)
        left, last = ends[document] - 1 - index, len(self.tokens) - 1  # left: tokens of the document that follow
        offset = np.array(self.shared) + self.lengths - ends
        following = self.tokens[np.minimum(index + 1, last)]
        return Part(
            np.where(index <= last, self.tokens[np.minimum(index, last)], 0),
            np.where((left > 0) & (left <= self.num_targets), following, IGNORE_INDEX),
            np.where(index <= last, index + offset[document], index - len(self.tokens)),
        )
