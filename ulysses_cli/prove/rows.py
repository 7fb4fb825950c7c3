"""Rows of made-up documents, held in memory: packed, with uneven targets, padding and one-token documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulysses_cli.data.steps import NO_TARGET

Numbers = NDArray[np.int64]
Document = tuple[Numbers, Numbers]  # tokens, and what each position is to predict


@dataclass(frozen=True, eq=False)
class Part:
    """Some tokens of a row."""

    input_ids: Numbers
    labels: Numbers
    positions: Numbers


class MadeRows:
    """What a step is planned from and read from. `documents[row]` holds a row's documents in order."""

    def __init__(self, documents: list[list[Document]]) -> None:
        self.documents = documents

    def __len__(self) -> int:
        return len(self.documents)

    def get_lengths(self, row: int) -> tuple[int, ...]:
        return tuple(len(tokens) for tokens, _ in self.documents[row])

    def count_targets(self, row: int) -> int:
        return sum(int((labels >= 0).sum()) for _, labels in self.documents[row])

    def read(self, row: int, start: int, stop: int) -> Any:
        """Behind the row's own tokens stands padding, a document of its own."""
        parts = self.documents[row]
        ids = np.concatenate([tokens for tokens, _ in parts])
        labels = np.concatenate([labels for _, labels in parts])
        positions = np.concatenate([np.arange(len(tokens)) for tokens, _ in parts])
        room = max(0, stop - len(ids))
        ids, labels = np.pad(ids, (0, room)), np.pad(labels, (0, room), constant_values=NO_TARGET)
        positions = np.concatenate([positions, np.arange(room)])
        return Part(ids[start:stop], labels[start:stop], positions[start:stop])

    def perturb(self, row: int, start: int, stop: int, vocabulary: int) -> MadeRows:
        """A copy in which tokens [start, stop) of a row are others; what positions are to predict stays."""
        changed, begin = [], 0
        for tokens, labels in self.documents[row]:
            at = np.arange(begin, begin + len(tokens))
            is_hit = (at >= start) & (at < stop)
            changed.append((np.where(is_hit, (tokens + 1 + vocabulary // 2) % vocabulary, tokens), labels))
            begin += len(tokens)
        return MadeRows([changed if at == row else own for at, own in enumerate(self.documents)])


def make_rows(row_tokens: int, num_rows: int, vocabulary: int, *, is_packed: bool, seed: int = 5) -> MadeRows:
    """Every third row is one document; others are packed, end in padding, or have few targets."""
    generator = np.random.default_rng(seed)
    rows = []
    for number in range(num_rows):
        if not is_packed or number % 3 == 1:
            lengths = [row_tokens - number % 2 * 3]
        else:
            first, second = row_tokens * 5 // 8 + number % 5, row_tokens // 8 - 1
            lengths = [first, second, 1, max(2, row_tokens - first - second - 1 - number % 4)]
        made = []
        for place, length in enumerate(lengths):
            tokens = generator.integers(0, vocabulary, length)
            labels = np.append(tokens[1:], NO_TARGET)
            if (number + place) % 3 == 2:
                labels[: length * 3 // 4] = NO_TARGET  # a prompt: only what follows is learned
            made.append((tokens, labels))
        rows.append(made)
    return MadeRows(rows)
