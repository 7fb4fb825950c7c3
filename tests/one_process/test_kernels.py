"""Tests kernels on one process: the chooser, refusals, shapes under fake tensors, and FLOP counts."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import Problem, compute_reference, make_tensors
from support.byte_counter import ByteCounter
from support.other_thread import run_in_thread
from support.refusals import explain
from support.tiers import count_examples, sample, sample_every
from syrupy.assertion import SnapshotAssertion
from torch import library
from torch.nn.attention.flex_attention import AuxRequest
from torch.utils.flop_counter import FlopCounterMode

from ulysses_cli.plan.attention import BACK_ENDS, Need, list_able
from ulysses_cli.plan.layout import list_divisors
from ulysses_cli.train.attention import ulysses
from ulysses_cli.train.attention.documents import make_documents
from ulysses_cli.train.attention.heads import plan_heads
from ulysses_cli.train.attention.kernels import native, operators
from ulysses_cli.train.attention.kernels.choice import choose_kernel
from ulysses_cli.train.attention.kernels.native import Rule
from ulysses_cli.train.attention.kernels.trial import KernelSearch
from ulysses_cli.train.attention.ulysses import ulysses_attention
from ulysses_cli.train.processes.groups import make_sequence_axis

CPU = torch.device("cpu")
NEEDS = [
    Need(64, dtype="float32"),
    Need(128, has_window=True),
    Need(256, has_window=True, has_softcap=True),
    Need(64, has_window=True, has_sinks=True, dtype="float32"),
]


@pytest.mark.parametrize("need", sample(NEEDS, quick=[NEEDS[0], NEEDS[3]]), ids=str)
def test_auto_probes_the_kernel_that_it_chooses(need: Need, snapshot: SnapshotAssertion) -> None:
    choices = [choose_kernel(name, KernelSearch(need, CPU)) for name in ("auto", "sdpa")]
    assert [(choice.name, choice.reason) for choice in choices] == snapshot
    assert explain(choose_kernel, "cudnn", KernelSearch(Need(64), CPU), error=ValueError) == snapshot(name="cudnn")
    assert operators.KERNELS.keys() == BACK_ENDS.keys()
    assert all("sdpa" in list_able(each, "cuda") for each in NEEDS)


WRONG_RULES: dict[str, Callable[[Rule], Rule]] = {
    "scale": lambda rule: replace(rule, scale=rule.scale / 0.7),
    "softcap": lambda rule: replace(rule, softcap=None),
    "window off by one": lambda rule: replace(rule, window_tokens=rule.window_tokens and rule.window_tokens + 1),
    "window in full layers": lambda rule: replace(rule, window_tokens=rule.window_tokens or 600),
}
WRONG_LENGTHS: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "bounds": lambda lengths: (sum(lengths),),
    "bound off by one": lambda lengths: (lengths[0] + 1, *lengths[2:]),
}
FAULTS = [*WRONG_RULES, *WRONG_LENGTHS, "nan", "crash", "half a gradient"]


@pytest.mark.parametrize("dtype", sample(["bfloat16", "float32"], quick=["bfloat16"], checked=()))
@pytest.mark.parametrize("fault", sample_every(3, FAULTS))
def test_a_wrong_kernel_is_not_chosen(fault: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe must detect a lost scale, softcap, window or bound, a wrong gradient, NaN and a crash."""
    expected = operators.KERNELS["sdpa"]

    def change(documents: Any, rule: Rule) -> tuple[Any, Rule]:
        if fault in WRONG_LENGTHS:
            return make_documents(WRONG_LENGTHS[fault](documents.lengths)), rule
        return documents, WRONG_RULES.get(fault, replace)(rule)

    def forward(q: Any, k: Any, v: Any, documents: Any, rule: Rule) -> Any:
        if fault == "crash":
            raise AttributeError("no kernel image is available")
        out, lse = expected.forward(q, k, v, *change(documents, rule))
        return (out * torch.nan if fault == "nan" else out), lse

    def backward(*args: Any) -> Any:
        *tensors, documents, rule = args
        dq, dk, dv = expected.backward(*tensors, *change(documents, rule))
        return dq, (dk / 2 if fault == "half a gradient" else dk), dv

    monkeypatch.setitem(operators.KERNELS, "sdpa", operators.Kernel(forward, backward))
    need = Need(256, has_window=True, has_softcap=True, has_sinks=True, dtype=dtype)
    with pytest.raises(ValueError, match=r"sdpa (differs|failed)"):
        choose_kernel("auto", KernelSearch(need, CPU))


@pytest.mark.parametrize("head_dim", sample([8, 64, 104, 128, 200, 256, 512], quick=[128], checked=[104]))
def test_a_correct_bfloat16_kernel_passes(head_dim: int) -> None:
    assert choose_kernel("auto", KernelSearch(Need(head_dim, True, True, True), CPU)).name == "sdpa"
    assert choose_kernel("auto", KernelSearch(Need(head_dim), CPU)).name == "sdpa"


def run_as_a_gpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Any, rule: Rule, rest: tuple[torch.Tensor, ...] = ()
) -> tuple[torch.Tensor, ...]:
    """Sums in float32 and rounds weights, the output and the gradient of logits to bfloat16, as kernels on GPUs do.
    `rest`: dout and out, for the gradients."""
    group = q.size(1) // k.size(1)
    query, key, value = q.float(), *(tensor.float().repeat_interleave(group, 1) for tensor in (k, v))
    owner = torch.repeat_interleave(torch.tensor(documents.lengths))
    distance = torch.arange(q.size(0))[:, None] - torch.arange(q.size(0))
    allowed = (distance >= 0) & (owner[:, None] == owner) & (distance < (rule.window_tokens or q.size(0)))
    logits, slope = torch.einsum("qhd,khd->hqk", query, key) * rule.scale, torch.ones(())
    if rule.softcap is not None:
        tanh = torch.tanh(logits / rule.softcap)
        logits, slope = tanh * rule.softcap, 1 - tanh.square()
    logits = logits.masked_fill(~allowed, -torch.inf)
    weights = logits.softmax(-1)
    rounded = weights.bfloat16().float()
    if not rest:
        return torch.einsum("hqk,khd->qhd", rounded, value).to(q.dtype), logits.logsumexp(-1)
    dout, out = (tensor.float() for tensor in rest)
    change = torch.einsum("qhd,khd->hqk", dout, value) - (dout * out).sum(-1).T[..., None]
    dlogits = (weights * change * slope * rule.scale).bfloat16().float()
    dk, dv = torch.einsum("hqk,qhd->khd", dlogits, query), torch.einsum("hqk,qhd->khd", rounded, dout)
    grads = [torch.einsum("hqk,khd->qhd", dlogits, key), *(g.unflatten(1, (-1, group)).sum(2) for g in (dk, dv))]
    return tuple(grad.to(q.dtype) for grad in grads)


@pytest.mark.parametrize("has_softcap", [False, True])
@pytest.mark.parametrize("head_dim", sample([64, 128, 256, 512], quick=[128], checked=[64]))
def test_a_kernel_may_round_as_gpus_do(head_dim: int, has_softcap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a query nearly cancels where few keys decide, and its rounding does not."""

    def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, documents: Any, rule: Rule) -> Any:
        return run_as_a_gpu(q, k, v, documents, rule, (dout, out))

    monkeypatch.setitem(operators.KERNELS, "sdpa", operators.Kernel(run_as_a_gpu, backward))
    need = Need(head_dim, has_window=True, has_softcap=has_softcap)
    assert choose_kernel("auto", KernelSearch(need, CPU)).name == "sdpa"


LONG_RULES = [Rule(0.3), Rule(0.3, 100), Rule(0.3, None, 2.0), Rule(0.3, 700, 2.0)]


@pytest.mark.parametrize(
    ("rule", "heads"),
    sample(product(LONG_RULES, [(4, 4), (4, 2), (6, 1)]), quick=[], checked=[(LONG_RULES[3], (4, 2))]),
    ids=str,
)
def test_long_documents_cross_blocks(rule: Rule, heads: tuple[int, int]) -> None:
    """Compares in float64, with documents longer than a block of the blockwise kernel."""
    problem = Problem(
        *heads, lengths=(700, 1, 130, 1100), window=rule.window_tokens, softcap=rule.softcap, scale=rule.scale
    )
    tensors = make_tensors(problem)
    expected = compute_reference(problem, tensors)
    leaves = [tensors[name].clone().requires_grad_() for name in "qkv"]
    out = ulysses_attention(
        *leaves, make_documents(problem.lengths), rule, axis=make_sequence_axis(None), kernel="sdpa"
    )
    grads = torch.autograd.grad(out, leaves, tensors["dout"])
    for name, result in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        torch.testing.assert_close(result, expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.check
def test_memory_grows_with_tokens_not_with_their_square() -> None:
    """The largest tensor of a windowed, capped forward and backward is a block or a row of q."""
    for tokens in (4096, 16384):
        q = torch.randn(tokens, 1, 4)
        with ByteCounter() as counter:
            out, lse = native.forward_blocks(q, q, q, Rule(0.5, 64, 2.0))
            native.backward_blocks(out, q, q, q, out, lse, Rule(0.5, 64, 2.0))
        assert counter.largest <= max(q.nbytes, 8 * native.BLOCK_TOKENS**2)  # distances in a block are int64


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_flops_count_visible_pairs(window: int | None) -> None:
    """Counts 4 FLOPs for each head_dim element of each visible pair forward and 10 backward; masked pairs are not
    work."""
    lengths = (5, 9, 1)
    q = torch.randn(1, 15, 4, 8, requires_grad=True)
    k = torch.randn(1, 15, 2, 8, requires_grad=True)
    pairs = sum(min(at + 1, window or length) for length in lengths for at in range(length))
    with FlopCounterMode(display=False) as counter:
        out = ulysses_attention(
            q, k, k, make_documents(lengths), Rule(0.3, window), axis=make_sequence_axis(None), kernel="sdpa"
        )
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == 4 * pairs * 4 * 8
    assert counter.get_total_flops() - forward == 10 * pairs * 4 * 8


def test_documents_are_checked(snapshot: SnapshotAssertion) -> None:
    cases = ((3, 0), (), (2**31,))
    assert {lengths: explain(make_documents, lengths, error=ValueError) for lengths in cases} == snapshot


@pytest.mark.parametrize("window", sample([None, 1, 100, 300], quick=[100]))
def test_flex_masks_by_documents_and_windows(window: int | None) -> None:
    """Runs the forward on a CPU, where flex has no backward: the blocks and the rule inside them come from bounds
    alone."""
    problem = Problem(4, 2, 16, (300, 1, 128, 211), window=window, dtype=torch.float32, softcap=2.0)
    tensors = make_tensors(problem)
    documents, rule = make_documents(problem.lengths), Rule(problem.scale, window, 2.0)
    out, _ = native.forward_flex(*(tensors[name][0] for name in "qkv"), documents, rule)
    expected = compute_reference(problem, tensors)["out"][0]
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.check
def test_flex_is_compiled_for_many_kinds_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past its limit torch would run it without a kernel, in silence. A GPU's recomputations have their own thread."""
    num_graphs = [0]

    def count(graph: Any, _: Any) -> Any:
        num_graphs[0] += 1
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    compiled = native._compile_flex.__wrapped__()
    kinds = list(product((torch.float32, torch.bfloat16), (1, 2), (False, True), (16, 32), (True,)))
    for dtype, kv_heads, has_score, tokens, has_aux in kinds:
        q, k, v = (torch.randn(1, heads, tokens, 16, dtype=dtype) for heads in (2, kv_heads, kv_heads))
        score = (lambda score, *_: score * 0.5) if has_score else None
        aux = AuxRequest(lse=True) if has_aux else None
        run_in_thread(compiled, q, k, v, score_mod=score, enable_gqa=kv_heads == 1, return_aux=aux)
    assert num_graphs[0] > 8
    before = num_graphs[0]
    run_in_thread(compiled, q, k, v, score_mod=score, enable_gqa=False, return_aux=aux, scale=0.3)
    assert num_graphs[0] == before + 1


@pytest.mark.parametrize(
    ("head_dim", "room", "tokens"),
    [
        (512, 232_448, 32), (512, 166_912, 16), (320, 166_912, 32), (512, 101_376, 16), (512, None, 16),
        (256, 101_376, 0),
    ],
)  # fmt: skip
def test_flex_takes_blocks_that_fit_into_shared_memory(
    head_dim: int, room: int | None, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rooms are of H100, A100 and GPUs for graphics; some releases of torch do not tell it."""
    facts = SimpleNamespace() if room is None else SimpleNamespace(shared_memory_per_block_optin=room)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    options = native.pick_options(head_dim, 2, torch.device("cuda"))
    assert (options is None) == (tokens == 0)
    if options is not None:
        assert {options[name] for name in native.BLOCK_NAMES} == {tokens}
        assert room is None or 6 * tokens * head_dim * 2 <= room, "six blocks of the backward"
    assert native.pick_options(head_dim, 2, torch.device("cpu")) is None


def call(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    documents = make_documents((tensors[0].size(1),))
    return ulysses_attention(*tensors, documents, Rule(0.3, **options), axis=make_sequence_axis(None), kernel="sdpa")


def test_strides_change_no_value() -> None:
    q, k, v = (torch.randn(1, 20, 4, 8) for _ in range(3))
    expected = call(q, k, v)
    for index in range(3):
        parts = [q, k, v]
        parts[index] = parts[index].transpose(2, 3).contiguous().transpose(2, 3)
        assert torch.equal(call(*parts), expected)


def test_inputs_that_contradict_each_other_are_refused(snapshot: SnapshotAssertion) -> None:
    q = torch.randn(1, 20, 4, 8)
    assert [explain(call, q, *others, error=ValueError) for others in ((q.double(), q), (q, q[:, :19]))] == snapshot


@pytest.mark.parametrize("options", [{}, {"window_tokens": 5}, {"softcap": 2.0}], ids=str)
def test_autocast_does_not_reach_inside(options: dict[str, Any]) -> None:
    q = torch.randn(1, 40, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        inside = call(q, q, q, **options)
    assert torch.equal(inside, call(q, q, q, **options))


def test_frozen_inputs_and_second_derivatives() -> None:
    q, k, v = (torch.randn(1, 12, 4, 8, requires_grad=name == "v") for name in "qkv")
    call(q, k, v).sum().backward()
    assert q.grad is None
    (grad,) = torch.autograd.grad(call(q, k, v).square().sum(), v, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


@pytest.mark.check
def test_the_operators_keep_torchs_rules() -> None:
    """Fake operators agree with the real ones in shape, dtype and strides; no tensor is aliased or changed in place."""
    q, k = torch.randn(16, 4, 8), torch.randn(16, 2, 8)
    joined = torch.randn(16, 8, 8)
    bounds = torch.tensor([0, 9, 16], dtype=torch.int32)
    row = (bounds, [9, 7], bounds, [9, 7], "sdpa", 0.3, None, None)
    for sinks in (None, torch.randn(4)):
        library.opcheck(torch.ops.ulysses.attend, (q, k, k, sinks, *row))
        library.opcheck(torch.ops.ulysses.attend, (joined[:, :4], joined[:, 4:6], joined[:, 6:], sinks, *row))
    out, lse = operators.attend(q, k, k, None, *row)
    library.opcheck(torch.ops.ulysses.attend_backward, (out, q, k, k, out, lse, *row))


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, int, int, int]:
    sp_size, num_chunks = draw(st.integers(2, 12)), draw(st.integers(1, 4))
    heads = sp_size * num_chunks * draw(st.integers(1, 4))
    return heads, draw(st.sampled_from(list_divisors(heads))), sp_size, num_chunks


@settings(max_examples=count_examples(300))
@given(plans())
def test_every_rank_gets_its_heads_and_gives_them_back(plan: tuple[int, int, int, int]) -> None:
    """Packs and unpacks for any number of ranks, against loops over single heads."""
    heads, kv_heads, sp_size, num_chunks = plan
    whole = torch.arange(2 * 3 * kv_heads * 5, dtype=torch.float64).view(2, 3, kv_heads, 5)
    head_plan = plan_heads(heads, kv_heads, sp_size, num_chunks)
    back = torch.zeros_like(whole)
    times = torch.zeros(kv_heads)
    for chunk in head_plan.chunks:
        widths = [span.num_heads for span in chunk.keys]
        segments = ulysses._split(torch.zeros(sum(widths) * 30, dtype=torch.float64), widths, 2, 3, 5)
        ulysses._pack(whole, segments, chunk.keys, [0] * sp_size)
        for rank, span in enumerate(chunk.keys):
            assert torch.equal(segments[rank], whole[:, :, span.start : span.stop])
            times[span.start : span.stop] += 1
        ulysses._unpack(back, segments, chunk.keys, [0] * sp_size, add=True)
        needed = {head * kv_heads // heads for span in chunk.queries for head in range(*span)}
        assert needed == {key for span in chunk.keys for key in range(*span)}
    assert torch.equal(back, whole * times[None, None, :, None])
