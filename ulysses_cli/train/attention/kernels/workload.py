"""The shape on which kernels are timed: a typical row of the run, and how many lengths its documents have. Reads the
lengths of rows, never their tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ulysses_cli.data.steps import Rows
from ulysses_cli.plan.attention import MAX_CUDNN_LENGTHS

MAX_TIMED_TOKENS = 32 * 1024  # with more tokens the fastest kernel stays the same
NUM_SAMPLED_ROWS = 64


@dataclass(frozen=True)
class LengthMix:
    """`lengths`: of the documents in a typical row. `has_few_lengths`: all rows of the run have the same few."""

    lengths: tuple[int, ...] = (4096, 1500, 1, 2595)
    has_few_lengths: bool = False


ANY_MIX = LengthMix()


@dataclass(frozen=True)
class KernelWorkload:
    """What one rank's kernel gets: documents of the mix, and the rank's heads."""

    mix: LengthMix = ANY_MIX
    num_heads: int = 8
    num_kv_heads: int = 2

    def cut(self) -> tuple[int, ...]:
        """At most MAX_TIMED_TOKENS of the mix. Long and short documents keep their shares of the tokens; only documents
        longer than a quarter of it are shortened."""
        lengths = sorted(filter(None, self.mix.lengths), reverse=True)
        total = sum(lengths)
        if total <= MAX_TIMED_TOKENS:
            return tuple(length for length in self.mix.lengths if length)
        quarter, kept, due = MAX_TIMED_TOKENS // 4, list[int](), 0.0
        for length in lengths:
            due += length * MAX_TIMED_TOKENS / total
            left = MAX_TIMED_TOKENS - sum(kept)
            if left > 0 and due >= min(length, quarter) / 2:
                kept.append(min(length, left, max(quarter, int(due))))
                due -= kept[-1]
        return tuple(kept)


ANY_WORK = KernelWorkload()


def measure_mix(rows: Rows, eval_rows: Rows | None = None, *, generates: bool = False) -> LengthMix:
    """Takes the row of median work among a sample that is spread over all rows. Kernels get the lengths of evaluation
    too. `generates`: and those of prompts, of which there are many."""
    num_rows = len(rows)
    if not num_rows:
        return ANY_MIX
    step = -(-num_rows // NUM_SAMPLED_ROWS)
    sampled = sorted((rows.get_lengths(row) for row in range(0, num_rows, step)), key=_measure_work)
    all_rows = [rows] if eval_rows is None else [rows, eval_rows]
    return LengthMix(tuple(sampled[len(sampled) // 2]), not generates and _has_few_lengths(all_rows))


def _measure_work(lengths: tuple[int, ...]) -> int:
    return sum(length * length for length in lengths)


def _has_few_lengths(all_rows: Iterable[Rows]) -> bool:
    """What fills up a row is a document too, of a length that follows from the row's tokens: their number counts."""
    found: set[int] = set()
    for lengths in (rows.get_lengths(row) for rows in all_rows for row in range(len(rows))):
        found.update(lengths)
        found.add(sum(lengths))
        if len(found) > MAX_CUDNN_LENGTHS:
            return False
    return True
