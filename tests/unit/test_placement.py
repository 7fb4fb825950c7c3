"""Tests layouts of ranks, and where they stand on machines, against a count one by one."""

import re
from dataclasses import replace
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st
from support.model_shapes import get_shape
from support.paths import ROOT
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.layout import Layout, Placement, count_near_ranks, list_divisors
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.ledger import weigh_ledger
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.planner.fit import fits
from ulysses_cli.plan.planner.rings import find_layout_inside
from ulysses_cli.plan.speed import compute_speed
from ulysses_cli.report.planner import CrossingCosts, explain_crossing, format_inside
from ulysses_cli.report.recipe import format_start
from ulysses_cli.run.nodes import find_nodes
from ulysses_cli.validate import validate_recipe


@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 6))
def test_rows_and_machines(sp_size: int, num_nodes: int, factor: int) -> None:
    layout = Layout(dp_shard_size=num_nodes * factor, sp_size=sp_size)
    placement = Placement(layout, num_nodes)
    node_of = [rank // placement.gpus_per_node for rank in range(layout.world_size)]
    groups = [list(range(start, start + sp_size)) for start in range(0, layout.world_size, sp_size)]
    assert placement.num_crossing == sum(len({node_of[rank] for rank in group}) > 1 for group in groups)
    for node in range(num_nodes):
        expected = [[rank for rank in group if node_of[rank] == node] for group in groups]
        assert [list(ranks) for ranks in placement.list_machine(node)] == [ranks for ranks in expected if ranks]


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.integers(1, 6))
def test_copies_of_weights_and_machines(replicas: int, shards: int, sp_size: int, num_nodes: int) -> None:
    layout = Layout(replicas, shards, sp_size)
    if layout.world_size % num_nodes:
        return
    placement = Placement(layout, num_nodes)
    at = {rank: (rank // (shards * sp_size), rank // placement.gpus_per_node) for rank in range(layout.world_size)}
    for node in range(num_nodes):
        assert placement.list_copies(node) == sorted({copy for copy, where in at.values() if where == node})
    crossing = sum(len({where for copy, where in at.values() if copy == each}) > 1 for each in range(replicas))
    assert placement.num_crossing_copies == (crossing if replicas > 1 else 0)


@given(st.integers(1, 24), st.integers(1, 12))
def test_the_worst_placed_rank_of_a_row(sp_size: int, per_node: int) -> None:
    world = sp_size * per_node  # after so many ranks the pattern repeats
    near = [
        sum(peer // per_node == rank // per_node for peer in range(start, start + sp_size))
        for start in range(0, world, sp_size)
        for rank in range(start, start + sp_size)
    ]
    assert count_near_ranks(sp_size, per_node) == min(near)


@given(st.integers(1, 12), st.integers(1, 3), st.integers(2, 4), st.integers(1, 6), st.sampled_from(["7B", "8B"]))
def test_a_warning_names_a_layout_that_is_legal_and_better(
    sp_size: int, replicas: int, num_nodes: int, shards: int, model: str
) -> None:
    """28 heads, which rings share, or 32. What is named is tried."""
    shape = get_shape({"7B": "Qwen/Qwen2.5-7B", "8B": "meta-llama/Llama-3.1-8B"}[model])
    layout = Layout(replicas, shards, sp_size)
    if layout.world_size % num_nodes:
        return
    placement = Placement(layout, num_nodes)
    text = explain_crossing(placement, None, shape)
    assert (text != "") == (placement.num_crossing > 0)
    if named := re.search(r"sp_size (\d+)(?:, ring_size (\d+))? with dp_shard_size (\d+) would not cross", text):
        better = Layout(replicas, int(named[3]), int(named[1]))
        assert int(named[2] or 1) in shape.list_ring_sizes(better.sp_size)
        assert better.world_size == layout.world_size
        assert Placement(better, num_nodes).num_crossing == 0
        legal = [size for size in range(better.sp_size, sp_size) if shape.list_ring_sizes(size)]
        alike = [Layout(replicas, layout.world_size // (replicas * size), size) for size in legal]
        inside = [each for each in alike if each.world_size == layout.world_size
                  and not Placement(each, num_nodes).num_crossing]  # fmt: skip
        assert inside == [better], "it is the largest"
    if named := re.search(r"with ring_size (\d+) only keys and values would cross", text):
        ring = int(named[1])
        assert ring in shape.list_ring_sizes(sp_size)
        assert (
            Placement(replace(layout, ring_size=ring), num_nodes).num_crossing_heads == 0 < placement.num_crossing_heads
        )


def test_a_warning_names_the_better_layout(snapshot: SnapshotAssertion) -> None:
    """None on a ring where rows cannot be dealt to one: the hybrid's."""
    llama, hybrid = get_shape("meta-llama/Llama-3.1-8B"), get_shape("LiquidAI/LFM2-1.2B")
    narrow, wide = Placement(Layout(1, 3, 4), 2), Placement(Layout(1, 1, 16), 4)
    ring = Placement(Layout(1, 3, 4, 2), 2)
    asked = ((narrow, llama), (narrow, hybrid), (ring, llama), (wide, llama), (wide, hybrid))
    assert [explain_crossing(placement, None, shape) for placement, shape in asked] == snapshot


H100 = load_hardware().get_gpu("h100-80gb")
WIDE = Job(get_shape("meta-llama/Llama-3.1-8B"), Layout(1, 2, 16, 2), 2**16, Levers(tiled_loss=True, tiled_mlp=True))


def test_rows_that_leave_a_machine_without_need_are_shown_the_layout_inside(snapshot: SnapshotAssertion) -> None:
    """Its time is for as many tokens; a step keeps its rows where accumulation can shrink."""
    inside = find_layout_inside(WIDE, H100, WIDE, [])
    assert (inside.layout, inside.accumulation, inside.rows_per_step) == (Layout(1, 4, 8), 1, (4, 2))
    narrow = replace(WIDE, layout=inside.layout)
    assert inside.own_seconds == compute_speed(WIDE, H100).step_seconds
    assert inside.seconds == compute_speed(narrow, H100).step_seconds / 2
    often = replace(WIDE, accumulation=4)
    kept = find_layout_inside(often, H100, often, [])
    assert (kept.accumulation, kept.rows_per_step) == (2, (8, 8))
    assert kept.seconds == compute_speed(replace(narrow, accumulation=2), H100).step_seconds
    fixed = replace(inside, seconds=1.5, own_seconds=2.0)
    costs = CrossingCosts((2.0, 1.0), (0.0, 0.0), fixed)
    shown = [format_inside(fixed, 2), format_inside(replace(kept, seconds=1.5, own_seconds=2.0), 1)]
    assert [*shown, explain_crossing(Placement(WIDE.layout, 4), costs, WIDE.shape)] == snapshot


def test_no_layout_inside_is_named_where_none_is_needed_or_fits(snapshot: SnapshotAssertion) -> None:
    narrow = replace(WIDE, layout=Layout(1, 4, 8))
    assert find_layout_inside(narrow, H100, narrow, []) is None, "no row leaves its machine"
    assert find_layout_inside(WIDE, replace(H100, gpus_per_node=16), WIDE, []) is None
    ledgers = [weigh_ledger(each) for each in (WIDE, narrow)]
    needed = [ledger.gpu_peak_bytes + ledger.uncertainty_bytes for ledger in ledgers]
    small = replace(H100, memory_bytes=sum(needed) // 2)
    assert fits(WIDE, small)
    assert find_layout_inside(WIDE, small, WIDE, []) is None, "rows must leave the machine to fit"
    placement, none = Placement(Layout(1, 3, 4), 2), CrossingCosts((2.0, 1.0), (0.0, 0.0))
    assert explain_crossing(placement, none, WIDE.shape) == snapshot, "what does not fit is not named"


def test_a_run_says_which_machine_this_is_and_warns(snapshot: SnapshotAssertion) -> None:
    words = ["parallel.sp_size=16", "parallel.ring_size=1", "parallel.dp_shard_size=2"]
    valid = validate_recipe(ROOT / "recipes" / "qwen3-32b-128k-4x8gpu.yaml", words)
    nodes = find_nodes(32, {"NNODES": "4", "NODE_RANK": "1", "MASTER_ADDR": "zeta"})
    shown = format_start(valid, nodes.describe(), nodes.count)
    assert [line for line in shown.splitlines() if line.startswith(("machines ", "warning "))] == snapshot


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sp = draw(st.sampled_from(list_divisors(draw(st.integers(1, 64)))))
    shard = draw(st.integers(1, max(1, 4096 // sp)))
    return Layout(draw(st.integers(1, max(1, 4096 // (sp * shard)))), shard, sp)


@given(layouts())
def test_sp_groups_partition_the_world(layout: Layout) -> None:
    groups, size = layout.sp_groups, layout.sp_size
    assert sorted(chain.from_iterable(groups)) == list(range(layout.world_size))
    assert {len(group) for group in groups} == {size}
    for index, group in enumerate(groups[:5]):
        assert list(group) == list(range(group[0], group[0] + size)), "ranks of a row are neighbours"
        assert {layout.get_dp_index(rank) for rank in group} == {index}


def test_an_empty_axis_is_refused(snapshot: SnapshotAssertion) -> None:
    assert explain(Layout, 0, 1, 1, error=ValueError) == snapshot


@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert list_divisors(number) == [n for n in range(1, number + 1) if number % n == 0]
