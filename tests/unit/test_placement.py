"""Compares where ranks stand on machines with a count of them one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.paths import ROOT
from typer.testing import CliRunner

from ulysses_cli.cli import app
from ulysses_cli.plan.layout import Layout, Placement, count_near_ranks


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


@given(st.integers(1, 24), st.integers(1, 12))
def test_the_worst_placed_rank_of_a_row(sp_size: int, per_node: int) -> None:
    world = sp_size * per_node  # after so many ranks the pattern repeats
    near = [
        sum(peer // per_node == rank // per_node for peer in range(start, start + sp_size))
        for start in range(0, world, sp_size)
        for rank in range(start, start + sp_size)
    ]
    assert count_near_ranks(sp_size, per_node) == min(near)


def test_the_command_draws_machines_and_warns() -> None:
    def run(*words: str) -> str:
        result = CliRunner().invoke(app, ["validate-config", str(ROOT / "recipes" / "tiny-cpu.yaml"), *words])
        return f"{result.exit_code} {result.output}"

    good = run("--nnodes", "2", "parallel.sp_size=2", "parallel.dp_shard_size=4")
    assert "0: [0 1] [2 3]\n" in good
    assert "1: [4 5] [6 7]\n" in good
    assert "cross machines" not in good
    needless = run("--nnodes", "2", "--gpu", "h100", "parallel.sp_size=4", "parallel.dp_shard_size=3")
    assert "0: [0 1 2 3] [4 5]\n" in needless
    assert "1 row of 3 cross machines without need: sp_size 4 does not divide 6 GPUs" in needless
    assert "of a step, on one machine" in needless
    needed = run("--nnodes", "2", "parallel.sp_size=4", "parallel.dp_shard_size=1")
    assert "every row crosses machines: sp_size 4 is more than 2 GPUs; add --gpu" in needed
    assert run("--nnodes", "3", "parallel.sp_size=4").startswith("2 ")
