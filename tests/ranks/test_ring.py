"""Attention on a ring, alone and with Ulysses inside: planted faults, what travels, and where kernels reach."""

import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from support.attention import Problem, make_tensors
from support.rank_pool import run_on_ranks
from support.refusals import explain
from support.split_attention import (
    ALWAYS,
    DOCUMENTS,
    NEVER,
    Collectives,
    Layout,
    attend,
    check,
    deal,
    make_axes,
    make_local_rows,
    measure_errors,
    run_split,
)  # fmt: skip
from syrupy.assertion import SnapshotAssertion
from torch import Tensor

from ulysses_cli.plan.rows import indexing
from ulysses_cli.plan.rows.ring import Order, TokenRun
from ulysses_cli.train.attention import ring
from ulysses_cli.train.attention.kernels import operators


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "heads"),
    [((8, 1), [(9, 3), (9, 9), (7, 1)]), ((4, 2), [(14, 2), (6, 3)]), ((2, 8), [(8, 8), (8, 2), (8, 1)])],
    ids=str,
)
def test_more_ranks_than_heads(layout: Layout, heads: list[tuple[int, int]]) -> None:
    """9 heads on 8 ranks, and 8 heads on 16."""
    grid = product(heads, (DOCUMENTS["one"], DOCUMENTS["off-edges"]), (None, 17))
    check(layout, *(Problem(*pair, lengths=lengths, window=window) for pair, lengths, window in grid))


@pytest.mark.check
def test_large_logits_do_not_overflow() -> None:
    """Logits of many hundreds, where exp of any of them is infinite in float32."""
    check((2, 2), Problem(4, 2, lengths=(96,), scale=60.0), Problem(4, 2, lengths=(40, 56), scale=60.0, window=30))


def measure_with_a_fault(problem: Problem, ring_size: int, way: float, fault: str) -> float:
    """Returns the largest error of any tensor when a fault is planted in this rank's attention."""
    with pytest.MonkeyPatch.context() as patch:
        for place, name, replaced in FAULTS.get((way, fault), ()):
            patch.setattr(place, name, replaced)
        return max(measure_errors(problem, ring_size, ways=[way]).values(), default=0.0)


def run_backward_by_halves(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *row: Any) -> Any:
    """Uses a log-sum-exp that knows half of the keys only."""
    halved = torch.cat([torch.zeros_like(k[: k.size(0) // 2]), k[k.size(0) // 2 :]])
    _, own_lse = operators.attend(q, halved, v, None, *row)
    return operators.run_backward(dout, q, k, v, out, own_lse, *row)


def run_backward_by_blocks(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *row: Any) -> Any:
    """Uses the log-sum-exp of the round's own keys, as rings did that kept each block's own."""
    _, own_lse = operators.attend(q, k, v, None, *row)
    return operators.run_backward(dout, q, k, v, out, own_lse, *row)


return_gradients = ring.return_gradients  # before a fault is planted in its place


def return_gradients_twice(dkeys: Tensor, dvalues: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return return_gradients(2 * dkeys, dvalues, *arguments)


def send_twice(self: ring.ReturningGradients, joined: Tensor, after: Any) -> None:
    send(self, 2 * joined, after)


def merge_by_plain_exponentials(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    weight, part_weight = torch.exp(lse), torch.exp(part_lse)
    total = weight + part_weight
    out.mul_((weight / total).mT[..., None]).add_(part_out * (part_weight / total).mT[..., None])
    lse.copy_(torch.log(total))


send = ring.ReturningGradients.send
FAULTS: dict[tuple[float, str], list[tuple[Any, str, Any]]] = {
    (NEVER, "log-sum-exp of a block"): [(ring, "run_backward", run_backward_by_halves)],
    (ALWAYS, "log-sum-exp of a block"): [(ring, "run_backward", run_backward_by_blocks)],
    (NEVER, "keys of another rank count twice"): [(ring, "return_gradients", return_gradients_twice)],
    (ALWAYS, "keys of another rank count twice"): [(ring.ReturningGradients, "send", send_twice)],
    (ALWAYS, "exp of a logit"): [(ring, "merge", merge_by_plain_exponentials)],
}


@pytest.mark.parametrize(("way", "fault"), [(ALWAYS, "none"), (NEVER, "none"), *FAULTS])
def test_planted_faults_show(way: float, fault: str) -> None:
    """Logits of many hundreds, where exp of any is infinite in float64 too."""
    problem = Problem(4, 2, lengths=(70, 26), scale=300.0 if fault == "exp of a logit" else 0.3)
    error, *_ = run_on_ranks(4, measure_with_a_fault, problem, 2, way, fault)
    assert error < 1e-12 if fault == "none" else error > 1e-2


def deal_twice(problem: Problem) -> str:
    twice = tuple((TokenRun(16, 32), TokenRun(start, start + 16)) for start in (0, 48))
    return explain(measure_errors, problem, 2, twice, error=ValueError)


def test_a_chunk_that_is_dealt_twice_is_refused(snapshot: SnapshotAssertion) -> None:
    assert set(run_on_ranks(2, deal_twice, Problem(4, 2, lengths=(20, 30, 14)))) == snapshot


def count_traffic(problem: Problem, ring_size: int, way: float) -> tuple[list[int], list[int], list[int]]:
    """Counts the elements that this rank hands to each collective of a forward and of a backward, and what it should
    send to each rank of its ring, in tokens."""
    rows, needed = make_local_rows(problem), list_needed(problem, deal(problem, ring_size))
    with Collectives() as forward:
        out = attend(rows, problem, ring_size, way)
    with Collectives() as backward:
        out.sum().backward()
    return forward.sent, backward.sent, [make_axes(ring_size)[1].rank, *map(len, needed.values())]


def list_needed(problem: Problem, order: Order) -> dict[tuple[int, int], set[int]]:
    """The tokens of each rank whose keys another needs, by the definition of the mask, token by token."""
    owner = {token: at for at, runs in enumerate(order) for run in runs for token in range(*run)}
    starts = [0]
    for length in problem.lengths:
        starts += [starts[-1]] * (length - 1) + [starts[-1] + length]
    needed: dict[tuple[int, int], set[int]] = {pair: set() for pair in product(range(len(order)), repeat=2)}
    for token, at in owner.items():
        first = max(starts[token], token - (problem.window or token + 1) + 1)
        for key in range(first, token + 1):
            needed[owner[key], at] |= {key} if owner[key] != at else set()
    return needed


CASES: list[tuple[int | None, tuple[int, ...]]] = [(None, (96,)), (None, (5, 30, 61)), (9, (96,)), (5, (8,) * 12)]


@pytest.mark.parametrize(
    "layout",
    [
        (2, 2),
        pytest.param((4, 1), marks=pytest.mark.check),
        *(pytest.param(layout, marks=pytest.mark.full) for layout in [(1, 4), (6, 1), (3, 2), (2, 4)]),
    ],
    ids=str,
)
def test_one_fetch_brings_what_the_mask_needs(layout: Layout) -> None:
    """The exchange of heads each way, where several ranks share them. Between them only keys and values that a rank of
    the ring needs, (h_k) (D + V) numbers for each; none where nobody needs any. One round of two ranks sends what one
    fetch does."""
    ring_size, ulysses_size = layout
    for (window, lengths), way in product(CASES, (ALWAYS, NEVER) if ring_size == 2 else (NEVER,)):
        problem = Problem(4 * ulysses_size, 2 * ulysses_size, 8, lengths, window=window)
        local, own = problem.tokens // ring_size * 8 * (ulysses_size > 1), 2 * 2 * 8
        heads_in, heads_out = ([8 * local], [4 * local]) if local else ([], [])
        for forward, backward, (rank, *counts) in run_on_ranks(
            ring_size * ulysses_size, count_traffic, problem, ring_size, way
        ):
            sent, received = (
                own * sum(part) for part in (counts[rank * ring_size :][:ring_size], counts[rank::ring_size])
            )
            fetch, back = ([sent], [received]) if any(counts) else ([], [])
            assert ring_size != 2 or bool(fetch) == (lengths != (8,) * 12)
            assert forward == [*heads_in, *fetch, *heads_out]
            assert backward == [*heads_out, *fetch, *back, *heads_in]


@pytest.mark.check
@pytest.mark.parametrize("lengths", [(96,), (5, 30, 61), (48, 48)])
def test_each_round_has_one_collective_each_way(lengths: tuple[int, ...]) -> None:
    """Ring 4: block by block the same bytes as one fetch, the next requested before one is computed; a round in which
    no rank needs anything has no collective."""
    problem, size = Problem(4, 2, 8, lengths), 4
    for forward, backward, (rank, *counts) in run_on_ranks(size, count_traffic, problem, size, ALWAYS):
        needed = [[2 * 2 * 8 * counts[size * source + target] for target in range(size)] for source in range(size)]
        shifts = [t for t in range(1, size) if any(needed[at][(at + t) % size] for at in range(size))]
        fetched = [needed[rank][(rank + shift) % size] for shift in shifts]
        returned = [needed[(rank - shift) % size][rank] for shift in shifts]
        assert forward == fetched
        following = [*fetched[1:], None]
        steps = [number for pair in zip(following, returned, strict=True) for number in pair if number is not None]
        assert backward == [fetched[0], *steps]


def run_within(problem: Problem, ring_size: int, limit: int) -> tuple[int, int, bool]:
    """Returns the farthest element that a kernel reaches in any tensor, without and with indices that end at `limit`,
    and whether the results are the same bits."""
    tensors, results, reaches = make_tensors(problem), [], []
    for bound in (indexing.INT32_LIMIT, limit):
        reached = [0]

        def record(function: Any, *arguments: Any, reached: list[int] = reached) -> Any:
            given = [each for each in arguments if isinstance(each, Tensor) and each.dim() == 3]
            reached[0] = max(reached[0], *(each.size(0) * each.stride(0) for each in given))
            return function(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(indexing, "INT32_LIMIT", bound)
            kernel = operators.KERNELS["sdpa"]
            recorded = kernel._replace(
                forward=partial(record, kernel.forward), backward=partial(record, kernel.backward)
            )
            patch.setitem(operators.KERNELS, "sdpa", recorded)
            results.append(run_split(problem, tensors, ring_size, ALWAYS))
            reaches.append(reached[0])
    return reaches[0], reaches[1], all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.check
@pytest.mark.parametrize(
    ("layout", "lengths", "limit"),
    [((1, 1), (1536,), 110_000), ((2, 2), (1536,), 60_000), ((2, 2), (256,) * 6, 60_000)],
)
def test_no_kernel_reaches_past_its_indices(layout: Layout, lengths: tuple[int, ...], limit: int) -> None:
    """Chunks of heads are views of wider buffers: those that would reach too far are copied. Documents, each of which
    takes room besides its tokens, are given to kernels in several calls."""
    problem = Problem(8, 2, 32, lengths, chunks=(4 if layout == (1, 1) else 2), dtype=torch.bfloat16)
    for before, after, is_same in run_on_ranks(math.prod(layout), run_within, problem, layout[0], limit):
        assert after < limit <= before
        assert is_same
