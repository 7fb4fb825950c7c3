"""Chunks of heads of which the next is exchanged while one attends: output and every gradient are those of chunks one
after another, bit for bit; exchanges start before the attention that hides them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from support.attention import Problem, compute_reference, make_tensors
from support.random_recipes import YARDSTICK, read_recipe, run_phases, trace_phases
from support.random_recipes import measure_errors as measure_phases
from support.rank_pool import run_on_ranks
from support.split_attention import (
    ALWAYS,
    NEVER,
    TOLERANCE,
    attend,
    compare,
    deal,
    draw_problems,
    gather_rows,
    list_tokens,
)  # fmt: skip
from support.tiers import FULL, TIER, sample
from test_ring_traffic import Checkpointing, list_names, log_events
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ulysses_cli.train.attention.kernels import operators
from ulysses_cli.train.memory.checkpointing import DeviceStorage, SavedResults

Results = dict[str, Tensor]


def make_layer(
    problem: Problem, ring_size: int, max_shares: float, checkpointing: Checkpointing, *, overlaps: bool
) -> tuple[Callable[..., Tensor], dict[str, Tensor], Tensor, Tensor]:
    """A layer, this rank's inputs, its gradient of the output, and the tokens of every rank."""
    order, tensors = deal(problem, ring_size), make_tensors(problem)
    tokens = list_tokens(order, problem.batch, dist.get_world_size() // ring_size)
    own = tokens[dist.get_rank()]
    leaves = {name: tensors[name].flatten(0, 1)[own].clone().requires_grad_() for name in "qkv"}
    if problem.has_sinks:
        leaves["sinks"] = tensors["sinks"].clone().requires_grad_()

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return attend((q, k, v), problem, ring_size, max_shares, order, sinks, overlaps=overlaps)

    layer: Callable[..., Tensor] = partial(SavedResults(DeviceStorage()).call, run) if checkpointing is True else run
    if checkpointing:
        layer = partial(checkpoint, layer, use_reentrant=False)
    return layer, leaves, tensors["dout"].flatten(0, 1)[own], tokens


def run_layer(problem: Problem, *how: Any, overlaps: bool) -> Results:
    layer, leaves, dout, _ = make_layer(problem, *how, overlaps=overlaps)
    out = layer(*leaves.values())
    out.backward(dout)
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}}


def find_differences(cases: Sequence[tuple[Problem, float, Checkpointing]], ring_size: int) -> list[str]:
    """Runs each case in turn and overlapped, and names what differs in any bit."""
    found = []
    for problem, *how in cases:
        expected, result = (run_layer(problem, ring_size, *how, overlaps=overlaps) for overlaps in (False, True))
        assert result.keys() == expected.keys()
        found += [f"{problem} {how} {name}" for name in expected if not torch.equal(result[name], expected[name])]
    return found


CASES = [
    Problem(8, 8, lengths=(5, 30, 1, 1, 27), chunks=2),
    Problem(8, 1, lengths=(64,), chunks=2),  # fewer key heads than ranks
    Problem(24, 3, lengths=(5, 30, 1, 1, 27), chunks=6),  # spans without a pattern, gradients that are added
    Problem(12, 12, dim=12, value_dim=8, lengths=(21, 43), chunks=3),  # widths as of MLA: two collectives
    Problem(8, 2, batch=2, lengths=(10, 22, 24, 8), window=9, softcap=2.0, has_sinks=True, chunks=2),
    Problem(8, 2, lengths=(24, 5, 6, 29), shared=(0, 20, 1, 24), has_sinks=True, chunks=2),
]
MODES: tuple[Checkpointing, ...] = (False, True, "full")
LAYOUTS = [(1, 2), (2, 2), *(pytest.param(layout, marks=pytest.mark.check) for layout in [(1, 4), (2, 1)])]


@pytest.mark.parametrize("dtype", sample([torch.float64, torch.bfloat16], [torch.float64]), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"ring {layout[0]} x {layout[1]}")
def test_values_are_those_of_chunks_one_after_another(layout: tuple[int, int], dtype: torch.dtype) -> None:
    ring_size, ulysses_size = layout
    ways = (NEVER,) if ring_size == 1 else (ALWAYS, NEVER)
    fitting = [replace(each, dtype=dtype) for each in CASES if each.heads % (ulysses_size * each.chunks) == 0]
    cases = [case for case in product(fitting, ways, MODES) if not case[0].shared or ring_size == 1]
    for differences in run_on_ranks(ring_size * ulysses_size, find_differences, cases, ring_size):
        assert differences == []


@pytest.mark.check
@settings(max_examples=500 if TIER == FULL else 10)
@given(draw_problems(4, [1]))
def test_random_problems(case: tuple[Problem, int]) -> None:
    problem, _ = case
    for differences in run_on_ranks(4, find_differences, [(problem, NEVER, False)], 1):
        assert differences == []


def measure_errors(problem: Problem) -> dict[str, float]:
    layer, leaves, dout, tokens = make_layer(problem, 1, NEVER, False, overlaps=True)
    out = layer(*leaves.values())
    out.backward(dout)
    result = {"out": gather_rows(out.detach(), tokens)}
    result |= {f"d{name}": gather_rows(leaves[name].grad, tokens) for name in "qkv"}
    expected = compute_reference(problem, make_tensors(problem))
    return {name: compare(result[name], expected[name]) for name in result}


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.check)])
def test_values_are_those_of_one_process(num_ranks: int) -> None:
    for errors in run_on_ranks(num_ranks, measure_errors, Problem(8, 2, lengths=(5, 30, 1, 1, 27), chunks=2)):
        assert max(errors.values()) < TOLERANCE[torch.float64], errors


def list_steps(problem: Problem, overlaps: bool) -> tuple[list[str], list[str]]:
    """What a rank does, in order, in a forward and in a backward."""
    layer, leaves, dout, _ = make_layer(problem, 1, NEVER, False, overlaps=overlaps)
    with log_events() as events:
        out = layer(*leaves.values())
        num_forward = len(events)
        out.backward(dout)
    return list_names(events[:num_forward]), list_names(events[num_forward:])


def test_the_next_chunk_travels_while_one_attends() -> None:
    """A chunk starts before the kernel of the one before, and what a kernel made returns while the next one runs."""
    come, arrive, kernel = "heads", "heads has arrived", "kernel"
    in_turn = [come, kernel, come] * 3
    expected = [come, come, arrive, kernel, come]  # the first two chunks start, the first attends and returns
    expected += [come, arrive, kernel, arrive, come]  # the third starts, the second attends, the first has returned
    expected += [arrive, kernel, arrive, come, arrive]
    problem = Problem(12, 12, lengths=(64,), chunks=3)
    for overlaps, steps in ((False, in_turn), (True, expected)):
        for forward, backward in run_on_ranks(2, list_steps, problem, overlaps):
            assert forward == backward == steps


def fail_once(problem: Problem) -> list[str]:
    """Attention fails on all ranks while a chunk travels, as where memory runs out; then the layer runs again."""
    kernel, calls = operators.KERNELS["sdpa"], list[int]()

    def fail(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no memory")
        return kernel.forward(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(operators.KERNELS, "sdpa", kernel._replace(forward=fail))
        with pytest.raises(RuntimeError, match="no memory"):
            run_layer(problem, 1, NEVER, False, overlaps=True)
        return find_differences([(problem, NEVER, False)], 1)


def test_a_failure_leaves_no_exchange_behind() -> None:
    assert run_on_ranks(2, fail_once, Problem(8, 8, lengths=(64,), chunks=4)) == [[], []]


def test_one_rank_exchanges_nothing() -> None:
    """Chunks of a rank that shares its row with none, or on a ring alone, have nothing to wait for."""
    (steps,) = run_on_ranks(1, list_steps, Problem(8, 8, lengths=(64,), chunks=2), True)
    assert steps == (["kernel"] * 2, ["kernel"] * 2)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(59, marks=pytest.mark.full, id="ring 4 x 2, kept results"),
        pytest.param(101, marks=pytest.mark.full, id="two replicas, kept results"),
        pytest.param(128, marks=pytest.mark.check, id="latent attention, no recomputation"),
    ],
)
def test_a_run_on_sizes_counts_chunks_under_way(number: int) -> None:
    """In recipes of the yardstick whose backward is fullest in attention."""
    row = json.loads(YARDSTICK.read_text())["rows"][number]
    settings = {**row["recipe"], "memory": {**row["recipe"]["memory"], "overlap_exchange": True}}
    drawn = read_recipe(settings)
    counted = run_phases(drawn)
    assert counted["backward"] > 1.1 * row["traced"]["backward"]
    errors = measure_phases(counted, trace_phases(drawn))
    assert errors == dict.fromkeys(errors, pytest.approx(0, abs=3e-4))
