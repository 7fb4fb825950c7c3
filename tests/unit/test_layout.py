"""Tests that ranks and coordinates are a bijection and groups partition the world, for worlds up to 4096."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulysses_cli.plan.layout import Coordinates, Layout, list_divisors


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sp = draw(st.sampled_from(list_divisors(draw(st.integers(1, 64)))))
    shard = draw(st.integers(1, max(1, 4096 // sp)))
    return Layout(draw(st.integers(1, max(1, 4096 // (sp * shard)))), shard, sp)


@given(layouts())
def test_rank_and_coordinates_are_a_bijection(layout: Layout) -> None:
    seen = [layout.get_coordinates(rank) for rank in range(layout.world_size)]
    assert len(set(seen)) == layout.world_size
    assert [layout.get_rank(at) for at in seen] == list(range(layout.world_size))
    for rank in range(0, layout.world_size, 7):
        at = seen[rank]
        assert layout.get_dp_index(rank) == at.dp_replicate * layout.dp_shard_size + at.dp_shard


@given(layouts())
def test_sp_groups_partition_the_world(layout: Layout) -> None:
    groups, size = layout.sp_groups, layout.sp_size
    assert sorted(chain.from_iterable(groups)) == list(range(layout.world_size))
    assert {len(group) for group in groups} == {size}
    for group in groups[:5]:  # along the group only the sp coordinate changes, in order
        at = [layout.get_coordinates(rank) for rank in group]
        assert [coordinates.sp for coordinates in at] == list(range(size))
        assert len({coordinates._replace(sp=0) for coordinates in at}) == 1


def test_sp_ranks_are_neighbours() -> None:
    layout = Layout(dp_replicate_size=2, dp_shard_size=2, sp_size=2)
    assert layout.sp_groups == ((0, 1), (2, 3), (4, 5), (6, 7))
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
