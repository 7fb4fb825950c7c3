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


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.integers(1, 6))
def test_copies_of_weights_and_machines(replicas: int, shards: int, sp_size: int, num_nodes: int) -> None:
    layout = Layout(replicas, shards, sp_size)
    if layout.world_size % num_nodes:
        return
    placement = Placement(layout, num_nodes)
    at = {rank: (layout.get_coordinates(rank).dp_replicate, rank // placement.gpus_per_node)
          for rank in range(layout.world_size)}  # fmt: skip
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
    assert "of a step instead of" in needless
    needed = run("--nnodes", "2", "parallel.sp_size=4", "parallel.dp_shard_size=1")
    assert "every row crosses machines: sp_size 4 is more than 2 GPUs; validate-config with --gpu says" in needed
    assert run("--nnodes", "3", "parallel.sp_size=4").startswith("2 ")


def test_the_command_draws_copies_of_the_weights_and_warns() -> None:
    """The tiny model on machines of 4 GPUs: hpZ's groups are the replicas."""

    def run(*words: str) -> str:
        words = ("--nnodes", "2", "parallel.sp_size=2", *words)
        return CliRunner().invoke(app, ["validate-config", str(ROOT / "recipes" / "tiny-cpu.yaml"), *words]).output

    good = run("parallel.dp_replicate_size=2", "parallel.dp_shard_size=2")
    assert "ranks in brackets share a row, those beside a copy share its weights\n" in good
    assert "0: [0 1] [2 3]  copy 0\n" in good
    assert "1: [4 5] [6 7]  copy 1\n" in good
    assert "warning" not in good
    needless = run("--gpu", "h100", "parallel.dp_replicate_size=3", "parallel.dp_shard_size=2")
    assert "0: [0 1] [2 3] [4 5]  copies 0, 1\n" in needless
    assert "1 copy of the weights of 3 cross machines: 4 ranks each, machines of 6; " in needless
    assert "the backward's gather is predicted to take " in needless
    assert "dp_replicate_size 2 with dp_shard_size 3 keeps each inside a machine" in needless
    needed = run("--nnodes", "8", "parallel.sp_size=4", "parallel.dp_replicate_size=2", "parallel.dp_shard_size=2")
    assert "2 copies of the weights of 2 cross machines: 8 ranks each, machines of 2; " in needed
    assert "dp_replicate_size 1 gathers as fast" in needed
