"""Runs attention on rows that the ranks of a test share, by heads, on a ring, or both, and compares it with the
reference. A layout is the ring's size and that of Ulysses inside."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from support.attention import Problem, compute_reference, draw_shared, make_tensors
from support.rank_pool import run_on_ranks
from ulysses_cli.plan.rows.ring import Order, Ring, deal_rows
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.attention.kernels.native import Rule
from ulysses_cli.train.attention.ulysses import ulysses_attention
from ulysses_cli.train.processes.groups import NO_AXIS, SequenceAxis, make_sequence_axis

Layout = tuple[int, int]
ALWAYS, NEVER = 0.0, 1e9  # max_shares of documents: keys come in rounds, or at once
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}
DOCUMENTS = {
    "one": (96,), "on-edges": (24, 24, 48), "off-edges": (5, 30, 1, 1, 40, 19), "forty": (1,) * 30 + (3,) * 9 + (39,),
    "padded": (60, 13, 23),
}  # fmt: skip


@cache
def make_axes(ring_size: int) -> tuple[SequenceAxis, SequenceAxis]:
    """Returns the axis of heads and the ring of this rank, as a layout makes them."""
    if ring_size == 1:
        return make_sequence_axis(dist.group.WORLD), NO_AXIS
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


def attend(
    rows: Sequence[Tensor],
    problem: Problem,
    ring_size: int,
    max_shares: float,
    order: Order | None = None,
    sinks: Tensor | None = None,
    *,
    overlaps: bool = False,
) -> Tensor:
    """The product's attention on this rank's share, [B, S, heads, D]."""
    axis, ring = make_axes(ring_size)
    order = order or deal(problem, ring_size)
    documents = make_documents(problem.lengths, order=order, max_shares=max_shares, shared=problem.shared)
    rule = Rule(problem.scale, problem.window, problem.softcap)
    split = {"axis": axis, "ring": ring, "num_head_chunks": problem.chunks, "overlaps": overlaps}
    return ulysses_attention(*rows, documents, rule, **split, kernel="sdpa", sinks=sinks)


def make_local_rows(problem: Problem) -> list[Tensor]:
    """Queries, keys and values of the size of a rank's share, where it does not matter which tokens they are of."""
    local, tensors = problem.tokens // dist.get_world_size(), make_tensors(problem)
    return [tensors[name][:, :local].clone().requires_grad_() for name in "qkv"]


def run_split(
    problem: Problem, tensors: dict[str, Tensor], ring_size: int, max_shares: float, order: Order | None = None
) -> dict[str, Tensor]:
    """Runs this rank's share of the rows; every rank gets whole output and gradients."""
    axis, _ = make_axes(ring_size)
    order = order or deal(problem, ring_size)
    tokens = list_tokens(order, problem.batch, axis.size)
    own = tokens[dist.get_rank()]
    # as transformers hands them over: [B, heads, S, D], seen as [B, S, heads, D] through a transpose
    leaves = {
        name: tensors[name].flatten(0, 1)[own].transpose(1, 2).contiguous().requires_grad_() for name in ("q", "k", "v")
    }
    sinks = tensors["sinks"].clone().requires_grad_() if problem.has_sinks else None
    out = attend([leaf.transpose(1, 2) for leaf in leaves.values()], problem, ring_size, max_shares, order, sinks)
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
    results = [run_split(problem, tensors, ring_size, way, order) for way in (ways if ring_size > 1 else (NEVER,))]
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


def check(layout: Layout, *problems: Problem) -> None:
    """Leaves out problems whose heads these ranks cannot share."""
    ring_size, ulysses_size = layout
    problems = tuple(each for each in problems if each.heads % (ulysses_size * each.chunks) == 0)
    assert problems
    ring_errors, *_ = run_on_ranks(ring_size * ulysses_size, measure_all, problems, ring_size)
    for problem, errors in zip(problems, ring_errors, strict=True):
        assert max(errors.values()) < TOLERANCE[problem.dtype], (problem, errors)


def measure_all(problems: tuple[Problem, ...], ring_size: int) -> list[dict[str, float]]:
    return [measure_errors(problem, ring_size) for problem in problems]


@st.composite
def draw_problems(draw: st.DrawFn, num_ranks: int, ring_sizes: Sequence[int]) -> tuple[Problem, int]:
    """Draws a ring, heads that the rest of the ranks can share, any documents and any rule."""
    ring_size = draw(st.sampled_from(ring_sizes))
    ulysses_size, kv_heads = num_ranks // ring_size, draw(st.integers(1, 6))
    multiple = math.lcm(ulysses_size, kv_heads)
    heads = multiple * draw(st.integers(1, max(1, 24 // multiple)))
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    length_multiple = num_ranks * draw(st.sampled_from([1, 2, 8]))
    lengths.append(length_multiple - sum(lengths) % length_multiple)
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
        chunks=draw(st.sampled_from([n for n in range(1, 7) if heads // ulysses_size % n == 0])),
    )
    return problem, ring_size


class Collectives(TorchDispatchMode):
    """Notes the collectives that this rank enters, all of them all-to-alls, with the numbers that it gives: no gather,
    and no read of a value from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(op)
        if str(op).startswith("c10d"):
            assert str(op) == "c10d.alltoall_base_.default"
            self.sent.append(args[1].numel())
        return op(*args, **(kwargs or {}))
