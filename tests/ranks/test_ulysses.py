"""Compares Ulysses attention on 2 and 4 ranks with plain attention on one: output and every gradient, in float64."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import Problem, compute_reference, draw_shared, make_tensors
from support.rank_pool import run_on_ranks
from support.tiers import FULL, NUM_RANKS, TIER
from torch import Tensor

from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.attention.kernels.native import Rule
from ulysses_cli.train.attention.ulysses import ulysses_attention
from ulysses_cli.train.model.build import take_over_groups
from ulysses_cli.train.processes.groups import make_sequence_axis


def run_ulysses(problem: Problem, tensors: dict[str, Tensor], kernel: str = "sdpa") -> dict[str, Tensor]:
    """Runs this rank's slice of the rows through Ulysses; every rank gets whole output and gradients."""
    axis = make_sequence_axis(dist.group.WORLD)
    local = problem.tokens // axis.size
    part = slice(axis.rank * local, (axis.rank + 1) * local)
    # As transformers hands them over: [B, heads, S, D], seen as [B, S, heads, D] through a transpose.
    leaves = {name: tensors[name][:, part].transpose(1, 2).contiguous().requires_grad_() for name in ("q", "k", "v")}
    sinks = tensors["sinks"].clone().requires_grad_() if problem.has_sinks else None
    out = ulysses_attention(
        *(leaf.transpose(1, 2) for leaf in leaves.values()),
        make_documents(problem.lengths, shared=problem.shared),
        Rule(problem.scale, problem.window, problem.softcap),
        axis=axis,
        kernel=kernel,
        sinks=sinks,
        num_head_chunks=problem.chunks,
    )
    out.backward(tensors["dout"][:, part])
    results = {"out": gather_rows(out.detach())}
    for name, leaf in leaves.items():
        results[f"d{name}"] = gather_rows(leaf.grad.transpose(1, 2))
    if sinks is not None and sinks.grad is not None:
        dist.all_reduce(sinks.grad)
        results["dsinks"] = sinks.grad
    return results


def gather_rows(part: Tensor) -> Tensor:
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, 1)


def measure_errors(problem: Problem) -> dict[str, float]:
    """Returns the largest difference from the reference, relative to the largest value, per tensor."""
    tensors = make_tensors(problem)
    result = run_ulysses(problem, tensors)
    if dist.get_rank():
        return {}  # all ranks have the same whole tensors
    expected = compute_reference(problem, tensors)
    assert result.keys() == expected.keys()
    return {name: compare(result[name], expected[name]) for name in expected}


def compare(result: Tensor, expected: Tensor) -> float:
    assert result.shape == expected.shape
    assert bool(torch.isfinite(result).all())
    return ((result.double() - expected).abs().max() / expected.abs().max().clamp(min=0.1)).item()


TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def check(num_ranks: int, problem: Problem) -> None:
    errors, *_ = run_on_ranks(num_ranks, measure_errors, problem)
    assert max(errors.values()) < TOLERANCE[problem.dtype], errors


HEADS = [(4, 4), (8, 4), (8, 2), (4, 1), (12, 3), (12, 6), (24, 3)]
DOCUMENTS = {
    "one": (64,), "on-edges": (16, 16, 32), "off-edges": (5, 30, 1, 1, 27), "forty": (1,) * 30 + (3,) * 9 + (7,),
    "padded": (40, 13, 11),
}  # fmt: skip


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}-over-{heads[1]}")
def test_heads(num_ranks: int, heads: tuple[int, int]) -> None:
    check(num_ranks, Problem(heads=heads[0], kv_heads=heads[1], lengths=DOCUMENTS["off-edges"]))


@pytest.mark.full
@pytest.mark.parametrize(("heads", "kv_heads", "chunks"), [(6, 2, 2), (24, 2, 2), (9, 3, 1), (12, 4, 2), (6, 1, 1)])
def test_three_ranks(heads: int, kv_heads: int, chunks: int) -> None:
    """The sizes do not divide each other."""
    check(3, Problem(heads, kv_heads, lengths=(5, 30, 1, 1, 26), chunks=chunks))


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_documents(num_ranks: int, documents: str) -> None:
    check(num_ranks, Problem(lengths=DOCUMENTS[documents]))


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("window", [1, 3, 15, 16, 17, 40, 64, 1000])
def test_windows(num_ranks: int, window: int) -> None:
    """The windows are shorter and longer than a rank's slice, which is 32 or 16 tokens."""
    check(num_ranks, Problem(window=window))
    check(num_ranks, Problem(window=window, lengths=DOCUMENTS["off-edges"]))


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize(
    "problem",
    [
        Problem(softcap=2.0),
        Problem(has_sinks=True, lengths=DOCUMENTS["off-edges"]),
        Problem(has_sinks=True, window=5, chunks=2, heads=8),
        Problem(has_sinks=True, softcap=3.0, window=9, heads=12, kv_heads=3),
        Problem(batch=3, lengths=(10, 14, 24, 1, 23)),
        Problem(batch=2, lengths=(10, 14, 24), heads=12, kv_heads=3, chunks=3, has_sinks=True),
        Problem(dim=1),
        Problem(dim=12, value_dim=8, lengths=DOCUMENTS["off-edges"], has_sinks=True),
        Problem(dim=5, value_dim=9, heads=12, kv_heads=3, chunks=3, window=9),
        Problem(lengths=(4,)),
        Problem(lengths=(40, 9, 7, 8), shared=(0, 33, 0, 2)),
        Problem(8, 2, lengths=(24, 5, 6, 29), shared=(0, 20, 1, 24), window=11, softcap=2.0, has_sinks=True, chunks=2),
        Problem(batch=2, lengths=(20, 12, 16, 16), shared=(0, 20, 0, 7), has_sinks=True),
    ],
    ids=str,
)
def test_rules_and_batches(num_ranks: int, problem: Problem) -> None:
    check(num_ranks, problem)


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (8, 2), (8, 1), (24, 3), (24, 6)])
def test_chunks_of_heads(num_ranks: int, heads: tuple[int, int]) -> None:
    for chunks in (1, 2, heads[0] // num_ranks):
        if heads[0] // num_ranks % chunks == 0:
            check(num_ranks, Problem(*heads, lengths=DOCUMENTS["off-edges"], chunks=chunks))


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunks", [1, 2])
def test_precision(num_ranks: int, dtype: torch.dtype, chunks: int) -> None:
    for rule in ({}, {"window": 9}, {"has_sinks": True}, {"softcap": 2.0}):
        check(num_ranks, Problem(8, 2, 16, DOCUMENTS["off-edges"], dtype=dtype, chunks=chunks, **rule))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draws any heads that 4 ranks can split, any documents and any rule; rows are padded at the end to a multiple of
    4."""
    kv_heads = draw(st.integers(1, 6))
    heads = draw(st.sampled_from([n for n in range(4, 25, 4) if n % kv_heads == 0] or [4 * kv_heads]))
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    lengths.append(4 - sum(lengths) % 4)
    return Problem(
        shared=draw_shared(draw, lengths) if draw(st.booleans()) else (),
        heads=heads,
        kv_heads=kv_heads,
        dim=draw(st.integers(1, 9)),
        value_dim=draw(st.sampled_from([0, 0, 3, 11])),
        lengths=tuple(lengths),
        window=draw(st.none() | st.integers(1, 80)),
        softcap=draw(st.none() | st.floats(0.5, 10)),
        has_sinks=draw(st.booleans()),
        chunks=draw(st.sampled_from([n for n in range(1, 7) if heads // 4 % n == 0])),
    )


@pytest.mark.check
@settings(max_examples=1500 if TIER == FULL else 15)
@given(problems())
def test_random_problems(problem: Problem) -> None:
    check(4, problem)


def disturb(problem: Problem, document: int) -> dict[str, Any]:
    """Replaces one document's q, k and v. Returns for each document whether its output and gradients kept every bit."""
    tensors = make_tensors(problem)
    other = make_tensors(problem, seed=1)
    begin = sum(problem.lengths[:document])
    inside = slice(begin, begin + problem.lengths[document])
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in ("q", "k", "v"):
        changed[name][:, inside] = other[name][:, inside]
    before, after = run_ulysses(problem, tensors), run_ulysses(problem, changed)
    kept = {}
    begin = 0
    for index, length in enumerate(problem.lengths):
        part = slice(begin, begin + length)
        kept[index] = all(
            torch.equal(before[name][:, part], after[name][:, part]) for name in ("out", "dq", "dk", "dv")
        )
        begin += length
    return kept


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", [{}, {"window": 7}, {"softcap": 2.0}, {"has_sinks": True}, {"chunks": 2}], ids=str)
def test_documents_never_mix(num_ranks: int, dtype: torch.dtype, rule: dict[str, Any]) -> None:
    """A change of document A leaves every output and gradient of document B bitwise identical."""
    problem = Problem(heads=8, lengths=(21, 1, 30, 12), dtype=dtype, **rule)
    for document in range(4):
        for kept in run_on_ranks(num_ranks, disturb, problem, document):
            assert kept == {index: index != document for index in range(4)}


def change_a_token_at_the_windows_end(problem: Problem) -> tuple[bool, bool]:
    """Changes a token. Returns whether tokens just outside its window kept every bit, and whether the last one inside
    did not."""
    tensors = make_tensors(problem)
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["k"][:, 10] += 1
    changed["v"][:, 10] += 1
    before, after = (run_ulysses(problem, given)["out"] for given in (tensors, changed))
    last = 10 + problem.window - 1
    return torch.equal(before[:, last + 1 :], after[:, last + 1 :]), not torch.equal(before[:, last], after[:, last])


@pytest.mark.parametrize("window", [1, 5, 16, 30])
def test_a_window_ends_at_its_last_token(window: int) -> None:
    assert (
        run_on_ranks(4, change_a_token_at_the_windows_end, Problem(window=window, lengths=(64,))) == [(True, True)] * 4
    )


def count_collectives(problem: Problem) -> tuple[dict[str, int], dict[str, int]]:
    """Counts the collectives of a forward and of a backward, by operator, as the dispatcher sees them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[str, int] = {}

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(op)
            if name.startswith("c10d") or "_local_scalar_dense" in name:
                self.seen[name] = self.seen.get(name, 0) + 1
            return op(*args, **(kwargs or {}))

    axis = make_sequence_axis(dist.group.WORLD)
    tensors = make_tensors(problem)
    local = problem.tokens // axis.size
    q, k, v = (tensors[name][:, :local].clone().requires_grad_() for name in "qkv")
    documents, rule = make_documents(problem.lengths), Rule(problem.scale)
    with Counter() as forward:
        out = ulysses_attention(q, k, v, documents, rule, axis=axis, kernel="sdpa", num_head_chunks=problem.chunks)
    with Counter() as backward:
        out.sum().backward()
    return forward.seen, backward.seen


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("heads", [(8, 4), (8, 1), (24, 3)])
def test_two_collectives_each_way(chunks: int, heads: tuple[int, int]) -> None:
    """There are only all-to-alls: no gather, and no read of a device value."""
    for forward, backward in run_on_ranks(4, count_collectives, Problem(*heads, chunks=chunks)):
        assert forward == {"c10d.alltoall_base_.default": 2 * chunks}
        assert backward == {"c10d.alltoall_base_.default": 2 * chunks}


def call_wrongly() -> str:
    q = torch.zeros(1, 4, 4, 8)
    try:
        ulysses_attention(
            q, q, q, make_documents((4,)), Rule(1.0), axis=make_sequence_axis(dist.group.WORLD), kernel="sdpa"
        )
    except ValueError as error:
        return str(error)
    return "no error"


def test_documents_must_fill_the_rows() -> None:
    assert run_on_ranks(2, call_wrongly) == ["documents hold 4 tokens, but 1 rows x 4 tokens x 2 ranks make 8"] * 2


def run_twice(problem: Problem) -> bool:
    """Runs the backward twice through a retained graph: the first must not free what the second needs."""
    axis, tensors = make_sequence_axis(dist.group.WORLD), make_tensors(problem)
    local = problem.tokens // axis.size
    q, k, v = (tensors[name][:, :local].clone().requires_grad_() for name in "qkv")
    out = ulysses_attention(q, k, v, make_documents(problem.lengths), Rule(0.3), axis=axis, kernel="sdpa")
    first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    second = torch.autograd.grad(out.sum(), (q, k, v))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_retained_graph() -> None:
    assert run_on_ranks(2, run_twice, Problem()) == [True, True]


def run_compiled(problem: Problem) -> float:
    """Runs inside torch.compile, where the call is a graph break; values stay the same."""
    axis, tensors = make_sequence_axis(dist.group.WORLD), make_tensors(problem)
    local = problem.tokens // axis.size
    q, k, v = (tensors[name][:, :local].clone() for name in "qkv")
    documents = make_documents(problem.lengths)

    def model(x: Tensor) -> Tensor:
        return 2 * ulysses_attention(x * 1.5, k, v, documents, Rule(0.3), axis=axis, kernel="sdpa")

    compiled = torch.compile(model, backend="aot_eager")
    results = []
    for call in (model, compiled):
        leaf = q.clone().requires_grad_()
        out = call(leaf)
        out.square().sum().backward()
        results.append((out.detach(), leaf.grad))
    return max((a - b).abs().max().item() for a, b in zip(*results, strict=True))


@pytest.mark.check
def test_under_compile() -> None:
    """What surrounds the call is compiled, the call itself is not."""
    assert max(run_on_ranks(2, run_compiled, Problem())) == 0.0


def compare_layers(problem: Problem) -> dict[str, bool]:
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
@pytest.mark.parametrize("heads", [(8, 8), (8, 4)], ids=str)
def test_outputs_and_gradients_are_bitwise_equal(num_ranks: int, heads: tuple[int, int]) -> None:
    problem = Problem(*heads, dim=16, lengths=(256,), dtype=torch.float32)
    for equal in run_on_ranks(num_ranks, compare_layers, problem):
        assert all(equal.values()), equal


def test_shared_heads_differ_in_the_order_of_a_sum() -> None:
    """With one key/value head on 4 ranks, DeepSpeed repeats it before the exchange and autograd adds the four gradients
    one by one; ours adds them at once. Outputs and query gradients are bitwise equal, the others equal to rounding."""
    problem = Problem(4, 1, dim=16, lengths=(256,), dtype=torch.float32)
    for equal in run_on_ranks(4, compare_layers, problem):
        assert equal["out"]
        assert equal["dq"]
