"""Plans an optimizer step: which rows it takes, and which sp group works on which row, in what order. Counts a recipe's
steps: rows per step, rows of the run, the FLOPs of a row.  A plan depends on the rows' lengths and the position in
the stream alone, so it is the same on every rank. Collectives may depend on values of the plan only."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ulysses_cli.plan.flops import compute_model_flops, compute_pair_flops
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import Resolved
from ulysses_cli.plan.rows.packing import IGNORE_INDEX, RowCost, locate_row, share_rows
from ulysses_cli.plan.rows.ring import ALONE, Order, Ring, Shared, cut_runs, deal_row, deal_rows

NO_ROW = -1  # in StepPlan.shares: a row of padding, which has no label
Numbers = NDArray[np.int64]


class Rows(Protocol):
    """Rows of tokens with the lengths of their documents, such as PackedRows. `read` returns an object with the fields
    of RowSlice. Rows may also have get_shared and weigh_targets, as PackedRows do, and get_reference, as ReferencedRows
    do."""

    def __len__(self) -> int: ...

    def get_lengths(self, row: int) -> tuple[int, ...]: ...

    def count_targets(self, row: int) -> int: ...

    def read(self, row: int, start: int, stop: int) -> Any: ...


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step. `shares[group][micro-step]` holds indices into `rows`, or NO_ROW;
    `padded_tokens[group][micro-step]` is the padded length of those rows."""

    position: int
    epoch: float
    rows: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]
    num_targets: int
    num_tokens: int
    shares: tuple[tuple[tuple[int, ...], ...], ...]
    padded_tokens: tuple[tuple[int, ...], ...]
    ring: Ring = ALONE
    shared: tuple[Shared, ...] = ()  # of each row's documents
    target_weight: float | None = None  # of all targets; None: as many as there are

    @property
    def num_micro_steps(self) -> int:
        return len(self.shares[0])

    @property
    def divisor(self) -> float:
        """What sums over targets are divided by."""
        return self.num_targets if self.target_weight is None else self.target_weight

    @property
    def next_position(self) -> int:
        return self.position + len(self.rows)

    def list_facts(self) -> dict[str, str]:
        """The hash of each field, which ranks compare."""
        return {name: hashlib.sha256(repr(value).encode()).hexdigest()[:16] for name, value in vars(self).items()}


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """This rank's share of the rows of one micro-step. `lengths` are the documents of the whole rows, with padding, and
    `shared` how many tokens each has of another (plan/rows/ring.py);
    `order` says which of their tokens each rank of the ring holds; `classes` are those of RowSlice. `members`: of each
    token, the number of its document among the rows' own, -1 in padding; `num_members`: how many there are."""

    input_ids: Numbers  # [B, local tokens]
    labels: Numbers
    positions: Numbers
    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    order: Order = ()
    classes: Numbers | None = None  # None where rows have none
    members: Numbers | None = None
    num_members: int = 0
    reference: NDArray[np.float64] | None = None  # of each of these documents, where rows know one
    shared: Shared = ()
    targets_per_token: float = 0.0  # of the whole step, by their weights, padding left out
    weights: NDArray[np.float32] | None = None  # of each label; None where rows have none


@dataclass(frozen=True)
class Batching:
    """The settings that turn rows into steps. `work` is the cost by which rows are shared among groups, `ring` how a
    row is dealt to the ranks of its group."""

    dp_size: int
    rows_per_micro_step: int
    micro_steps: int
    pad_multiple: int
    seed: int = 0
    work: RowCost = field(default_factory=RowCost)
    fixed_length: int | None = None
    is_shuffled: bool = True
    ring: Ring = ALONE

    @property
    def rows_per_step(self) -> int:
        return self.dp_size * self.rows_per_micro_step * self.micro_steps


def plan_step(rows: Rows, batching: Batching, position: int, end: int) -> StepPlan:
    """The step that starts at `position` of the stream of rows, which ends at `end`. The last step may have fewer rows;
    NO_ROW fills the gaps."""
    count = max(0, min(batching.rows_per_step, end - position))
    places = [locate_row(position + at, len(rows), batching.seed) for at in range(count)]
    ids = tuple(place.row if batching.is_shuffled else (position + at) % len(rows) for at, place in enumerate(places))
    return _make_plan(rows, batching, position, ids)


def plan_longest(rows: Rows, batching: Batching) -> StepPlan:
    """The step that a rehearsal runs: the rows with the most tokens, since memory follows tokens, and among rows of
    equal length those with the most work. Repeats rows where there are too few."""

    def rank(row: int) -> tuple[float, float, int]:
        lengths = rows.get_lengths(row)
        return -sum(lengths), -_weigh(lengths, get_shared(rows, row), batching.work), row

    longest = sorted(range(len(rows)), key=rank)
    ids = (longest * math.ceil(batching.rows_per_step / len(longest)))[: batching.rows_per_step]
    return _make_plan(rows, batching, 0, tuple(ids))


def _make_plan(rows: Rows, batching: Batching, position: int, ids: tuple[int, ...]) -> StepPlan:
    """Shares the rows among the groups by their work, and each group's rows among the micro-steps."""
    lengths = tuple(tuple(rows.get_lengths(row)) for row in ids)
    shared = tuple(get_shared(rows, row) for row in ids)
    works = [_weigh(*documents, batching.work) for documents in zip(lengths, shared, strict=True)]
    width = batching.rows_per_micro_step
    shares, padded = [], []
    for share in share_rows(works, batching.dp_size, position // batching.rows_per_step):
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
        padded_tokens=tuple(padded),
        ring=batching.ring,
        shared=shared,
        target_weight=_weigh_targets(rows, ids),
    )


def _weigh_targets(rows: Rows, ids: Sequence[int]) -> float | None:
    find = getattr(rows, "weigh_targets", None)
    weights = [find(row) for row in ids] if find is not None else []
    return math.fsum(weights) if weights and weights[0] is not None else None


def get_shared(rows: Rows, row: int) -> Shared:
    """How many first tokens of each document are those of another, for rows that know."""
    find = getattr(rows, "get_shared", None)
    return find(row) if find is not None else (0,) * len(rows.get_lengths(row))


def _weigh(lengths: Sequence[int], shared: Shared, work: RowCost) -> float:
    return sum(map(work.of, lengths, shared))


def _pad_tokens(batching: Batching, rows: Sequence[Sequence[int]]) -> int:
    if batching.fixed_length is not None:
        return batching.fixed_length
    longest = max((sum(lengths) for lengths in rows), default=1)
    return math.ceil(longest / batching.pad_multiple) * batching.pad_multiple


def read_micro_batch(rows: Rows, plan: StepPlan, group: int, micro_step: int, sp_rank: int, sp_size: int) -> MicroBatch:
    """Reads this rank's share of a micro-step's rows, and no other part of them."""
    total = plan.padded_tokens[group][micro_step]
    local = total // sp_size
    members = plan.shares[group][micro_step]
    shape = (len(members), local)
    ids, labels, positions = np.zeros(shape, np.int64), np.full(shape, IGNORE_INDEX), np.zeros(shape, np.int64)
    classes = np.zeros(shape, np.int64)
    weights = np.ones(shape, np.float32) if plan.target_weight is not None else None
    ring_rank, inner_rank = divmod(sp_rank, sp_size // plan.ring.size)
    documents, shared = list[int](), list[int]()
    numbers_of, num_documents = np.full(shape, -1), 0
    find_reference, references = getattr(rows, "get_reference", None), [np.empty(0)]
    for at, member in enumerate(members):
        lengths = plan.lengths[member] if member != NO_ROW else ()
        ends = np.cumsum(lengths)
        lengths += (total - sum(lengths),) if total > sum(lengths) else ()  # padding is a document
        documents += lengths
        place, own_shared = 0, (plan.shared[member] if member != NO_ROW else ()) + (0,)
        shared += own_shared[: len(lengths)]
        dealt = deal_row(lengths, plan.ring, own_shared[: len(lengths)])[ring_rank]
        for start, stop in cut_runs(dealt, inner_rank * local, (inner_rank + 1) * local):
            here = np.s_[at, place : place + stop - start]
            place += stop - start
            if member == NO_ROW:
                positions[here] = np.arange(start, stop)
                continue
            part = rows.read(plan.rows[member], start, stop)
            ids[here], labels[here], positions[here] = part.input_ids, part.labels, part.positions
            if part.classes is not None:
                classes[here] = part.classes
            if weights is not None:
                weights[here] = part.weights
            found = np.searchsorted(ends, np.arange(start, stop), "right")
            numbers_of[here] = np.where(found < len(ends), num_documents + found, -1)
        num_documents += len(ends)
        if find_reference is not None and member != NO_ROW:
            references.append(find_reference(plan.rows[member]))
    numbers = tuple(plan.rows[member] if member != NO_ROW else NO_ROW for member in members)
    order = deal_rows(documents, len(members), plan.ring, tuple(shared))
    reference = np.concatenate(references) if find_reference is not None else None
    return MicroBatch(
        ids, labels, positions, tuple(documents), numbers, order, classes, numbers_of, num_documents, reference,
        tuple(shared), plan.divisor / max(1, plan.num_tokens), weights,
    )  # fmt: skip


def make_batching(recipe: Recipe, shape: ModelShape, resolved: Resolved) -> Batching:
    train = recipe.train
    return Batching(
        dp_size=resolved.layout.dp_size,
        rows_per_micro_step=train.per_device_train_batch_size,
        micro_steps=train.gradient_accumulation_steps,
        pad_multiple=resolved.pad_to_multiple_of,
        seed=recipe.run.seed,
        work=make_work(shape),
        fixed_length=None if recipe.parallel.sp_seq_length_is_variable else resolved.max_length,
        ring=make_ring(shape, resolved),
    )


def make_eval_batching(shape: ModelShape, resolved: Resolved) -> Batching:
    """One row per sp group and micro-step, in order, so that every layout evaluates the same rows."""
    return Batching(
        dp_size=resolved.layout.dp_size,
        rows_per_micro_step=1,
        micro_steps=1,
        pad_multiple=resolved.pad_to_multiple_of,
        work=make_work(shape),
        is_shuffled=False,
        ring=make_ring(shape, resolved),
    )


def make_ring(shape: ModelShape, resolved: Resolved) -> Ring:
    """How rows are dealt to the ranks of their group, by the work of the model's layers."""
    return Ring(resolved.layout.ring_size, shape.window_counts)


def make_work(shape: ModelShape) -> RowCost:
    """FLOPs of one token, and of one pair of tokens in attention without a window."""
    return RowCost(compute_model_flops(shape, [1]), compute_pair_flops(shape))


def count_rows(recipe: Recipe, num_rows: int, rows_per_step: int) -> int:
    """Rows of the whole run. The last step may have fewer rows than the others."""
    if recipe.train.max_steps is not None:
        return recipe.train.max_steps * rows_per_step
    return max(1, round(num_rows * (recipe.train.num_train_epochs or 1.0)))
