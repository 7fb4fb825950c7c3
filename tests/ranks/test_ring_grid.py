"""Runs on rings what plain Ulysses attention is tested for besides values: documents that never mix, the ends of
windows, every division of heads into ranks and chunks, graphs that are kept."""

from typing import Any

import pytest
import torch
from support.attention import Problem, make_tensors
from support.rank_pool import run_on_ranks
from test_ring import ALWAYS, DOCUMENTS, NEVER, check, deal, make_axes, run_ring

from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.attention.kernels.native import Rule
from ulysses_cli.train.attention.ulysses import ulysses_attention

Layout = tuple[int, int]
ON_TWO, OTHERS = (2, 2), [(2, 1), (4, 1), (1, 4), (1, 2), (3, 2), (2, 4)]
LAYOUTS = [pytest.param(ON_TWO, marks=pytest.mark.check)]
LAYOUTS += [pytest.param(layout, marks=pytest.mark.full) for layout in OTHERS]
WAYS = pytest.mark.parametrize("way", [ALWAYS, NEVER], ids=["in rounds", "at once"])

HEADS = [(8, 8), (8, 4), (8, 2), (8, 1), (12, 3), (12, 6), (24, 3), (24, 6)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_chunks_of_heads(layout: Layout) -> None:
    """Also where ranks, or chunks, do not divide the key/value heads."""
    pairs = [(12, 3), (8, 4)] if layout == ON_TWO else HEADS
    check(layout, *list_chunked(pairs, layout[1]))


@pytest.mark.full
def test_all_chunks_of_heads() -> None:
    check(ON_TWO, *list_chunked(HEADS, 2))


def list_chunked(pairs: list[tuple[int, int]], ulysses_size: int) -> list[Problem]:
    """Each pair of head counts with one chunk, with two, and with a chunk for each head of a rank."""
    return [
        Problem(heads, kv_heads, lengths=DOCUMENTS["off-edges"], chunks=chunks)
        for heads, kv_heads in pairs
        for chunks in sorted({1, 2, heads // ulysses_size})
        if heads // ulysses_size % chunks == 0
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_windows_about_the_edges_of_shares(layout: Layout) -> None:
    """One token shorter and longer than a rank's slice, than its share of the row, and than the row; and much
    longer."""
    edges = {96 // (layout[0] * layout[1]), 96 // layout[0], 96}
    windows = [25, 48, 1000] if layout == ON_TWO else [edge + by for edge in edges for by in (-1, 0, 1)] + [1000]
    check(layout, *list_windowed(windows, layout[1]))


@pytest.mark.full
def test_more_windows_about_the_edges_of_shares() -> None:
    check(ON_TWO, *list_windowed([23, 24, 47, 49, 95, 96, 97], 2))


def list_windowed(windows: list[int], ulysses_size: int) -> list[Problem]:
    lengths = (DOCUMENTS["one"], DOCUMENTS["off-edges"])
    return [Problem(2 * ulysses_size, 1, lengths=each, window=window) for each in lengths for window in windows]


def change_a_token(problem: Problem, ring_size: int, way: float, token: int) -> tuple[bool, bool]:
    """Changes a token's key and value. Returns whether tokens just outside its window kept every bit, and whether the
    last one inside did not."""
    tensors = make_tensors(problem)
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["k"][:, token] += 1
    changed["v"][:, token] += 1
    before, after = (run_ring(problem, given, ring_size, way)["out"] for given in (tensors, changed))
    last = token + problem.window - 1
    return torch.equal(before[:, last + 1 :], after[:, last + 1 :]), not torch.equal(before[:, last], after[:, last])


@pytest.mark.parametrize(
    "layout", [ON_TWO, *(pytest.param(layout, marks=pytest.mark.full) for layout in OTHERS)], ids=str
)
def test_a_window_ends_at_its_last_token(layout: Layout) -> None:
    """The last token is of the same share, of another, or the row's last but one."""
    ring_size, ulysses_size = layout
    for window in (25,) if layout == ON_TWO else (1, 5, 24, 25, 48, 85):
        problem = Problem(ulysses_size, 1, lengths=(96,), window=window)
        results = run_on_ranks(ring_size * ulysses_size, change_a_token, problem, ring_size, ALWAYS, 10)
        assert set(results) == {(True, True)}


def disturb(problem: Problem, ring_size: int, way: float) -> list[list[bool]]:
    """Replaces each document's q, k and v in turn. Returns for each document whether its output and gradients kept
    every bit."""
    tensors, other = make_tensors(problem), make_tensors(problem, seed=1)
    ends = torch.tensor(problem.lengths).cumsum(0).tolist()
    places = [slice(end - length, end) for end, length in zip(ends, problem.lengths, strict=True)]
    before, kept = run_ring(problem, tensors, ring_size, way), list[list[bool]]()
    for inside in places:
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        for name in ("q", "k", "v"):
            changed[name][:, inside] = other[name][:, inside]
        after = run_ring(problem, changed, ring_size, way)
        names = ("out", "dq", "dk", "dv")
        kept.append([all(torch.equal(before[name][:, at], after[name][:, at]) for name in names) for at in places])
    return kept


RULES: list[dict[str, Any]] = [{}, {"window": 7}, {"softcap": 2.0}, {"has_sinks": True}, {"chunks": 2}]
NEVER_MIXING = [(ON_TWO, torch.float32, {"has_sinks": True})] + [
    pytest.param(layout, dtype, rule, marks=pytest.mark.full)
    for layout in (ON_TWO, (4, 1), (3, 2), (1, 4))
    for dtype in (torch.float32, torch.bfloat16)
    for rule in RULES
    if (layout, dtype, rule) != (ON_TWO, torch.float32, {"has_sinks": True})
]


@WAYS
@pytest.mark.parametrize(("layout", "dtype", "rule"), NEVER_MIXING, ids=str)
def test_documents_never_mix(layout: Layout, dtype: torch.dtype, rule: dict[str, Any], way: float) -> None:
    """A change of document A leaves every output and gradient of document B bitwise identical, whichever ranks hold
    them."""
    ring_size, ulysses_size = layout
    problem = Problem(heads=8, lengths=(21, 1, 30, 44), dtype=dtype, **rule)
    expected = [[index != document for index in range(4)] for document in range(4)]
    for kept in run_on_ranks(ring_size * ulysses_size, disturb, problem, ring_size, way):
        assert kept == expected


def run_twice(problem: Problem, ring_size: int, way: float) -> bool:
    """Runs the backward twice through a retained graph: the first must not free what the second needs."""
    axis, ring = make_axes(ring_size)
    tensors, local = make_tensors(problem), problem.tokens // (axis.size * ring.size)
    q, k, v = (tensors[name][:, :local].clone().requires_grad_() for name in "qkv")
    documents = make_documents(problem.lengths, order=deal(problem, ring_size), max_shares=way)
    split = {"axis": axis, "ring": ring, "num_head_chunks": problem.chunks}
    out = ulysses_attention(q, k, v, documents, Rule(0.3), **split, kernel="sdpa")
    first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    second = torch.autograd.grad(out.sum(), (q, k, v))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@WAYS
@pytest.mark.parametrize("problem", [Problem(lengths=(96,)), Problem(8, lengths=(60, 36, 96), batch=2, chunks=2)])
def test_a_retained_graph(problem: Problem, way: float) -> None:
    assert all(run_on_ranks(4, run_twice, problem, 2, way))


def call_wrongly() -> str:
    axis, ring = make_axes(2)
    q, documents = torch.zeros(1, 4, 4, 8), make_documents((8,), order=deal(Problem(lengths=(8,)), 2))
    try:
        ulysses_attention(q, q, q, documents, Rule(1.0), axis=axis, ring=ring, kernel="sdpa")
    except ValueError as error:
        return str(error)
    return "no error"


def test_documents_must_fill_the_rows() -> None:
    assert run_on_ranks(4, call_wrongly) == ["documents hold 8 tokens, but 1 rows x 4 tokens x 4 ranks make 16"] * 4
