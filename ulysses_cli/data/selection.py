"""Chooses which documents train, which evaluate, and how often an epoch repeats each. Depends on content and seed
alone.

Documents of equal content go to the same split: no copy of an evaluation document is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.problem import Problem, RecipeError

Keys = NDArray[np.uint64]
Lengths = NDArray[np.int64]
MAX_COPIES = 4  # more repetitions teach little (arXiv 2305.16264)


@dataclass(frozen=True)
class Portion:
    """What an epoch takes of one source: copies of each document, or a share of the epoch's tokens; and between which
    lengths documents are taken."""

    weight: float = 1.0
    share: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None

    def allows(self, lengths: Lengths) -> NDArray[np.bool_]:
        return (lengths >= (self.min_tokens or 0)) & (lengths <= (self.max_tokens or np.iinfo(np.int64).max))


@dataclass(frozen=True)
class Selection:
    """How often each document stands in an epoch of training, which documents are held out for evaluation, and which
    have a length that their source allows. The arrays run over the documents of all training sources. `weights`:
    copies of each source's tokens."""

    copies: NDArray[np.int64]
    is_eval: NDArray[np.bool_]
    is_allowed: NDArray[np.bool_]
    weights: tuple[float, ...]


def select_documents(
    hashes: Sequence[Keys],
    lengths: Sequence[Lengths],
    usable: Sequence[Lengths],
    portions: Sequence[Portion],
    eval_share: float,
    seed: int,
    *,
    has_joined: bool = False,
) -> Selection:
    """`hashes`, `lengths` and `usable` hold one array per source: of documents' contents, of their tokens, and of those
    that rows will hold."""
    allowed = [portion.allows(each) for portion, each in zip(portions, lengths, strict=True)]
    for index, (portion, each) in enumerate(zip(portions, allowed, strict=True)):
        if len(each) and not each.any():
            raise RecipeError([_explain_bounds(index, portion, lengths[index])])
    together = np.concatenate([*hashes, np.empty(0, np.uint64)])
    is_allowed = np.concatenate([*allowed, np.empty(0, bool)])
    is_eval = np.zeros(len(together), bool)
    is_eval[is_allowed] = _hold_out(together[is_allowed], eval_share, seed, has_joined=has_joined)
    bounds = np.cumsum([0, *map(len, hashes)])
    places = [slice(first, last) for first, last in pairwise(bounds.tolist())]
    left = [is_allowed[at] & ~is_eval[at] for at in places]
    tokens = [int(each[is_left].sum()) for each, is_left in zip(usable, left, strict=True)]
    weights = _compute_weights(portions, tokens)
    copies = np.zeros(len(together), np.int64)
    for index, (at, is_left, weight) in enumerate(zip(places, left, weights, strict=True)):
        sizes = None if portions[index].share is None else usable[index]
        copies[at] = _count_copies(hashes[index], is_left, sizes, weight, seed)
        if not copies[at].any() and is_left.any():
            kind = "weight" if portions[index].share is None else "share"
            what = f"{weight:g} of {format_count(int(is_left.sum()), 'document')} is not one document"
            hint = f"use a larger {kind}, or leave the source out"
            raise RecipeError([Problem(f"data.datasets.{index}.{kind}", what, hint)])
    return Selection(copies, is_eval, is_allowed, tuple(weights))


def _explain_bounds(index: int, portion: Portion, lengths: Lengths) -> Problem:
    name = "min_tokens" if portion.min_tokens is not None and int(lengths.max()) < portion.min_tokens else "max_tokens"
    what = f"documents have {int(lengths.min()):,} to {int(lengths.max()):,} tokens, none is between the bounds"
    return Problem(f"data.datasets.{index}.{name}", what, "use other bounds, or leave the source out")


def _compute_weights(portions: Sequence[Portion], tokens: Sequence[int]) -> list[float]:
    """Copies of each source: as the recipe says, or those that give its share of an epoch, which has as many tokens as
    the sources together."""
    total, weights, problems = sum(tokens), [], []
    for index, (portion, own) in enumerate(zip(portions, tokens, strict=True)):
        if portion.share is None:
            weights.append(portion.weight)
            continue
        weights.append(portion.share * total / max(1, own))
        if weights[-1] > MAX_COPIES:
            what = f"{portion.share:g} of an epoch of {total:,} tokens is {weights[-1]:.3g} copies of {own:,} tokens"
            hint = f"write {MAX_COPIES * own / total:.2g} or less, since more than {MAX_COPIES} copies teach little"
            problems.append(Problem(f"data.datasets.{index}.share", what, f"{hint}; or name more documents"))
    if problems:
        raise RecipeError(problems)
    return weights


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


def _count_copies(
    hashes: Keys, is_left: NDArray[np.bool_], sizes: Lengths | None, weight: float, seed: int
) -> NDArray[np.int64]:
    """Repeats every document by the weight's whole part, and the weight's fraction of the documents, or with `sizes` of
    their tokens, once more. `is_left` marks the documents that may be taken."""
    copies, fraction = is_left * int(weight), weight - int(weight)
    if not fraction:
        return copies
    left = np.flatnonzero(is_left)
    keys = mix(hashes ^ mix(np.arange(len(hashes), dtype=np.uint64), seed, salt=2), seed, salt=3)
    order = left[np.argsort(keys[left], kind="stable")]
    if sizes is None:
        num_more = round(fraction * len(left))
    else:
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[order])])
        num_more = int(np.abs(sums - fraction * sums[-1]).argmin())
    copies[order[:num_more]] += 1
    return copies


def mix(keys: Keys, seed: int, salt: int) -> Keys:
    """A pseudo-random number for each key (splitmix64's finalizer)."""
    start = (seed * 4 + salt + 1) * 0x9E3779B97F4A7C15 % 2**64
    mixed: Any = keys + np.uint64(start)  # wraps modulo 2**64, as splitmix64 does
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)), np.uint64)
