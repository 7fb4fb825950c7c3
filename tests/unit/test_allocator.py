"""Compares the allocator's model with a brute force that knows no blocks: one byte of a map for each unit of memory."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiers import count_examples

from ulysses_cli.prove.trace.storages import count_segment, replay

UNIT, MIB = 512, 1 << 20
Sizes = st.sampled_from([1, 512, 700 << 10, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 11 * MIB, 33 * MIB])
Moves = st.lists(st.tuples(Sizes, st.integers(0, 1), st.integers(0, 5)), min_size=1, max_size=40)


def list_stretches(taken: list[int]) -> list[tuple[int, int]]:
    """Returns (length, start) of each run of free units of a segment, where 0 stands for free."""
    result, start = [], 0
    for owner, units in itertools.groupby(taken):
        length = len(list(units))
        if owner == 0:
            result.append((length, start))
        start += length
    return result


def replay_plainly(moves: list[tuple[int, int, int]], *, expandable: bool) -> int:
    """Replays births by scanning every unit of every segment at each of them."""
    pools: dict[tuple[int, bool], list[list[int]]] = {}  # of each unit the storage's number from 1 on, or 0
    for storage, num_bytes, stream in moves:
        if num_bytes < 0:
            for segments in pools.values():
                for segment in segments:
                    segment[:] = [0 if owner == storage + 1 else owner for owner in segment]
            continue
        units = -(-num_bytes // UNIT)
        is_small = units * UNIT <= MIB
        segments = pools.setdefault((stream, is_small), [])
        stretches = [
            (length, number, start) for number, s in enumerate(segments) for length, start in list_stretches(s)
        ]
        fitting = [each for each in stretches if each[0] >= units]
        if fitting:
            shortest = min(length for length, *_ in fitting)
            length, number, start = next(each for each in fitting if each[0] == shortest)
        elif expandable:
            page = (2 if is_small else 20) * MIB // UNIT
            if not segments:
                segments.append([])
            whole, number = segments[0], 0
            held = next((n for n, start in list_stretches(whole) if start + n == len(whole)), 0)
            whole += [0] * (-(-(units - held) // page) * page)
            length, start = list_stretches(whole)[-1]
        else:
            segments.append([0] * (count_segment(units * UNIT) // UNIT))
            number, start, length = len(segments) - 1, 0, len(segments[-1])
        is_cut = expandable or is_small or (length - units) * UNIT > MIB
        given_units = units if is_cut else length
        segments[number][start : start + given_units] = [storage + 1] * given_units
    return sum(len(segment) * UNIT for segments in pools.values() for segment in segments)


def make_moves(drawn: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Draws births, and after each the death of one that is alive, or none."""
    moves, alive = [], []
    for storage, (size, stream, dying) in enumerate(drawn):
        moves.append((storage, size, stream))
        alive.append((storage, size, stream))
        if dying < len(alive):
            gone, num_bytes, own = alive.pop(dying)
            moves.append((gone, -num_bytes, own))
    return moves


@settings(max_examples=count_examples(100))
@given(Moves)
def test_reserved_bytes_equal_those_of_the_map(drawn: list[tuple[int, int, int]]) -> None:
    distinct = [(size + 4096 * at, stream, dying) for at, (size, stream, dying) in enumerate(drawn)]
    moves = make_moves(distinct)
    for expandable in (True, False):
        assert replay(moves, expandable=expandable) == replay_plainly(moves, expandable=expandable)


def test_a_gap_fits_no_larger_tensor_and_no_other_stream() -> None:
    hole = [(0, 100 * MIB, 0), (1, 2 * MIB, 0), (0, -100 * MIB, 0), (2, 140 * MIB, 0)]
    assert replay(hole, expandable=False) == 260 * MIB  # the small tensor takes 20
    again = [(0, 100 * MIB, 0), (0, -100 * MIB, 0), (1, 140 * MIB, 0)]
    assert replay(again, expandable=True) == 140 * MIB
    assert replay(again, expandable=False) == 240 * MIB
    assert replay([(0, 100 * MIB, 0), (0, -100 * MIB, 0), (1, 100 * MIB, 1)], expandable=True) == 200 * MIB
