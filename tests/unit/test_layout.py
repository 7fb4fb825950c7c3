"""Ranks and coordinates are a bijection and groups partition the world, for worlds up to 4096."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulysses_cli.plan.layout import Coordinates, Layout, list_divisors


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sp = draw(st.sampled_from(list_divisors(draw(st.integers(1, 64)))))
    shard = draw(st.integers(1, max(1, 4096 // sp)))
    replicate = draw(st.integers(1, max(1, 4096 // (sp * shard))))
    return Layout(replicate, shard, sp)


@given(layouts())
def test_rank_and_coordinates_are_a_bijection(layout: Layout) -> None:
    seen = [layout.get_coordinates(rank) for rank in range(layout.world_size)]
    assert len(set(seen)) == layout.world_size
    assert [layout.get_rank(at) for at in seen] == list(range(layout.world_size))
    for rank in range(0, layout.world_size, 7):
        at = seen[rank]
        assert layout.get_dp_index(rank) == at.dp_replicate * layout.dp_shard_size + at.dp_shard


@given(layouts())
def test_groups_partition_the_world(layout: Layout) -> None:
    kinds = {
        "sp_groups": ("sp", layout.sp_size),
        "dp_groups": (None, layout.dp_size),
        "replica_groups": (None, layout.replica_size),
        "replicate_groups": ("dp_replicate", layout.dp_replicate_size),
    }
    for name, (axis, size) in kinds.items():
        groups = getattr(layout, name)
        assert sorted(chain.from_iterable(groups)) == list(range(layout.world_size)), name
        assert {len(group) for group in groups} == {size}, name
        if axis:  # along the group only that axis moves, and it moves in order
            for group in groups[:5]:
                at = [layout.get_coordinates(rank) for rank in group]
                assert [getattr(a, axis) for a in at] == list(range(size))
                assert len({a._replace(**{axis: 0}) for a in at}) == 1


def test_sp_ranks_are_neighbours_and_replicas_farthest() -> None:
    layout = Layout(dp_replicate_size=2, dp_shard_size=2, sp_size=2)
    assert layout.sp_groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.dp_groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert layout.replica_groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert layout.replicate_groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.get_coordinates(6) == Coordinates(dp_replicate=1, dp_shard=1, sp=0)


@pytest.mark.parametrize("bad", [-1, 8])
def test_a_rank_outside_the_world_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="outside a world of 8"):
        Layout(2, 2, 2).get_coordinates(bad)
    with pytest.raises(ValueError, match="outside an axis of 2"):
        Layout(2, 2, 2).get_rank(Coordinates(0, 0, 2))
    with pytest.raises(ValueError, match="at least one rank"):
        Layout(0, 1, 1)


@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert list_divisors(number) == [n for n in range(1, number + 1) if number % n == 0]
