"""Compares attention on a ring, alone and with Ulysses inside, with plain attention on one process: output and every
gradient, in float64. Counts what travels."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import Problem, compute_reference, make_tensors
from support.rank_pool import run_on_ranks
from support.tiers import count_examples
from torch import Tensor

from ulysses_cli.plan.rows.order import Order, Ring, TokenRun, deal_rows
from ulysses_cli.train.attention import keys as keys_module
from ulysses_cli.train.attention import ulysses as ulysses_module
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.attention.kernels import operators
from ulysses_cli.train.attention.kernels.rule import Rule
from ulysses_cli.train.attention.ulysses import ulysses_attention
from ulysses_cli.train.processes.sequence_axis import SequenceAxis, make_sequence_axis


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
    return deal_rows(problem.lengths, problem.batch, Ring(ring_size, ((problem.window, 1),)))


def list_tokens(order: Order, batch: int, ulysses_size: int) -> Tensor:
    """Returns the tokens of every rank, [ranks, B, S], numbered over all rows."""
    tokens = torch.tensor([[token for run in runs for token in range(*run)] for runs in order])
    return tokens.view(len(order), batch, ulysses_size, -1).transpose(1, 2).flatten(0, 1)


def run_ring(
    problem: Problem, tensors: dict[str, Tensor], ring_size: int, order: Order | None = None
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
        make_documents(problem.lengths, order=order),
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
        assert leaf.grad is not None
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


def measure_errors(problem: Problem, ring_size: int, order: Order | None = None) -> dict[str, float]:
    """Returns the largest difference from the reference, relative to the largest value, per tensor."""
    tensors = make_tensors(problem)
    expected, result = compute_reference(problem, tensors), run_ring(problem, tensors, ring_size, order)
    assert result.keys() == expected.keys()
    return {name: compare(result[name], expected[name]) for name in expected}


def compare(result: Tensor, expected: Tensor) -> float:
    assert result.shape == expected.shape
    assert bool(torch.isfinite(result).all())
    return ((result.double() - expected).abs().max() / expected.abs().max().clamp(min=0.1)).item()


TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def check(layout: tuple[int, int], *problems: Problem) -> None:
    """`layout`: the ring's size and that of Ulysses inside."""
    ring_size, ulysses_size = layout
    for ring_errors in run_on_ranks(ring_size * ulysses_size, measure_all, problems, ring_size):
        for problem, errors in zip(problems, ring_errors, strict=True):
            assert max(errors.values()) < TOLERANCE[problem.dtype], (problem, errors)


def measure_all(problems: tuple[Problem, ...], ring_size: int) -> list[dict[str, float]]:
    return [measure_errors(problem, ring_size) for problem in problems]


LAYOUTS = [(2, 2), *(pytest.param(layout, marks=pytest.mark.check) for layout in [(2, 1), (4, 1), (1, 4)])]
LARGE = [pytest.param((2, 4), marks=pytest.mark.full), pytest.param((3, 2), marks=pytest.mark.full)]
DOCUMENTS = {
    "one": (96,),
    "on-edges": (24, 24, 48),
    "off-edges": (5, 30, 1, 1, 40, 19),
    "forty": (1,) * 30 + (3,) * 9 + (39,),
    "padded": (60, 13, 23),
}


def list_heads(ulysses_size: int) -> list[tuple[int, int]]:
    """Heads that no larger Ulysses could share: 7, 9 and 14 need a ring on 2, 4 or 8 ranks."""
    counts = [(4, 4), (8, 2), (4, 1), (7, 1), (7, 7), (9, 3), (14, 2), (6, 2), (28, 4)]
    return [(heads, kv_heads) for heads, kv_heads in counts if heads % ulysses_size == 0]


@pytest.mark.parametrize("layout", [*LAYOUTS, *LARGE], ids=str)
def test_heads(layout: tuple[int, int]) -> None:
    documents = DOCUMENTS["off-edges"]
    check(layout, *(Problem(*heads, lengths=documents) for heads in list_heads(layout[1])))


@pytest.mark.parametrize("layout", [*LAYOUTS, *LARGE], ids=str)
def test_documents_and_windows(layout: tuple[int, int]) -> None:
    """Windows are shorter and longer than a rank's share and than a dealt chunk."""
    heads = {1: 3, 2: 6, 4: 4}[layout[1]]
    for lengths in DOCUMENTS.values():
        windows = (None, 1, 3, 17, 50)
        check(layout, *(Problem(heads, 1, lengths=lengths, window=window) for window in windows))


@pytest.mark.parametrize("layout", [*LAYOUTS, *LARGE], ids=str)
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


@pytest.mark.check
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_precision(dtype: torch.dtype) -> None:
    rules: list[dict[str, Any]] = [{}, {"window": 9}, {"has_sinks": True}, {"softcap": 2.0}, {"chunks": 2}]
    check((2, 2), *(Problem(8, 2, 16, DOCUMENTS["off-edges"], dtype=dtype, **rule) for rule in rules))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, int]:
    """Draws a ring of 2 or 4 of 4 ranks, heads that the rest can share, any documents and any rule."""
    ring_size = draw(st.sampled_from([2, 4]))
    kv_heads = draw(st.integers(1, 4))
    heads = (4 // ring_size) * kv_heads * draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    multiple = draw(st.sampled_from([4, 8, 32]))
    lengths.append(multiple - sum(lengths) % multiple)
    problem = Problem(
        heads=heads,
        kv_heads=kv_heads,
        dim=draw(st.integers(1, 9)),
        value_dim=draw(st.sampled_from([0, 0, 3, 11])),
        lengths=tuple(lengths),
        window=draw(st.none() | st.integers(1, 80)),
        softcap=draw(st.none() | st.floats(0.5, 10)),
        has_sinks=draw(st.booleans()),
        chunks=draw(st.sampled_from([n for n in range(1, 5) if heads * ring_size // 4 % n == 0])),
    )
    return problem, ring_size


@pytest.mark.check
@settings(max_examples=count_examples(40))
@given(problems())
def test_random_problems(case: tuple[Problem, int]) -> None:
    problem, ring_size = case
    check((ring_size, 4 // ring_size), problem)


@pytest.mark.check
def test_large_logits_do_not_overflow() -> None:
    """Logits of many hundreds, where exp of any of them is infinite in float32."""
    check((2, 2), Problem(4, 2, lengths=(96,), scale=60.0), Problem(4, 2, lengths=(40, 56), scale=60.0, window=30))


def measure_with_a_fault(problem: Problem, ring_size: int, fault: str) -> float:
    """Returns the largest error of any tensor when a fault is planted in this rank's attention."""
    with pytest.MonkeyPatch.context() as patch:
        if fault == "log-sum-exp of a block":
            patch.setattr(ulysses_module, "run_backward", run_backward_by_blocks)
        elif fault == "keys of another rank count twice":
            patch.setattr(ulysses_module, "return_gradients", return_gradients_twice)
        return max(measure_errors(problem, ring_size).values())


def run_backward_by_blocks(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *row: Any) -> Any:
    """Uses a log-sum-exp that knows half of the keys only, as a ring does that keeps each block's own."""
    halved = torch.cat([torch.zeros_like(k[: k.size(0) // 2]), k[k.size(0) // 2 :]])
    _, own_lse = ulysses_module.attend(q, halved, v, None, *row)
    return operators.run_backward(dout, q, k, v, out, own_lse, *row)


def return_gradients_twice(dkeys: Tensor, dvalues: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return keys_module.return_gradients(2 * dkeys, dvalues, *arguments)


@pytest.mark.parametrize("fault", ["none", "log-sum-exp of a block", "keys of another rank count twice"])
def test_planted_faults_show(fault: str) -> None:
    for error in run_on_ranks(4, measure_with_a_fault, Problem(4, 2, lengths=(70, 26)), 2, fault):
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


def count_traffic(problem: Problem, ring_size: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Counts the elements that this rank hands to each collective of a forward and of a backward, and what the plan
    says that it sends to other ranks of its ring."""
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
    documents, rule = make_documents(problem.lengths, order=order), Rule(problem.scale, problem.window)
    with Counter() as forward:
        out = ulysses_attention(q, k, v, documents, rule, axis=axis, ring=ring, kernel="sdpa")
    with Counter() as backward:
        out.sum().backward()
    sent, received = count_needed(problem, order, ring.rank)
    return forward.sent, backward.sent, [sent], [received]


def count_needed(problem: Problem, order: Order, rank: int) -> tuple[int, int]:
    """Tokens whose keys a rank sends and gets, by the definition of the mask, token by token."""
    owner = {token: at for at, runs in enumerate(order) for run in runs for token in range(*run)}
    starts = [0]
    for length in problem.lengths:
        starts += [starts[-1]] * (length - 1) + [starts[-1] + length]
    needed: set[tuple[int, int]] = set()
    for token, at in owner.items():
        first = max(starts[token], token - (problem.window or token + 1) + 1)
        needed |= {(at, key) for key in range(first, token + 1) if owner[key] != at}
    return sum(owner[key] == rank for _, key in needed), sum(at == rank for at, _ in needed)


@pytest.mark.parametrize(("window", "lengths"), [(None, (96,)), (None, (5, 30, 61)), (9, (96,)), (5, (8,) * 12)])
def test_bytes_and_collectives_follow_the_formula(window: int | None, lengths: tuple[int, ...]) -> None:
    """Ring 2 x Ulysses 2: the exchange of heads each way, and between them only keys and values that a rank of the ring
    needs, (h_k) (D + V) numbers for each; none where nobody needs any."""
    problem = Problem(8, 2, 8, lengths, window=window)
    tokens, width = problem.tokens, 8
    for forward, backward, (sent,), (received,) in run_on_ranks(4, count_traffic, problem, 2):
        heads_in, heads_out, own = tokens // 2 * 6 * width, tokens // 2 * 4 * width, 2 * width
        fetch, back = ([sent * own], [received * own]) if sent + received else ([], [])
        assert forward == [heads_in, *fetch, heads_out]
        assert backward == [heads_out, *fetch, *back, heads_in]
        assert bool(fetch) == (lengths != (8,) * 12)
