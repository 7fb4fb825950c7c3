"""Tests how rows are dealt to a ring: every token once, equal work, and the keys and rounds of the mask."""

import random
from collections import Counter
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.attention import draw_shared
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.plan.flops import count_pairs
from ulysses_cli.plan.rows.ring import (
    MAX_SHARES,
    Order,
    Ring,
    Round,
    TokenRun,
    check_order,
    cut_runs,
    deal_row,
    deal_rows,
    measure_ring,
    plan_keys,
    plan_rounds,
)

SIZES = st.sampled_from([1, 2, 3, 4, 8])
WINDOWS = st.none() | st.integers(1, 40)


@st.composite
def rows(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    size = draw(SIZES)
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    multiple = size * draw(st.sampled_from([1, 2, 4, 16]))
    return (*lengths, multiple - sum(lengths) % multiple), size


def list_tokens(order: Order) -> list[list[int]]:
    return [[token for run in runs for token in range(*run)] for runs in order]


@given(rows(), WINDOWS)
def test_every_token_belongs_to_one_rank(row: tuple[tuple[int, ...], int], window: int | None) -> None:
    lengths, size = row
    order = deal_row(lengths, Ring(size, ((None, 1), (window, 3))))
    tokens = list_tokens(order)
    assert sorted(token for part in tokens for token in part) == list(range(sum(lengths)))
    assert {len(part) for part in tokens} == {sum(lengths) // size}
    assert all(part == sorted(part) for part in tokens)
    check_order(order, sum(lengths))


@given(rows(), st.integers(1, 3))
def test_rows_of_a_batch_are_dealt_one_by_one(row: tuple[tuple[int, ...], int], num_rows: int) -> None:
    lengths, size = row
    alone = list_tokens(deal_row(lengths, Ring(size)))
    together = list_tokens(deal_rows(lengths * num_rows, num_rows, Ring(size)))
    for part, batch in zip(alone, together, strict=True):
        assert batch == [number * sum(lengths) + token for number in range(num_rows) for token in part]


@given(rows(), st.integers(0, 50), st.integers(0, 50))
def test_cutting(row: tuple[tuple[int, ...], int], start: int, size: int) -> None:
    order = deal_row(row[0], Ring(row[1]))
    for runs, tokens in zip(order, list_tokens(order), strict=True):
        cut = cut_runs(runs, start, start + size)
        assert [token for run in cut for token in range(*run)] == tokens[start : start + size]


def list_attended(lengths: tuple[int, ...], window: int | None, shared: tuple[int, ...] = ()) -> list[list[int]]:
    """Returns the keys of each query in order, by the definition of the mask."""
    attended: list[list[int]] = []
    stem: list[int] = []
    for document, (end, length) in enumerate(zip(accumulate(lengths), lengths, strict=True)):
        own = list(range(end - length, end))
        if not any(shared[document : document + 1]):
            stem = own
        seen = (stem[: shared[document]] if stem is not own else []) + own
        attended += [seen[: at + 1][-(window or len(seen)) :] for at in range(len(seen) - length, len(seen))]
    return attended


@given(rows(), WINDOWS, st.data())
def test_keys_are_those_of_the_mask(row: tuple[tuple[int, ...], int], window: int | None, data: st.DataObject) -> None:
    """Each query finds its own keys in its call, as the last query of the last keys; no rank gets keys for nothing."""
    lengths, size = row
    shared = draw_shared(data.draw, lengths) if data.draw(st.booleans()) else ()
    attended = list_attended(lengths, window, shared)
    order = deal_row(lengths, Ring(size, ((window, 1),)), shared)
    tokens = list_tokens(order)
    for rank, own in enumerate(tokens):
        plan = plan_keys(lengths, order, window, rank, shared)
        keys: list[int | None] = [None] * plan.num_keys
        for source, moves in enumerate(plan.moves):
            for move in moves[rank]:
                assert move.source.stop - move.source.start == move.target.stop - move.target.start
                keys[slice(*move.target)] = tokens[source][slice(*move.source)]
        assert set(keys) == set().union(*(attended[token] for token in own))
        keys = [key for run in plan.layout for key in keys[slice(*run)]] if plan.layout else keys
        seen = []
        for part in plan.parts:
            query, key = part.queries.start, part.keys.start
            for length, key_length in zip(part.lengths, part.key_lengths, strict=True):
                for at in range(length):
                    last = key + key_length - length + at
                    visible = keys[max(key, last - window + 1 if window else key) : last + 1]
                    assert visible == attended[own[query + at]]
                    seen.append(query + at)
                query, key = query + length, key + key_length
            assert (query, key) == (part.queries.stop, part.keys.stop)
        assert seen == list(range(len(own)))


def test_one_document_is_dealt_in_zigzag() -> None:
    assert list_tokens(deal_row((16,), Ring(2))) == [[0, 1, 2, 3, 12, 13, 14, 15], list(range(4, 12))]
    assert [runs[0].start for runs in deal_row((64,), Ring(4))] == [0, 8, 16, 24]


def test_short_documents_and_windows_stay_in_order() -> None:
    """Equal work needs no dealing, and a rank's documents are then its own."""
    for ring in (Ring(4), Ring(4, ((64, 1),))):
        lengths = (1024,) * 64 if ring.windows == ((None, 1),) else (65536,)
        assert [runs[0] for runs in deal_row(lengths, ring)] == [(at * 16384, (at + 1) * 16384) for at in range(4)]


def measure_imbalance(order: Order, lengths: tuple[int, ...], ring: Ring) -> float:
    """Returns the largest work of a rank over the mean, with pairs counted document by document and layer by layer."""
    bounds = [0, *accumulate(lengths)]

    def count(run: tuple[int, int]) -> int:
        total = 0
        for start, end in pairwise(bounds):
            first, last = max(start, run[0]) - start, min(end, run[1]) - start
            for window, num_layers in ring.windows if first < last else ():
                total += num_layers * (count_pairs(last, window) - count_pairs(first, window))
        return total

    works = [sum(map(count, runs)) for runs in order]
    return max(works) * len(works) / sum(works)


def deal_zigzag(tokens: int, size: int) -> Order:
    width = tokens // (2 * size)
    pieces = [TokenRun(at * width, (at + 1) * width) for at in range(2 * size)]
    return tuple((pieces[at], pieces[-1 - at]) for at in range(size))


def draw_lengths(total: int, mean: int, seed: int) -> tuple[int, ...]:
    """Returns lengths with an exponential distribution, which fill the row."""
    generator, lengths = random.Random(seed), []
    while sum(lengths) < total:
        lengths.append(min(total - sum(lengths), 1 + int(generator.expovariate(1 / mean))))
    return tuple(lengths)


MI = 1 << 20
MIXES = {
    "one document on 4": (Ring(4), (MI,)),
    "3/4 and 1/4 on 2": (Ring(2), (3 * MI // 4, MI // 4)),
    "mean 128K on 4": (Ring(4), draw_lengths(MI, 131072, 3)),
    "mean 16K on 4": (Ring(4), draw_lengths(MI, 16384, 3)),
    "mean 2K on 8": (Ring(8), draw_lengths(MI, 2048, 3)),
    "mean 16K on 4, a window": (Ring(4, ((4096, 1),)), draw_lengths(MI, 16384, 3)),
    "mean 2K on 8, one layer of six without the window": (Ring(8, ((None, 1), (4096, 5))), draw_lengths(MI, 2048, 3)),
    "mean 128K on 4, every other layer with a window": (Ring(4, ((None, 1), (1024, 1))), draw_lengths(MI, 131072, 3)),
}


@pytest.mark.parametrize("name", MIXES)
def test_ranks_get_the_same_work(name: str) -> None:
    ring, lengths = MIXES[name]
    dealt, zigzag = deal_row(lengths, ring), deal_zigzag(MI, ring.size)
    assert measure_imbalance(dealt, lengths, ring) <= 1.01
    assert measure_imbalance(dealt, lengths, ring) <= measure_imbalance(zigzag, lengths, ring) + 1e-9
    if ring.windows[-1][0] == 4096:  # dealt as if there were no windows, ranks would wait for each other
        assert measure_imbalance(deal_row(lengths, Ring(ring.size)), lengths, ring) > 1.015


def test_orders_with_faults_are_refused(snapshot: SnapshotAssertion) -> None:
    said = []
    for bounds in ([[(0, 4), (4, 8)], [(8, 12), (4, 8)]], [[(0, 4)], [(8, 12)]], [[(0, 4)], [(4, 12)]]):
        order = tuple(tuple(TokenRun(*run) for run in runs) for runs in bounds)
        said.append(explain(check_order, order, 12, error=ValueError))
    assert [*said, explain(deal_row, (10,), Ring(4), error=ValueError)] == snapshot


Row = tuple[tuple[int, ...], int]


def plan_all(
    lengths: tuple[int, ...], order: Order, max_shares: float, shared: tuple[int, ...] = ()
) -> list[tuple[Round, ...]]:
    return [plan_rounds(lengths, order, None, rank, max_shares, shared) for rank in range(len(order))]


@given(rows(), st.sampled_from([0.0, 1.2, MAX_SHARES]), WINDOWS, st.data())
def test_each_query_meets_its_keys_once(row: Row, max_shares: float, window: int | None, data: st.DataObject) -> None:
    """Also where other layers have a window, which changes the order, and where documents share what they begin
    with."""
    lengths, size = row
    shared = draw_shared(data.draw, lengths) if data.draw(st.booleans()) else ()
    order = deal_row(lengths, Ring(size, ((None, 1), (window, 3))), shared)
    attended = list_attended(lengths, None, shared)
    tokens, all_rounds = list_tokens(order), plan_all(lengths, order, max_shares, shared)
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
    assert plan_rounds(lengths, deal_row(lengths, Ring(4, ((window, 1),))), window, 0) == ()
    assert measure_ring(sum(lengths), lengths[0], Ring(4, ((window, 1),)), window).rounds == ()


def test_branches_come_in_rounds_too() -> None:
    """A rank of four holds a quarter of the keys of a pair at a time, and sends itself what its branch shares."""
    lengths, shared = (960, 64), (0, 896)
    rounds = plan_all(lengths, deal_row(lengths, Ring(4), shared), MAX_SHARES, shared)
    assert {tuple(each.shift for each in own) for own in rounds} == {(0, 1, 2, 3, 4)}
    assert max(each.num_keys for own in rounds for each in own) == 256
    order = deal_row(lengths, Ring(4), shared)
    assert plan_rounds(lengths, order, 959, 0, 0.0, shared) == (), "a window may end inside"


def test_a_window_as_long_as_the_documents_is_none() -> None:
    order = deal_row((64, 64), Ring(4))
    assert plan_rounds((64, 64), order, 64, 1, 0.0) == plan_rounds((64, 64), order, None, 1, 0.0) != ()


def test_a_rank_holds_two_blocks_whatever_the_rings_size() -> None:
    for size in (2, 4, 8, 16):
        share = measure_ring(2**20, None, Ring(size), None)
        assert share.keys == size
        assert max(each.keys + each.arriving for each in share.rounds) <= 2
