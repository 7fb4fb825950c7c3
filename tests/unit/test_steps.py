"""Tests steps: every row of an epoch once at any layout, slices that make up whole rows, the same plan on every
rank."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ulysses_cli.data.steps import NO_ROW, Batching, plan_longest, plan_step, read_micro_batch
from ulysses_cli.plan.rows.packing import IGNORE_INDEX


@dataclass(frozen=True)
class Part:
    input_ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    classes: None = None


class Rows:
    """Rows in which token i of row r is 1000 r + i, and every token but a document's last is a target."""

    def __init__(self, lengths: list[list[int]]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def get_lengths(self, row: int) -> tuple[int, ...]:
        return tuple(self.lengths[row])

    def count_targets(self, row: int) -> int:
        return sum(length - 1 for length in self.lengths[row])

    def read(self, row: int, start: int, stop: int) -> Part:
        size = sum(self.lengths[row])
        at = np.arange(start, stop)
        labels = np.where(at < size, 1000 * row + at + 1, IGNORE_INDEX)
        for end in np.cumsum(self.lengths[row]):
            labels[at == end - 1] = IGNORE_INDEX
        return Part(np.where(at < size, 1000 * row + at, 0), labels, at)


ROWS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=1, max_size=40).map(Rows)
SIZES = st.integers(1, 4)


@given(ROWS, SIZES, SIZES, SIZES, st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_every_layout_has_each_row_of_an_epoch_once_in_one_order(
    rows: Rows, dp_size: int, width: int, micro_steps: int, epochs: int, seed: int
) -> None:
    batching = Batching(dp_size, width, micro_steps, pad_multiple=8, seed=seed)
    end, position, seen = epochs * len(rows), 0, []
    while position < end:
        plan = plan_step(rows, batching, position, end)
        assert plan.next_position > position
        dealt = Counter(member for group in plan.shares for part in group for member in part)
        empty = dealt.pop(NO_ROW, 0)
        assert dealt == Counter(range(len(plan.rows)))
        assert empty + len(plan.rows) == batching.rows_per_step
        assert {len(group) for group in plan.shares} == {micro_steps}
        assert plan.num_targets == sum(rows.count_targets(row) for row in plan.rows)
        seen += plan.rows
        position = plan.next_position
    for epoch in range(epochs):
        assert sorted(seen[epoch * len(rows) : (epoch + 1) * len(rows)]) == list(range(len(rows)))
    alone = Batching(1, 1, 1, 8, seed)
    assert seen == [plan_step(rows, alone, at, end).rows[0] for at in range(end)]


@given(ROWS, SIZES, SIZES, st.sampled_from([1, 2, 4]))
def test_slices_make_up_whole_rows(rows: Rows, dp_size: int, width: int, sp_size: int) -> None:
    batching = Batching(dp_size, width, 2, pad_multiple=4 * sp_size)
    plan = plan_step(rows, batching, 0, len(rows))
    read = 0
    for group in range(dp_size):
        for micro_step in range(2):
            parts = [read_micro_batch(rows, plan, group, micro_step, rank, sp_size) for rank in range(sp_size)]
            assert len({(part.lengths, part.rows, part.input_ids.shape) for part in parts}) == 1
            ids = np.concatenate([part.input_ids for part in parts], 1)
            labels = np.concatenate([part.labels for part in parts], 1)
            assert sum(parts[0].lengths) == ids.size
            assert ids.shape[1] % (4 * sp_size) == 0
            for row, line, goals in zip(parts[0].rows, ids, labels, strict=True):
                size = sum(rows.get_lengths(row)) if row != NO_ROW else 0
                assert np.array_equal(line[:size], 1000 * max(row, 0) + np.arange(size))
                assert (goals[size:] == IGNORE_INDEX).all()
                read += int((goals != IGNORE_INDEX).sum())
    assert read == plan.num_targets


def test_a_fixed_length_pads_every_row() -> None:
    plan = plan_step(Rows([[3], [9, 2]]), Batching(2, 1, 1, pad_multiple=4, fixed_length=64), 0, 2)
    assert {tokens for group in plan.padded_tokens for tokens in group} == {64}


def test_the_longest_step_has_the_longest_rows_and_is_full() -> None:
    rows = Rows([[3], [40], [20, 20]])
    plan = plan_longest(rows, Batching(1, 1, 2, pad_multiple=4))
    assert plan.rows == (1, 2)  # by number where both have the same weight
    assert plan_longest(rows, Batching(4, 1, 1, pad_multiple=4)).rows == (1, 2, 0, 1)


def test_facts_differ_where_plans_do() -> None:
    rows = Rows([[3], [40], [20, 20], [7]])
    plans = [plan_step(rows, Batching(2, 1, 1, 4), position, 4) for position in (0, 2)]
    assert plans[0].list_facts() == plan_step(rows, Batching(2, 1, 1, 4), 0, 4).list_facts()
    assert plans[0].list_facts()["rows"] != plans[1].list_facts()["rows"]
