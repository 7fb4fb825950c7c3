"""Which rows form a step, who works on which, and in what order: one plain value, the same on every rank.

Made from lengths and the position in the stream alone. No collective depends on anything that is not in it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ulysses_cli.plan.packing import RowCost, locate_row, share_rows

NO_TARGET = -100
NO_ROW = -1
Numbers = NDArray[np.int64]


class Slice(Protocol):
    """Tokens of a row: ids, labels that are shifted already, positions inside their document."""

    input_ids: Numbers
    labels: Numbers
    positions: Numbers


class Rows(Protocol):
    """What a step is made from: rows of tokens with the lengths of their documents."""

    def __len__(self) -> int: ...

    def get_lengths(self, row: int) -> tuple[int, ...]: ...

    def count_targets(self, row: int) -> int: ...

    def read(self, row: int, start: int, stop: int) -> Any: ...


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step. `shares[group][micro-step]` are indices into `rows`, -1 for a row without weight;
    `row_tokens[group][micro-step]` is the padded length of those rows."""

    position: int
    epoch: float
    rows: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]
    num_targets: int
    num_tokens: int
    shares: tuple[tuple[tuple[int, ...], ...], ...]
    row_tokens: tuple[tuple[int, ...], ...]

    @property
    def num_micro_steps(self) -> int:
        return len(self.shares[0])

    @property
    def next_position(self) -> int:
        return self.position + len(self.rows)

    def list_facts(self) -> dict[str, str]:
        """Each field's hash, to be compared across ranks."""
        return {name: hashlib.sha256(repr(value).encode()).hexdigest()[:16] for name, value in vars(self).items()}


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """This rank's slice of the rows of one micro-step, and the documents of the whole rows, padding included."""

    input_ids: Numbers  # [B, local tokens]
    labels: Numbers
    positions: Numbers
    lengths: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Batching:
    """How rows become steps."""

    dp_size: int
    rows_per_micro_step: int
    micro_steps: int
    pad_multiple: int
    seed: int = 0
    work: RowCost = field(default_factory=RowCost)
    fixed_row_tokens: int | None = None
    is_shuffled: bool = True

    @property
    def rows_per_step(self) -> int:
        return self.dp_size * self.rows_per_micro_step * self.micro_steps


def plan_step(rows: Rows, batching: Batching, position: int, end: int) -> StepPlan:
    """The step that starts at a position of the stream of rows, which ends at `end`. The last step may be short: its
    missing rows have no weight."""
    count = max(0, min(batching.rows_per_step, end - position))
    places = [locate_row(position + at, len(rows), batching.seed) for at in range(count)]
    ids = tuple(place.row if batching.is_shuffled else (position + at) % len(rows) for at, place in enumerate(places))
    return _deal(rows, batching, position, ids)


def plan_longest(rows: Rows, batching: Batching) -> StepPlan:
    """A step of the rows with the most tokens, of those the heaviest: what a rehearsal runs. Memory follows tokens."""

    def rank(row: int) -> tuple[float, float, int]:
        lengths = rows.get_lengths(row)
        return -sum(lengths), -_weigh(lengths, batching.work), row

    heaviest = sorted(range(len(rows)), key=rank)
    ids = (heaviest * math.ceil(batching.rows_per_step / len(heaviest)))[: batching.rows_per_step]
    return _deal(rows, batching, 0, tuple(ids))


def _deal(rows: Rows, batching: Batching, position: int, ids: tuple[int, ...]) -> StepPlan:
    lengths = tuple(tuple(rows.get_lengths(row)) for row in ids)
    works = [_weigh(own, batching.work) for own in lengths]
    width = batching.rows_per_micro_step
    dealt = share_rows(works, batching.dp_size, position // batching.rows_per_step)
    shares, padded = [], []
    for share in dealt:
        share = share + [NO_ROW] * (width * batching.micro_steps - len(share))
        micro = [tuple(share[at : at + width]) for at in range(0, len(share), width)]
        shares.append(tuple(micro))
        padded.append(tuple(_pad_tokens(batching, [lengths[at] for at in part if at != NO_ROW]) for part in micro))
    return StepPlan(
        position=position,
        epoch=(position + len(ids)) / len(rows),
        rows=ids,
        lengths=lengths,
        num_targets=sum(rows.count_targets(row) for row in ids),
        num_tokens=sum(map(sum, lengths)),
        shares=tuple(shares),
        row_tokens=tuple(padded),
    )


def _weigh(lengths: Sequence[int], work: RowCost) -> float:
    return sum(work.of(length) for length in lengths)


def _pad_tokens(batching: Batching, rows: Sequence[Sequence[int]]) -> int:
    if batching.fixed_row_tokens is not None:
        return batching.fixed_row_tokens
    longest = max((sum(lengths) for lengths in rows), default=1)
    return math.ceil(longest / batching.pad_multiple) * batching.pad_multiple


def read_micro_batch(rows: Rows, plan: StepPlan, group: int, micro_step: int, sp_rank: int, sp_size: int) -> MicroBatch:
    """Only this rank's slice is read."""
    total = plan.row_tokens[group][micro_step]
    local = total // sp_size
    members = plan.shares[group][micro_step]
    shape = (len(members), local)
    ids, labels, positions = np.zeros(shape, np.int64), np.full(shape, NO_TARGET), np.zeros(shape, np.int64)
    documents: list[int] = []
    for at, member in enumerate(members):
        own = plan.lengths[member] if member != NO_ROW else ()
        documents += [*own, *([total - sum(own)] if total > sum(own) else [])]
        if member == NO_ROW:
            positions[at] = np.arange(sp_rank * local, (sp_rank + 1) * local)
            continue
        part = rows.read(plan.rows[member], sp_rank * local, (sp_rank + 1) * local)
        ids[at], labels[at], positions[at] = part.input_ids, part.labels, part.positions
    numbers = tuple(plan.rows[member] if member != NO_ROW else NO_ROW for member in members)
    return MicroBatch(ids, labels, positions, tuple(documents), numbers)
