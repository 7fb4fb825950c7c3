"""Tests the rounds of a ring against the definition of the mask: each query meets each of its keys once, and ranks
agree on what travels."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_order import WINDOWS, list_attended, list_tokens, rows

from ulysses_cli.plan.rows.ring import MAX_SHARES, Order, Ring, Round, deal_row, measure_ring, plan_rounds

Row = tuple[tuple[int, ...], int]


def plan_all(lengths: tuple[int, ...], order: Order, max_shares: float) -> list[tuple[Round, ...]]:
    return [plan_rounds(lengths, order, None, rank, max_shares) for rank in range(len(order))]


@given(rows(), st.sampled_from([0.0, 1.2, MAX_SHARES]), WINDOWS)
def test_each_query_meets_its_keys_once(row: Row, max_shares: float, window: int | None) -> None:
    """Also where other layers have a window, which changes the order."""
    lengths, size = row
    order, attended = deal_row(lengths, Ring(size, ((None, 1), (window, 3)))), list_attended(lengths, None)
    tokens, all_rounds = list_tokens(order), plan_all(lengths, order, max_shares)
    assert len({tuple(each.shift for each in rounds) for rounds in all_rounds}) == 1, "ranks agree on the collectives"
    if not all_rounds[0]:
        return
    for rank, rounds in enumerate(all_rounds):
        met = {token: Counter[int]() for token in tokens[rank]}
        for at, each in enumerate(rounds):
            source = (rank - each.shift) % size
            sent = all_rounds[source][at].sent
            keys = [token for run in sent for token in tokens[source][slice(*run)]] if at else tokens[rank]
            assert len(keys) == each.num_keys
            for part in each.parts:
                query, key = part.queries.start, part.keys.start
                for length, key_length in zip(part.lengths, part.key_lengths, strict=True):
                    for number in range(length):
                        last = key_length - length + number + 1 if each.shift == 0 else key_length
                        met[tokens[rank][query + number]].update(keys[key : key + last])
                    query, key = query + length, key + key_length
                assert (query, key) == (part.queries.stop, part.keys.stop)
        for token, found in met.items():
            assert found == Counter(attended[token])


def test_a_ring_of_one_document_has_a_round_for_each_rank() -> None:
    """In zigzag, keys of an earlier rank serve all queries, and those of a later one the second half."""
    lengths, size = (64,), 4
    rounds = plan_all(lengths, deal_row(lengths, Ring(size)), MAX_SHARES)
    assert [[each.shift for each in own] for own in rounds] == [[0, 1, 2, 3]] * 4
    counts = [[each.num_keys for each in own] for own in rounds]
    assert counts == [[16, 16, 16, 16], [16, 8, 16, 16], [16, 8, 8, 16], [16, 8, 8, 8]]
    queries = [[(part.queries, part.keys) for part in each.parts] for each in rounds[1]]
    assert queries == [[((0, 16), (0, 16))], [((0, 16), (0, 8))], *[[((8, 16), (0, 16))]] * 2]


@pytest.mark.parametrize(
    ("lengths", "window"), [((1024,) * 64, None), ((65536,), 4096), ((3000,) * 21 + (2536,), None)]
)
def test_little_is_fetched_at_once(lengths: tuple[int, ...], window: int | None) -> None:
    """Rounds cost a kernel call for each rank, and a window's end needs all keys of a query in one call."""
    order = deal_row(lengths, Ring(4, ((window, 1),)))
    assert plan_rounds(lengths, order, window, 0) == ()
    assert measure_ring(sum(lengths), lengths[0], Ring(4, ((window, 1),)), window).rounds == ()


def test_a_window_as_long_as_the_documents_is_none() -> None:
    order = deal_row((64, 64), Ring(4))
    assert plan_rounds((64, 64), order, 64, 1, 0.0) == plan_rounds((64, 64), order, None, 1, 0.0) != ()


def test_a_rank_holds_two_blocks_whatever_the_rings_size() -> None:
    for size in (2, 4, 8, 16):
        share = measure_ring(2**20, None, Ring(size), None)
        assert share.keys == size
        assert max(each.keys + each.arriving for each in share.rounds) <= 2
