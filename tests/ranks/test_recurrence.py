"""Convolutions and recurrences on split rows, in float64, for drawn documents: bounds on, before and after the edges of
slices, documents and slices shorter than the convolution, one-token documents. The reference knows no ranks."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rank_pool import run_on_ranks
from support.recurrences import run_delta_rule, run_scan
from support.refusals import explain
from support.tiers import NUM_RANKS, count_examples
from syrupy.assertion import SnapshotAssertion
from torch import Tensor

from ulysses_cli.train.attention.documents import make_documents, walk_bounds
from ulysses_cli.train.processes.groups import SequenceAxis, make_sequence_axis
from ulysses_cli.train.recurrence.convolution import convolve
from ulysses_cli.train.recurrence.rules import apply_delta_rule, apply_scan

LOCAL_TOKENS = 8
WIDTH, KEY_WIDTH = 3, 2
HEADS = [(8, 2), (4, 4), (8, 1), (12, 3), (4, 2)]  # of 12 in 3 groups, a rank of 4 has heads of two groups


def draw_lengths(num_ranks: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Documents that fill a row, with bounds that like to be near the edges of slices."""

    def cut(local_tokens: int) -> st.SearchStrategy[tuple[int, ...]]:
        tokens = local_tokens * num_ranks
        near = [edge + shift for edge in range(0, tokens, local_tokens) for shift in (-1, 0, 1)]
        bounds = st.sets(st.one_of(st.sampled_from(near), st.integers(0, tokens)), max_size=6)
        kept = bounds.map(lambda drawn: sorted({0, tokens, *(bound for bound in drawn if 0 < bound < tokens)}))
        return kept.map(lambda drawn: tuple(end - begin for begin, end in pairwise(drawn)))

    return st.sampled_from([1, 2, LOCAL_TOKENS, LOCAL_TOKENS]).flatmap(cut)


def convolve_plainly(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """By the definition, tap by tap."""
    out = torch.zeros_like(hidden) + (0 if bias is None else bias[:, None])
    for back in range(min(weight.size(1), hidden.size(2))):
        out[:, :, back:] += weight[:, weight.size(1) - 1 - back, None] * hidden[:, :, : hidden.size(2) - back]
    return out


def run_layer(kind: str, tensors: dict[str, Tensor], lengths: tuple[int, ...], axis: SequenceAxis) -> Tensor:
    """One layer of each kind on this rank's slices, [B, S, heads, D]."""
    documents = make_documents(lengths)
    inputs = {name: part for name, part in tensors.items() if name not in ("weight", "bias")}
    weight, bias = tensors["weight"], tensors["bias"]
    x = inputs["x"]
    hidden = convolve(convolve_plainly, x.flatten(2).mT, weight, bias, documents, axis).mT.unflatten(2, x.shape[2:])
    if kind == "scan":
        of_heads = {"A": inputs["A"], "D": inputs["D"], "dt_bias": inputs["dt_bias"]}
        return apply_scan(run_scan, hidden, inputs["g"], inputs["q"], inputs["k"], of_heads, documents, axis, {})
    g = inputs["channels"] if kind == "channels" else inputs["g"]
    return apply_delta_rule(
        run_delta_rule, inputs["q"], inputs["k"], hidden, -g.abs(), inputs["beta"], documents, axis, {}
    )


def draw_tensors(heads: tuple[int, int], rows: int, tokens: int, taps: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / 2

    num_heads, groups = heads
    return {
        "x": draw(rows, tokens, num_heads, WIDTH), "q": draw(rows, tokens, groups, KEY_WIDTH),
        "k": draw(rows, tokens, groups, KEY_WIDTH), "g": draw(rows, tokens, num_heads),
        "channels": draw(rows, tokens, num_heads, KEY_WIDTH), "beta": draw(rows, tokens, num_heads),
        "A": -draw(num_heads).abs(), "D": draw(num_heads), "dt_bias": draw(num_heads),
        "weight": draw(num_heads * WIDTH, taps), "bias": draw(num_heads * WIDTH),
    }  # fmt: skip


OF_ROWS = ("x", "q", "k", "g", "channels", "beta")  # the others are weights


def compare_layers(kind: str, heads: tuple[int, int], rows: int, taps: int, lengths: tuple[int, ...]) -> float:
    """`lengths` are those of each row. Largest error of results and gradients on this rank."""
    axis = make_sequence_axis(dist.group.WORLD)
    tokens = sum(lengths)
    whole = {name: part.requires_grad_() for name, part in draw_tensors(heads, rows, tokens, taps).items()}
    alone = SequenceAxis(None, 1, 0)
    by_document = []
    for row in range(rows):
        for begin, end in walk_bounds(lengths):
            parts = {n: p[row : row + 1, begin:end] if n in OF_ROWS else p for n, p in whole.items()}
            by_document.append(run_one_document(kind, parts, end - begin, alone))
    expected = torch.cat(by_document, 1).view(rows, tokens, heads[0], WIDTH)
    factors = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view(expected.shape)
    grads = torch.autograd.grad((expected * factors).sum(), list(whole.values()), allow_unused=True)

    mine = {
        name: (part.detach().chunk(axis.size, 1)[axis.rank] if name in OF_ROWS else part.detach()).requires_grad_()
        for name, part in whole.items()
    }
    out = run_layer(kind, mine, lengths * rows, axis)
    (out * factors.chunk(axis.size, 1)[axis.rank]).sum().backward()
    errors = [(out - expected.chunk(axis.size, 1)[axis.rank]).abs().max()]
    for (name, part), grad in zip(mine.items(), grads, strict=True):
        assert (grad is None) == (part.grad is None), name
        if grad is None or part.grad is None:
            continue
        if name in OF_ROWS:
            grad = grad.chunk(axis.size, 1)[axis.rank]
        else:
            dist.all_reduce(part.grad)
        errors.append((part.grad - grad).abs().max())
    return max(error.item() for error in errors)


def run_one_document(kind: str, parts: dict[str, Tensor], tokens: int, axis: SequenceAxis) -> Tensor:
    """By the definitions alone."""
    x = parts["x"]
    hidden = convolve_plainly(x.flatten(2).mT, parts["weight"], parts["bias"]).mT.unflatten(2, x.shape[2:])
    if kind == "scan":
        return run_scan(hidden, parts["g"], parts["A"], parts["q"], parts["k"], D=parts["D"], dt_bias=parts["dt_bias"])
    g = parts["channels"] if kind == "channels" else parts["g"]
    return run_delta_rule(parts["q"], parts["k"], hidden, g=-g.abs(), beta=parts["beta"])[0]


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_documents_of_any_lengths(num_ranks: int) -> None:
    @settings(max_examples=count_examples(40), deadline=None, derandomize=True, database=None)
    @given(
        kind=st.sampled_from(["delta", "channels", "scan"]),
        lengths=draw_lengths(num_ranks),
        heads=st.sampled_from(HEADS),
        rows=st.integers(1, 2),
        taps=st.sampled_from([1, 3, 4, 9]),
    )
    def check(kind: str, lengths: tuple[int, ...], heads: tuple[int, int], rows: int, taps: int) -> None:
        assert max(run_on_ranks(num_ranks, compare_layers, kind, heads, rows, taps, lengths)) < 1e-12

    check()


def refuse_wrong_documents() -> str:
    axis = make_sequence_axis(dist.group.WORLD)
    tensors = draw_tensors((4, 2), 1, LOCAL_TOKENS, 3)
    return explain(run_layer, "delta", tensors, (LOCAL_TOKENS,), axis, error=ValueError)


def test_documents_of_another_row_length_are_refused(snapshot: SnapshotAssertion) -> None:
    assert set(run_on_ranks(2, refuse_wrong_documents)) == snapshot
