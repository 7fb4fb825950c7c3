"""Chooses which documents train, which evaluate, and how often an epoch repeats each. Depends on content and seed
alone.

Documents of equal content go to the same split: no copy of an evaluation document is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.problem import Problem, RecipeError

Keys = NDArray[np.uint64]


@dataclass(frozen=True)
class Selection:
    """How often each document stands in an epoch of training, and which documents are held out for evaluation. Both
    arrays run over the documents of all training sources."""

    copies: NDArray[np.int64]
    is_eval: NDArray[np.bool_]


def select_documents(
    hashes: Sequence[Keys], weights: Sequence[float], eval_share: float, seed: int, *, has_joined: bool = False
) -> Selection:
    """`hashes` holds one array of content hashes per source."""
    together = np.concatenate([*hashes, np.empty(0, np.uint64)])
    is_eval = _hold_out(together, eval_share, seed, has_joined=has_joined)
    copies = np.zeros(len(together), np.int64)
    first = 0
    for index, (source, weight) in enumerate(zip(hashes, weights, strict=True)):
        at = slice(first, first + len(source))
        copies[at] = _count_copies(source, ~is_eval[at], weight, seed)
        first += len(source)
        if len(source) and not copies[at].any() and not is_eval[at].all():
            raise RecipeError(
                [
                    Problem(
                        f"data.datasets.{index}.weight",
                        f"{weight:g} of {format_count(int((~is_eval[at]).sum()), 'document')} is not one document",
                        "use a larger weight, or leave the source out",
                    )
                ]
            )
    return Selection(copies, is_eval)


def _hold_out(hashes: Keys, share: float, seed: int, *, has_joined: bool) -> NDArray[np.bool_]:
    """Marks the documents to hold out: a share of them, rounded, and at least one. More if the last one chosen has
    copies."""
    if not share or not len(hashes):
        return np.zeros(len(hashes), bool)
    keys = mix(hashes, seed, salt=1)
    num_chosen = max(1, round(share * len(hashes)))
    chosen = keys <= np.partition(keys, num_chosen - 1)[num_chosen - 1]
    if chosen.all():
        count = f"are {len(hashes):,} documents of equal content" if len(hashes) > 1 else "is 1 document"
        hint = "set data.eval_split: 0 and name data.eval_datasets"
        hint += ", or join_files: false to make each file of a folder a document" if has_joined else ""
        raise RecipeError([Problem("data.eval_split", f"nothing is left to train on: there {count}", hint)])
    return chosen


def _count_copies(hashes: Keys, is_left: NDArray[np.bool_], weight: float, seed: int) -> NDArray[np.int64]:
    """Repeats every document by the weight's whole part, and a share of the documents, the weight's fraction, once
    more. `is_left` marks the documents that are not held out."""
    copies = is_left * int(weight)
    num_more = round((weight - int(weight)) * int(is_left.sum()))
    if num_more:
        keys = mix(hashes ^ mix(np.arange(len(hashes), dtype=np.uint64), seed, salt=2), seed, salt=3)
        left = np.flatnonzero(is_left)
        copies[left[np.argsort(keys[left], kind="stable")[:num_more]]] += 1
    return copies


def mix(keys: Keys, seed: int, salt: int) -> Keys:
    """A pseudo-random number for each key (splitmix64's finalizer)."""
    start = (seed * 4 + salt + 1) * 0x9E3779B97F4A7C15 % 2**64
    mixed: Any = keys + np.uint64(start)  # wraps modulo 2**64, as splitmix64 does
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)), np.uint64)
