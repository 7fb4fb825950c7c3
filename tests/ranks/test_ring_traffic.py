"""Compares the bytes that the speed model gives to the exchange of heads and to a ring with those that ranks trade."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.attention import Problem
from support.model_shapes import get_shape
from support.rank_pool import run_on_ranks
from test_ring import NEVER, count_traffic

from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.speed import compute_exchange_bytes, compute_ring_bytes

LLAMA = get_shape("meta-llama/Llama-3.1-8B")


def make_job(problem: Problem, sp_size: int, ring_size: int) -> Job:
    """One layer of that many heads, with numbers of one byte."""
    (kind,) = LLAMA.layer_kinds
    assert kind.attention is not None
    sizes = {"num_heads": problem.heads, "num_kv_heads": problem.kv_heads, "head_dim": problem.dim}
    mixer = replace(kind.attention, **sizes, value_head_dim=problem.dim)
    shape = replace(LLAMA, **sizes, layers=(replace(kind, mixers=(mixer,)),), num_layers=1)
    levers = Levers(gradient_checkpointing=False, head_chunks=problem.chunks)
    layout = Layout(1, 1, sp_size, ring_size)
    return Job(shape, layout, problem.tokens, levers, dtype_bytes=1)


@pytest.mark.parametrize("chunks", [1, pytest.param(2, marks=pytest.mark.full), 4])
@pytest.mark.parametrize(("ring_size", "num_ranks"), [(2, 4), pytest.param(3, 6, marks=pytest.mark.full)])
def test_bytes_are_those_of_the_speed_model(ring_size: int, num_ranks: int, chunks: int) -> None:
    """Each chunk of heads exchanges and fetches the keys and values of its own heads, so that several chunks bring a
    shared one several times."""
    problem = Problem(16, 2, 8, (96,), chunks=chunks)
    job = make_job(problem, num_ranks, ring_size)
    exchanged, traded = [], []
    for forward, backward, _ in run_on_ranks(num_ranks, count_traffic, problem, ring_size, NEVER):
        assert (len(forward), len(backward)) == (3 * chunks, 4 * chunks)
        traded.append([sum(forward[1::3]), sum(backward[1::4]), sum(backward[2::4])])
        exchanged.append(sum(forward + backward) - sum(traded[-1]))
    of_others = 1 - ring_size / num_ranks  # what a rank keeps is no traffic
    assert {number * of_others for number in exchanged} == {compute_exchange_bytes(job)}
    busiest = [max(sent) for sent in zip(*traded, strict=True)]  # all wait for it: in the forward, and twice after it
    assert sum(busiest) == pytest.approx(compute_ring_bytes(job))
