"""Tests packing: every token exactly once, rows never over-full, orders that are bijections, rows with equal work."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.plan.rows.packing import (
    NumberSet,
    Piece,
    RowCost,
    RowPieces,
    cut_documents,
    locate_row,
    pack_alone,
    pack_documents,
    pack_stream,
    share_rows,
    shuffle_index,
)

LENGTHS = st.lists(st.integers(0, 300), max_size=60)
CAPACITY = st.integers(1, 200)
WORK = RowCost(per_token=1.0, per_pair=0.01)


def count_tokens(rows: RowPieces) -> Counter[tuple[int, int]]:
    """Counts how often each token of each document stands in a row, and checks the rows."""
    seen: Counter[tuple[int, int]] = Counter()
    for index in range(len(rows)):
        pieces = rows.get_row(index)
        assert pieces
        assert 0 < sum(piece.stop - piece.start for piece in pieces) <= rows.capacity
        for piece in pieces:
            seen.update((piece.document, token) for token in range(piece.start, piece.stop))
    return seen


@given(LENGTHS, CAPACITY, st.integers(0, 3))
def test_every_token_exactly_once(lengths: list[int], capacity: int, seed: int) -> None:
    pieces = cut_documents(lengths, capacity, "split").pieces
    expected = {(document, token) for document, length in enumerate(lengths) for token in range(length)}
    packings = (
        pack_documents(pieces, capacity, WORK),
        pack_stream(pieces, capacity, seed),
        pack_alone(pieces, capacity),
    )
    for rows in packings:
        seen = count_tokens(rows)
        assert seen.keys() == expected
        assert set(seen.values()) <= {1}
    for rows in (packings[0], packings[2]):  # in which pieces stay whole
        assert sorted(piece for index in range(len(rows)) for piece in rows.get_row(index)) == sorted(pieces)
    full = packings[1].capacity * (len(packings[1]) - 1)
    assert packings[1].count_tokens() > full or not expected  # a stream leaves space in its last row only


@given(LENGTHS, CAPACITY, st.sampled_from(["split", "truncate", "drop"]))
def test_dropped_tokens_are_counted(lengths: list[int], capacity: int, strategy: str) -> None:
    cut = cut_documents(lengths, capacity, strategy)  # type: ignore[arg-type]
    assert sum(piece.stop - piece.start for piece in cut.pieces) + cut.lost_tokens == sum(lengths)
    num_long = sum(length > capacity for length in lengths)
    assert cut.num_split + cut.num_truncated + cut.num_dropped == num_long
    assert (cut.lost_tokens > 0) == (num_long > 0 and strategy != "split")


def test_a_long_document_can_be_an_error(snapshot: SnapshotAssertion) -> None:
    said = explain(cut_documents, [8, 9], 8, "raise", error=ValueError)
    assert [said, explain(pack_documents, [Piece(0, 0, 9)], 8, WORK, error=ValueError)] == snapshot


@given(st.integers(1, 3000), st.integers(0, 2**32 - 1), st.integers(0, 5))
def test_an_epochs_order_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    assert sorted(shuffle_index(index, size, seed, epoch) for index in range(size)) == list(range(size))


def test_orders_differ_between_seeds_and_epochs_and_look_random() -> None:
    size = 1000
    orders = {(s, e): [shuffle_index(i, size, s, e) for i in range(size)] for s in (0, 1) for e in (0, 1)}
    assert len({tuple(order) for order in orders.values()}) == 4
    for order in orders.values():
        assert sum(a == b for a, b in zip(order, range(size), strict=True)) < 10
        assert 400 < sum(order[i] < order[i + 1] for i in range(size - 1)) < 600  # as often up as down


@given(st.integers(1, 50), st.integers(0, 500), st.integers(0, 100))
def test_any_position_of_the_stream_is_located_directly(num_rows: int, position: int, seed: int) -> None:
    """Each row comes exactly once per epoch, each epoch in an order of its own; no position depends on another."""
    first = position // num_rows * num_rows
    places = [locate_row(at, num_rows, seed) for at in range(first, first + num_rows)]
    assert sorted(place.row for place in places) == list(range(num_rows))
    assert {place.epoch for place in places} == {position // num_rows}
    assert locate_row(position, num_rows, seed) == places[position - first]


@given(st.lists(st.floats(0, 1e6), max_size=60), st.integers(1, 9))
def test_rows_of_a_step_are_dealt_exactly_once(works: list[float], num_groups: int) -> None:
    shares = share_rows(works, num_groups)
    assert len({len(share) for share in shares}) <= 1
    dealt = [row for share in shares for row in share]
    assert sorted(row for row in dealt if row >= 0) == list(range(len(works)))
    assert dealt.count(-1) == -len(works) % num_groups


def test_rows_of_a_micro_step_have_equal_work() -> None:
    works = [float(work) for work in (9, 1, 8, 2, 7, 3, 6, 4)]
    shares = share_rows(works, 2)
    for step in range(4):
        assert abs(works[shares[0][step]] - works[shares[1][step]]) == 1
    assert abs(sum(works[row] for row in shares[0]) - sum(works[row] for row in shares[1])) <= 2


def draw_lengths(count: int, seed: int = 0) -> list[int]:
    """Draws a log-normal mix: mostly short, a few as long as a row and longer."""
    draw = random.Random(seed)
    return [max(1, int(draw.lognormvariate(8.0, 1.3))) for _ in range(count)]


@pytest.mark.check
def test_a_log_normal_mix_is_packed_well() -> None:
    capacity, work = 131072, RowCost(1.0, 2e-5)
    rows = pack_documents(cut_documents(draw_lengths(40_000), capacity, "split").pieces, capacity, work)
    assert rows.compute_efficiency() > 0.99
    works = [rows.compute_work(index, work) for index in range(len(rows))]
    totals = [0.0] * 8
    for start in range(0, len(rows) - 63, 64):
        step = [works[shuffle_index(at, len(rows), 0)] for at in range(start, start + 64)]
        for group, share in enumerate(share_rows(step, 8, start // 64)):
            totals[group] += sum(step[row] for row in share)
    assert max(totals) / (sum(totals) / 8) < 1.03


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3_000_000)), max_size=60), st.integers(0, 3_000_000))
def test_the_set_of_free_spaces_returns_the_next_larger_number(changes: list[tuple[bool, int]], start: int) -> None:
    result, expected = NumberSet(3_000_000), set[int]()
    for is_added, number in changes:
        if is_added:
            result.add(number)
            expected.add(number)
        elif number in expected:
            result.remove(number)
            expected.discard(number)
    for at in (start, *sorted(expected)):
        assert result.find_from(at) == min((number for number in expected if number >= at), default=None)


def test_cuts_fall_only_where_they_do_no_harm() -> None:
    cut = cut_documents([10, 3], 4, "split", lambda _: [2, 6, 7])
    assert cut.pieces == [(0, 0, 2), (0, 2, 6), (0, 6, 7 + 3), (1, 0, 3)]
    assert cut.num_torn == 0
    assert cut_documents([10], 4, "split", lambda _: [2]).num_torn == 1
    assert cut_documents([9], 4, "split", lambda _: []).num_torn == 2


def test_no_tail_of_one_token() -> None:
    assert cut_documents([9], 4, "split").pieces == [(0, 0, 4), (0, 4, 7), (0, 7, 9)]
    rows = pack_stream([Piece(0, 0, 9)], 4, 0)
    assert [rows.get_row(index) for index in range(3)] == [[(0, 0, 4)], [(0, 4, 7)], [(0, 7, 9)]]
    rows = pack_stream([Piece(0, 0, 4), Piece(1, 0, 1)], 4, 0)
    assert sorted(len(rows.get_row(index)) for index in range(2)) == [1, 2]
