"""Compares attention on rows that ranks share, by heads, on a ring, or both, with plain attention on one process:
output and every gradient, in float64. Documents never mix, and windows end at their last token."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
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
    draw_problems,
    make_local_rows,
    run_split,
)  # fmt: skip
from support.tiers import FULL, NUM_RANKS, TIER, mark_by
from syrupy.assertion import SnapshotAssertion
from torch import Tensor

from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.attention.kernels.native import Rule
from ulysses_cli.train.attention.ulysses import ulysses_attention
from ulysses_cli.train.model.build import take_over_groups
from ulysses_cli.train.processes.groups import make_sequence_axis

IN_CI: list[Layout] = [(1, 4), (2, 2), (2, 1), (4, 1)]
LAYOUTS = [
    pytest.param(each, marks=mark_by(each == (1, 2), each in IN_CI))
    for each in [(1, 2), *IN_CI, (1, 3), (3, 2), (2, 4)]
]
OFF_EDGES = DOCUMENTS["off-edges"]
# Of 7, 9 and 14 heads no larger Ulysses could share all: they need a ring on 2, 4 or 8 ranks.
HEADS = [
    (4, 4), (8, 8), (8, 4), (8, 2), (8, 1), (4, 1), (7, 1), (7, 7), (9, 3), (14, 2), (6, 2), (12, 3), (12, 4), (12, 6),
    (24, 2), (24, 3), (24, 6), (28, 4),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_heads(layout: Layout) -> None:
    """In one chunk, in two, and in one for each head of a rank, also where these do not divide the key/value heads."""
    for heads, kv_heads in HEADS if TIER == FULL else HEADS[::3]:
        if heads % layout[1] == 0:
            chunks = {1, 2, heads // layout[1]}
            check(layout, *(Problem(heads, kv_heads, lengths=OFF_EDGES, chunks=each) for each in chunks))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_documents_and_windows(layout: Layout) -> None:
    """Windows are shorter and longer than a rank's slice, than its share of the row, and than the row."""
    edges = {96 // (layout[0] * layout[1]), 96 // layout[0], 96}
    windows = [None, 1, 3, 17, 1000, *(edge + by for edge in edges for by in (-1, 0, 1))]
    for lengths in DOCUMENTS.values():
        check(layout, *(Problem(2 * layout[1], 1, lengths=lengths, window=window) for window in windows))


BRANCHES: dict[str, Any] = {"lengths": (50, 9, 7, 30), "shared": (0, 41, 0, 5)}  # behind one copy of their prompt
RULES = [
    Problem(12, 12, softcap=2.0, lengths=OFF_EDGES),
    Problem(12, 3, has_sinks=True, lengths=OFF_EDGES),
    Problem(24, 6, has_sinks=True, softcap=3.0, window=9, chunks=2, lengths=OFF_EDGES),
    Problem(12, 6, batch=3, lengths=(20, 28, 48, 1, 47)),
    Problem(24, 3, batch=2, lengths=(20, 28, 48), chunks=2, has_sinks=True),
    Problem(12, 6, dim=12, value_dim=8, lengths=OFF_EDGES, has_sinks=True),
    Problem(24, 3, dim=5, value_dim=9, chunks=3, window=9, lengths=OFF_EDGES),
    Problem(12, 3, dim=1, lengths=(24,)),
    Problem(12, 6, **BRANCHES),
    Problem(24, 6, **BRANCHES, window=13, has_sinks=True, softcap=3.0, chunks=2),
    Problem(12, 6, lengths=(20, 36, 8, 32), shared=(0, 20, 12, 1), window=30),
    Problem(12, 6, batch=2, lengths=(20, 28, 48), shared=(0, 19, 0), has_sinks=True),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rules_batches_and_branches(layout: Layout) -> None:
    check(layout, *RULES)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_precision(dtype: torch.dtype, layout: Layout) -> None:
    rules: list[dict[str, Any]] = [{}, {"window": 9}, {"has_sinks": True}, {"softcap": 2.0}, {"chunks": 2}]
    check(layout, *(Problem(24, 6, 16, OFF_EDGES, dtype=dtype, **rule) for rule in rules))


@pytest.mark.check
@settings(max_examples=2000 if TIER == FULL else 20)
@given(draw_problems(4, [1, 1, 2, 4]))
def test_random_problems(case: tuple[Problem, int]) -> None:
    problem, ring_size = case
    check((ring_size, 4 // ring_size), problem)


@pytest.mark.full
@settings(max_examples=200)
@given(draw_problems(6, [3, 2, 6]))
def test_random_problems_on_six_ranks(case: tuple[Problem, int]) -> None:
    problem, ring_size = case
    check((ring_size, 6 // ring_size), problem)


def change_a_token(problem: Problem, ring_size: int, token: int) -> tuple[bool, bool]:
    """Changes a token's key and value. Returns whether tokens just outside its window kept every bit, and whether the
    last one inside did not."""
    tensors = make_tensors(problem)
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["k"][:, token] += 1
    changed["v"][:, token] += 1
    before, after = (run_split(problem, given, ring_size, ALWAYS)["out"] for given in (tensors, changed))
    last = token + problem.window - 1
    return torch.equal(before[:, last + 1 :], after[:, last + 1 :]), not torch.equal(before[:, last], after[:, last])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_window_ends_at_its_last_token(layout: Layout) -> None:
    """The last token is of the same share, of another, or the row's last but one."""
    ring_size, ulysses_size = layout
    for window in (1, 5, 24, 25, 48, 85):
        problem = Problem(ulysses_size, 1, lengths=(96,), window=window)
        assert set(run_on_ranks(ring_size * ulysses_size, change_a_token, problem, ring_size, 10)) == {(True, True)}


def disturb(problem: Problem, ring_size: int, way: float) -> list[list[bool]]:
    """Replaces each document's q, k and v in turn. Returns for each document whether its output and gradients kept
    every bit."""
    tensors, other = make_tensors(problem), make_tensors(problem, seed=1)
    ends = torch.tensor(problem.lengths).cumsum(0).tolist()
    places = [slice(end - length, end) for end, length in zip(ends, problem.lengths, strict=True)]
    before, kept = run_split(problem, tensors, ring_size, way), list[list[bool]]()
    for inside in places:
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        for name in ("q", "k", "v"):
            changed[name][:, inside] = other[name][:, inside]
        after = run_split(problem, changed, ring_size, way)
        names = ("out", "dq", "dk", "dv")
        kept.append([all(torch.equal(before[name][:, at], after[name][:, at]) for name in names) for at in places])
    return kept


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", [{}, {"window": 7}, {"softcap": 2.0}, {"has_sinks": True}, {"chunks": 2}], ids=str)
def test_documents_never_mix(layout: Layout, dtype: torch.dtype, rule: dict[str, Any]) -> None:
    """A change of document A leaves every output and gradient of document B bitwise identical, whichever ranks hold
    them."""
    ring_size, ulysses_size = layout
    problem = Problem(24, 6, lengths=(21, 1, 30, 44), dtype=dtype, **rule)
    expected = [[index != document for index in range(4)] for document in range(4)]
    for way in (ALWAYS, NEVER) if ring_size > 1 else (NEVER,):
        for kept in run_on_ranks(ring_size * ulysses_size, disturb, problem, ring_size, way):
            assert kept == expected


def run_twice(problem: Problem, ring_size: int, way: float) -> bool:
    """Runs the backward twice through a retained graph: the first must not free what the second needs."""
    rows = make_local_rows(problem)
    out = attend(rows, problem, ring_size, way)
    first = torch.autograd.grad(out.sum(), rows, retain_graph=True)
    second = torch.autograd.grad(out.sum(), rows)
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("num_ranks", "ring_size"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("problem", [Problem(lengths=(96,)), Problem(8, lengths=(60, 36, 96), batch=2, chunks=2)])
def test_a_retained_graph(problem: Problem, num_ranks: int, ring_size: int) -> None:
    for way in (ALWAYS, NEVER):
        assert all(run_on_ranks(num_ranks, run_twice, problem, ring_size, way))


def call_wrongly(ring_size: int) -> str:
    rows = [torch.zeros(1, 4, 4, 8)] * 3
    return explain(attend, rows, Problem(lengths=(8,)), ring_size, NEVER, error=ValueError)


@pytest.mark.parametrize("ring_size", [1, 2])
def test_documents_must_fill_the_rows(ring_size: int, snapshot: SnapshotAssertion) -> None:
    assert set(run_on_ranks(4, call_wrongly, ring_size)) == snapshot


def count_collectives(problem: Problem) -> tuple[int, int]:
    """Returns the numbers of collectives of a forward and of a backward."""
    rows = make_local_rows(problem)
    with Collectives() as forward:
        out = attend(rows, problem, 1, NEVER)
    with Collectives() as backward:
        out.sum().backward()
    return len(forward.sent), len(backward.sent)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("heads", [(8, 4), (8, 1), (24, 3)])
def test_two_collectives_each_way(chunks: int, heads: tuple[int, int]) -> None:
    assert set(run_on_ranks(4, count_collectives, Problem(*heads, chunks=chunks))) == {(2 * chunks, 2 * chunks)}


def run_compiled(problem: Problem) -> float:
    """Runs inside torch.compile, where the call is a graph break; values stay the same."""
    q, k, v = make_local_rows(problem)

    def model(x: Tensor) -> Tensor:
        return 2 * attend([x * 1.5, k, v], problem, 1, NEVER)

    compiled = torch.compile(model, backend="aot_eager")
    results = []
    for call in (model, compiled):
        leaf = q.detach().clone().requires_grad_()
        out = call(leaf)
        out.square().sum().backward()
        results.append((out.detach(), leaf.grad))
    return max((a - b).abs().max().item() for a, b in zip(*results, strict=True))


@pytest.mark.check
def test_under_compile() -> None:
    """What surrounds the call is compiled, the call itself is not."""
    assert max(run_on_ranks(2, run_compiled, Problem())) == 0.0


def compare_layers(problem: Problem) -> dict[str, bool]:
    """With DeepSpeed's own layer. Without an order of the row's tokens, as a loop of a user has it."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not deepspeed.comm.is_initialized():
        take_over_groups()
    axis, tensors = make_sequence_axis(dist.group.WORLD), make_tensors(problem)
    local = problem.tokens // axis.size
    part = slice(axis.rank * local, (axis.rank + 1) * local)
    positions = torch.arange(problem.tokens)[None, part]
    reference = UlyssesSPAttentionHF(
        sdpa_attention_forward,
        batch_size=1,
        attn_head_count=problem.heads,
        attn_head_size=problem.dim,
        kv_head_count=problem.kv_heads,
        num_hidden_layers=1,
        process_group=dist.group.WORLD,
        seq_length_is_variable=True,
    )
    module: Any = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, problem.heads // problem.kv_heads
    results = []
    for is_ours in (True, False):
        q, k, v = (tensors[name][:, part].transpose(1, 2).clone().requires_grad_() for name in "qkv")
        if is_ours:
            heads = (tensor.transpose(1, 2) for tensor in (q, k, v))
            documents, rule = make_documents(problem.lengths), Rule(problem.scale)
            out = ulysses_attention(*heads, documents, rule, axis=axis, kernel="sdpa").flatten(2)
        else:
            out, _ = reference(module, q, k, v, None, scaling=problem.scale, position_ids=positions)
        grads = torch.autograd.grad(out, (q, k, v), tensors["dout"][:, part].flatten(2))
        results.append((out.detach(), *grads))
    return {name: torch.equal(a, b) for name, a, b in zip(("out", "dq", "dk", "dv"), *results, strict=True)}


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (4, 1)], ids=str)
def test_outputs_and_gradients_are_bitwise_equal(num_ranks: int, heads: tuple[int, int]) -> None:
    """But for keys and values whose heads ranks share. DeepSpeed repeats one before the exchange, and autograd adds its
    gradients one by one; ours adds them at once."""
    problem = Problem(*heads, dim=16, lengths=(256,), dtype=torch.float32)
    for equal in run_on_ranks(num_ranks, compare_layers, problem):
        assert {name for name in equal if equal[name]} >= ({"out", "dq"} if heads[1] < num_ranks else equal.keys())
