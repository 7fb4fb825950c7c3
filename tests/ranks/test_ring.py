"""Compares attention on a ring, alone and with Ulysses inside, with plain attention on one process: output and every
gradient, in float64. Counts what travels."""

import math
from collections.abc import Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import Problem, compute_reference, draw_shared, make_tensors
from support.rank_pool import run_on_ranks
from support.tiers import FULL, TIER
from torch import Tensor

from ulysses_cli.plan.rows import indexing
from ulysses_cli.plan.rows.ring import Order, Ring, TokenRun, deal_rows
from ulysses_cli.train.attention import ring
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.attention.kernels import operators
from ulysses_cli.train.attention.kernels.native import Rule
from ulysses_cli.train.attention.ulysses import ulysses_attention
from ulysses_cli.train.processes.groups import SequenceAxis, make_sequence_axis


@cache
def make_axes(ring_size: int) -> tuple[SequenceAxis, SequenceAxis]:
    """Returns the axis of heads and the ring of this rank, as a layout makes them."""
    size, rank, axes = dist.get_world_size() // ring_size, dist.get_rank(), {}
    for kind, groups in (
        ("ulysses", [range(first, first + size) for first in range(0, size * ring_size, size)]),
        ("ring", [range(first, size * ring_size, size) for first in range(size)]),
    ):
        for ranks in groups:
            group = dist.new_group(list(ranks))
            if rank in ranks:
                axes[kind] = make_sequence_axis(group)
    return axes["ulysses"], axes["ring"]


def deal(problem: Problem, ring_size: int) -> Order:
    return deal_rows(problem.lengths, problem.batch, Ring(ring_size, ((problem.window, 1),)), problem.shared)


def list_tokens(order: Order, batch: int, ulysses_size: int) -> Tensor:
    """Returns the tokens of every rank, [ranks, B, S], numbered over all rows."""
    tokens = torch.tensor([[token for run in runs for token in range(*run)] for runs in order])
    return tokens.view(len(order), batch, ulysses_size, -1).transpose(1, 2).flatten(0, 1)


ALWAYS, NEVER = 0.0, 1e9  # max_shares of documents: keys come in rounds, or at once


def run_ring(
    problem: Problem, tensors: dict[str, Tensor], ring_size: int, max_shares: float, order: Order | None = None
) -> dict[str, Tensor]:
    """Runs this rank's share of the rows; every rank gets whole output and gradients."""
    axis, ring = make_axes(ring_size)
    order = order or deal(problem, ring_size)
    tokens = list_tokens(order, problem.batch, axis.size)
    own = tokens[dist.get_rank()]
    leaves = {
        name: tensors[name].flatten(0, 1)[own].transpose(1, 2).contiguous().requires_grad_() for name in ("q", "k", "v")
    }
    sinks = tensors["sinks"].clone().requires_grad_() if problem.has_sinks else None
    out = ulysses_attention(
        *(leaf.transpose(1, 2) for leaf in leaves.values()),
        make_documents(problem.lengths, order=order, max_shares=max_shares, shared=problem.shared),
        Rule(problem.scale, problem.window, problem.softcap),
        axis=axis,
        ring=ring,
        kernel="sdpa",
        sinks=sinks,
        num_head_chunks=problem.chunks,
    )
    out.backward(tensors["dout"].flatten(0, 1)[own])
    results = {"out": gather_rows(out.detach(), tokens)}
    for name, leaf in leaves.items():
        results[f"d{name}"] = gather_rows(leaf.grad.transpose(1, 2), tokens)
    if sinks is not None and sinks.grad is not None:
        dist.all_reduce(sinks.grad)
        results["dsinks"] = sinks.grad
    return results


def gather_rows(part: Tensor, tokens: Tensor) -> Tensor:
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    whole = torch.full((tokens.numel(), *part.shape[2:]), torch.nan, dtype=part.dtype)
    whole[tokens.flatten()] = torch.stack(parts).flatten(0, 2)
    return whole.view(part.size(0), -1, *part.shape[2:])


def measure_errors(
    problem: Problem, ring_size: int, order: Order | None = None, ways: Sequence[float] = (ALWAYS, NEVER)
) -> dict[str, float]:
    """Returns the largest difference from the reference, relative to the largest value, per tensor, of all ways in
    which keys come."""
    tensors = make_tensors(problem)
    results = [run_ring(problem, tensors, ring_size, max_shares, order) for max_shares in ways]
    if dist.get_rank():
        return {}  # all ranks have the same whole tensors
    expected, errors = compute_reference(problem, tensors), dict[str, float]()
    for result in results:
        assert result.keys() == expected.keys()
        for name in expected:
            errors[name] = max(errors.get(name, 0.0), compare(result[name], expected[name]))
    return errors


def compare(result: Tensor, expected: Tensor) -> float:
    assert result.shape == expected.shape
    if not bool(torch.isfinite(result).all()):
        return math.inf
    return ((result.double() - expected).abs().max() / expected.abs().max().clamp(min=0.1)).item()


TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def check(layout: tuple[int, int], *problems: Problem) -> None:
    """`layout`: the ring's size and that of Ulysses inside."""
    ring_size, ulysses_size = layout
    ring_errors, *_ = run_on_ranks(ring_size * ulysses_size, measure_all, problems, ring_size)
    for problem, errors in zip(problems, ring_errors, strict=True):
        assert max(errors.values()) < TOLERANCE[problem.dtype], (problem, errors)


def measure_all(problems: tuple[Problem, ...], ring_size: int) -> list[dict[str, float]]:
    return [measure_errors(problem, ring_size) for problem in problems]


# A ring of one rank is Ulysses alone, of which test_ulysses.py holds all of this in CI.
LAYOUTS = [(2, 2), *(pytest.param(layout, marks=pytest.mark.check) for layout in [(2, 1), (4, 1)])]
LARGE = [pytest.param(layout, marks=pytest.mark.full) for layout in [(2, 4), (3, 2), (1, 2), (1, 4)]]
IN_CI = [pytest.param((2, 2), marks=pytest.mark.check)]
IN_CI += [pytest.param(layout, marks=pytest.mark.full) for layout in [(2, 1), (4, 1), (2, 4), (3, 2), (1, 2), (1, 4)]]
DOCUMENTS = {
    "one": (96,), "on-edges": (24, 24, 48), "off-edges": (5, 30, 1, 1, 40, 19), "forty": (1,) * 30 + (3,) * 9 + (39,),
    "padded": (60, 13, 23),
}  # fmt: skip


def list_heads(ulysses_size: int) -> list[tuple[int, int]]:
    """Heads that no larger Ulysses could share: 7, 9 and 14 need a ring on 2, 4 or 8 ranks."""
    counts = [(4, 4), (8, 2), (4, 1), (7, 1), (7, 7), (9, 3), (14, 2), (6, 2), (28, 4)]
    return [(heads, kv_heads) for heads, kv_heads in counts if heads % ulysses_size == 0]


@pytest.mark.parametrize("layout", IN_CI, ids=str)
def test_heads(layout: tuple[int, int]) -> None:
    documents = DOCUMENTS["off-edges"]
    check(layout, *(Problem(*heads, lengths=documents) for heads in list_heads(layout[1])))


@pytest.mark.check
def test_heads_that_no_two_ranks_share() -> None:
    check((2, 1), *(Problem(*heads, lengths=DOCUMENTS["off-edges"]) for heads in [(7, 1), (9, 3)]))


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "heads"),
    [((8, 1), [(9, 3), (9, 9), (7, 1)]), ((4, 2), [(14, 2), (6, 3)]), ((2, 8), [(8, 8), (8, 2), (8, 1)])],
    ids=str,
)
def test_more_ranks_than_heads(layout: tuple[int, int], heads: list[tuple[int, int]]) -> None:
    """9 heads on 8 ranks, and 8 heads on 16."""
    grid = product(heads, (DOCUMENTS["one"], DOCUMENTS["off-edges"]), (None, 17))
    check(layout, *(Problem(*pair, lengths=lengths, window=window) for pair, lengths, window in grid))


@pytest.mark.parametrize("layout", [*LAYOUTS, *LARGE], ids=str)
def test_documents_and_windows(layout: tuple[int, int]) -> None:
    """Windows are shorter and longer than a rank's share and than a dealt chunk."""
    heads = {1: 3, 2: 6, 4: 4}[layout[1]]
    for lengths in DOCUMENTS.values():
        windows = (None, 1, 3, 17, 50)
        check(layout, *(Problem(heads, 1, lengths=lengths, window=window) for window in windows))


@pytest.mark.parametrize("layout", IN_CI, ids=str)
def test_rules_and_batches(layout: tuple[int, int]) -> None:
    off = DOCUMENTS["off-edges"]
    check(
        layout,
        Problem(4, 4, softcap=2.0, lengths=off),
        Problem(4, 2, has_sinks=True, lengths=off),
        Problem(8, 2, has_sinks=True, softcap=3.0, window=9, chunks=2, lengths=off),
        Problem(4, 2, batch=3, lengths=(20, 28, 48, 1, 47)),
        Problem(8, 4, batch=2, lengths=(20, 28, 48), chunks=2, has_sinks=True),
        Problem(4, 2, dim=12, value_dim=8, lengths=off, has_sinks=True),
        Problem(8, 2, dim=5, value_dim=9, chunks=2, window=9, lengths=off),
        Problem(4, 1, lengths=(24,)),
    )


@pytest.mark.parametrize("layout", IN_CI, ids=str)
def test_branches_behind_one_copy_of_their_prompt(layout: tuple[int, int]) -> None:
    lengths, shared = (50, 9, 7, 30), (0, 41, 0, 5)
    check(
        layout,
        Problem(4, 2, lengths=lengths, shared=shared),
        Problem(8, 2, lengths=lengths, shared=shared, window=13, has_sinks=True, softcap=3.0, chunks=2),
        Problem(4, 2, lengths=(20, 36, 8, 32), shared=(0, 20, 12, 1), window=30),
        Problem(4, 2, batch=2, lengths=(20, 28, 48), shared=(0, 19, 0)),
    )


@pytest.mark.parametrize("layout", IN_CI[:1] + IN_CI[2:], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_precision(dtype: torch.dtype, layout: tuple[int, int]) -> None:
    rules: list[dict[str, Any]] = [{}, {"window": 9}, {"has_sinks": True}, {"softcap": 2.0}, {"chunks": 2}]
    check(layout, *(Problem(8, 2, 16, DOCUMENTS["off-edges"], dtype=dtype, **rule) for rule in rules))


@st.composite
def problems(draw: st.DrawFn, num_ranks: int, ring_sizes: Sequence[int]) -> tuple[Problem, int]:
    """Draws a ring, heads that the rest of the ranks can share, any documents and any rule."""
    ring_size = draw(st.sampled_from(ring_sizes))
    ulysses_size, kv_heads = num_ranks // ring_size, draw(st.integers(1, 4))
    heads = ulysses_size * kv_heads * draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    multiple = num_ranks * draw(st.sampled_from([1, 2, 8]))
    lengths.append(multiple - sum(lengths) % multiple)
    problem = Problem(
        shared=draw_shared(draw, lengths) if draw(st.booleans()) else (),
        heads=heads,
        kv_heads=kv_heads,
        dim=draw(st.integers(1, 9)),
        value_dim=draw(st.sampled_from([0, 0, 3, 11])),
        lengths=tuple(lengths),
        window=draw(st.none() | st.integers(1, 80)),
        softcap=draw(st.none() | st.floats(0.5, 10)),
        has_sinks=draw(st.booleans()),
        chunks=draw(st.sampled_from([n for n in range(1, 5) if heads // ulysses_size % n == 0])),
    )
    return problem, ring_size


@pytest.mark.check
@settings(max_examples=500 if TIER == FULL else 5)
@given(problems(4, [2, 4]))
def test_random_problems(case: tuple[Problem, int]) -> None:
    problem, ring_size = case
    check((ring_size, 4 // ring_size), problem)


@pytest.mark.full
@settings(max_examples=200)
@given(problems(6, [3, 2, 6]))
def test_random_problems_on_six_ranks(case: tuple[Problem, int]) -> None:
    problem, ring_size = case
    check((ring_size, 6 // ring_size), problem)


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
    try:
        measure_errors(problem, 2, twice)
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_chunk_that_is_dealt_twice_is_refused() -> None:
    for message in run_on_ranks(2, deal_twice, Problem(4, 2, lengths=(20, 30, 14))):
        assert message == "tokens 16 to 32 of the rows belong to two ranks of the ring"


def count_traffic(problem: Problem, ring_size: int, way: float) -> tuple[list[int], list[int], list[int]]:
    """Counts the elements that this rank hands to each collective of a forward and of a backward, and what it should
    send to each rank of its ring, in tokens."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.sent: list[int] = []

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(op).startswith("c10d"):
                assert str(op) == "c10d.alltoall_base_.default"
                self.sent.append(args[1].numel())
            return op(*args, **(kwargs or {}))

    axis, ring = make_axes(ring_size)
    order, local = deal(problem, ring_size), problem.tokens // dist.get_world_size()
    q, k, v = (make_tensors(problem)[name][:, :local].clone().requires_grad_() for name in "qkv")
    documents = make_documents(problem.lengths, order=order, max_shares=way)
    rule = Rule(problem.scale, problem.window)
    split = {"axis": axis, "ring": ring, "num_head_chunks": problem.chunks}
    with Counter() as forward:
        out = ulysses_attention(q, k, v, documents, rule, **split, kernel="sdpa")
    with Counter() as backward:
        out.sum().backward()
    return forward.sent, backward.sent, [ring.rank, *(len(needed) for needed in list_needed(problem, order).values())]


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


@pytest.mark.parametrize("way", [ALWAYS, NEVER], ids=["in rounds", "at once"])
@pytest.mark.parametrize(("window", "lengths"), CASES)
def test_bytes_and_collectives_follow_the_formula(window: int | None, lengths: tuple[int, ...], way: float) -> None:
    """Ring 2 x Ulysses 2: the exchange of heads each way, and between them only keys and values that a rank of the ring
    needs, (h_k) (D + V) numbers for each; none where nobody needs any. One round of two ranks sends what one fetch
    does."""
    problem = Problem(8, 2, 8, lengths, window=window)
    tokens, width = problem.tokens, 8
    for forward, backward, (rank, *counts) in run_on_ranks(4, count_traffic, problem, 2, way):
        heads_in, heads_out, own = tokens // 2 * 6 * width, tokens // 2 * 4 * width, 2 * width
        sent, received = counts[2 * rank + 1 - rank], counts[2 * (1 - rank) + rank]
        fetch, back = ([sent * own], [received * own]) if sent + received else ([], [])
        assert forward == [heads_in, *fetch, heads_out]
        assert backward == [heads_out, *fetch, *back, heads_in]
        assert bool(fetch) == (lengths != (8,) * 12)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((4, 1), marks=pytest.mark.check),
        *(pytest.param(layout, marks=pytest.mark.full) for layout in [(1, 4), (6, 1), (3, 2), (2, 4)]),
    ],
    ids=str,
)
def test_one_fetch_brings_what_the_mask_needs(layout: tuple[int, int]) -> None:
    """On any ring, and with heads on one rank alone, where they are not exchanged."""
    ring_size, ulysses_size = layout
    for window, lengths in CASES:
        problem = Problem(4 * ulysses_size, 2 * ulysses_size, 8, lengths, window=window)
        local, own = problem.tokens // ring_size * 8 * (ulysses_size > 1), 2 * 2 * 8
        heads_in, heads_out = ([8 * local], [4 * local]) if local else ([], [])
        for forward, backward, (rank, *counts) in run_on_ranks(
            ring_size * ulysses_size, count_traffic, problem, ring_size, NEVER
        ):
            sent, received = (
                own * sum(part) for part in (counts[rank * ring_size :][:ring_size], counts[rank::ring_size])
            )
            fetch, back = ([sent], [received]) if any(counts) else ([], [])
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
            results.append(run_ring(problem, tensors, ring_size, ALWAYS))
            reaches.append(reached[0])
    return reaches[0], reaches[1], all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.check
@pytest.mark.parametrize(
    ("layout", "lengths", "limit"),
    [((1, 1), (1536,), 110_000), ((2, 2), (1536,), 60_000), ((2, 2), (256,) * 6, 60_000)],
)
def test_no_kernel_reaches_past_its_indices(layout: tuple[int, int], lengths: tuple[int, ...], limit: int) -> None:
    """Chunks of heads are views of wider buffers: those that would reach too far are copied. Documents, each of which
    takes room besides its tokens, are given to kernels in several calls."""
    problem = Problem(8, 2, 32, lengths, chunks=(4 if layout == (1, 1) else 2), dtype=torch.bfloat16)
    for before, after, is_same in run_on_ranks(math.prod(layout), run_within, problem, layout[0], limit):
        assert after < limit <= before
        assert is_same
