"""Tokens of two answers to one prompt, and how many of them both can read from one copy.

Each branch is rendered and tokenized whole. Their tokens are compared: a prompt tokenized alone may end in a token that
the answer would merge with.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ulysses_cli.data.store import TARGET, WANTED, Flags, Ids, count_shared
from ulysses_cli.data.tokenizing.encoder import Encoder
from ulysses_cli.readers.pairs import Judged, Pair
from ulysses_cli.readers.problems import BadRow


@dataclass(frozen=True, eq=False)
class Branch:
    """Tokens of prompt and answer, and their flags."""

    ids: Ids
    flags: Flags

    @property
    def is_target(self) -> NDArray[np.bool_]:
        return (self.flags & TARGET) > 0


@dataclass(frozen=True, eq=False)
class TokenPair:
    """`num_shared`: the first tokens of both, which one copy can serve. The token before the first target is not one of
    them, since it predicts another token in each branch."""

    chosen: Branch
    rejected: Branch
    num_shared: int


def encode_pair(encoder: Encoder, pair: Pair) -> TokenPair:
    """Raises BadRow if an answer has no target of its own. The encoder's `lost` and `counts` are those of both."""
    encoded, lost, counts = [], [], Counter[str]()
    for sample in (pair.chosen, pair.rejected):
        encoded.append(encoder.encode(sample))
        lost += encoder.lost
        counts.update(encoder.counts)
    (first, first_flags), (second, second_flags) = encoded
    if np.array_equal(first, second):
        raise BadRow("chosen and rejected answers have the same tokens: there is nothing to prefer")
    if first_flags is None or second_flags is None:  # texts: what differs is the answer
        shortest = min(len(first), len(second))
        is_other = first[:shortest] != second[:shortest]
        num_common = int(np.argmax(is_other)) if is_other.any() else shortest
        first_flags, second_flags = (
            np.where(np.arange(len(ids)) >= num_common, TARGET, 0).astype(np.uint8) for ids in (first, second)
        )
    branches = Branch(first, first_flags), Branch(second, second_flags)
    for name, branch in zip(("chosen", "rejected"), branches, strict=True):
        if not branch.is_target[1:].any():
            raise BadRow(f"the {name} answer has no target")
    num_shared = count_shared((first, first_flags), (second, second_flags))
    encoder.lost, encoder.counts = lost, {**counts, "shared tokens": num_shared}
    return TokenPair(*branches, num_shared)


def encode_judged(encoder: Encoder, judged: Judged) -> tuple[Branch, Branch]:
    """The answer, whose targets say whether it is wanted, and the other one. Raises BadRow if one has no target."""
    other = encoder.encode(judged.answer if judged.other is None else judged.other)
    branches = []
    for name, (ids, flags) in (("answer", encoder.encode(judged.answer)), ("answer of the row before", other)):
        if flags is None or not (flags[1:] & TARGET).any():
            raise BadRow(f"the {name} has no target")
        branches.append(Branch(ids, flags))
    answer, rest = branches
    if judged.is_wanted:
        answer = Branch(answer.ids, answer.flags | np.where(answer.is_target, WANTED, 0).astype(np.uint8))
    return answer, rest
