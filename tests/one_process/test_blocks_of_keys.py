"""Tests how results over blocks of keys are merged, and that every kernel's backward takes the result of all blocks."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.tiers import sample_every
from torch import Tensor

from ulysses_cli.plan.attention import Need
from ulysses_cli.train.attention.documents import Documents, make_documents
from ulysses_cli.train.attention.kernels import native, operators, trial
from ulysses_cli.train.attention.kernels.native import Rule, backward_blocks, forward_blocks, merge
from ulysses_cli.train.generation.cache import attend_to_own, attend_to_prefix, join_parts


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1), v), logits.logsumexp(-1)


def test_blocks_without_weight_add_nothing() -> None:
    empty = torch.zeros(2, 3, 4), torch.full((3, 2), -math.inf)
    part = torch.randn(2, 3, 4), torch.randn(3, 2)
    for first, second in ((empty, part), (part, empty)):
        out, lse = (tensor.clone() for tensor in first)
        merge(out, lse, *second)
        assert torch.equal(out, part[0])
        assert torch.equal(lse, part[1])
    out, lse = (tensor.clone() for tensor in empty)
    merge(out, lse, *empty)
    assert torch.equal(out, empty[0])
    assert torch.equal(lse, empty[1])


NEEDS = [
    Need(16, has_softcap=True, dtype="float32", has_more_keys=True),
    Need(16, has_window=True, has_sinks=True, dtype="float32", has_more_keys=True),
    Need(16, has_more_keys=True),
]


@pytest.mark.check
@pytest.mark.parametrize("need", sample_every(3, NEEDS), ids=str)
def test_the_probe_of_a_ring_has_rounds(need: Need, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose backward computes the weights of a block from its own keys fails it."""
    search = trial.KernelSearch(need, torch.device("cpu"))
    assert not trial.try_kernel("sdpa", search).obstacle
    kernel = operators.KERNELS["sdpa"]

    def backward(*tensors: Any) -> Any:
        dout, q, k, v, _, _, documents, rule = tensors
        return kernel.backward(dout, q, k, v, *kernel.forward(q, k, v, documents, rule), documents, rule)

    monkeypatch.setitem(operators.KERNELS, "sdpa", operators.Kernel(kernel.forward, backward))
    obstacle = trial.try_kernel("sdpa", search).obstacle
    assert obstacle.startswith("differs ")
    assert need.has_sinks or "in rounds" in obstacle, "with sinks its backward is wrong in one round too"


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_flex_attention_takes_the_result_of_all_keys(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward is that of its own forward, turned by the two log-sum-exps. On a CPU it has none, so plain torch
    stands in for its forward."""

    def call(q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: Rule) -> tuple[Tensor, Tensor]:
        logits = torch.einsum("qhd,khd->hqk", q, k) * rule.scale
        logits = logits if rule.softcap is None else rule.softcap * torch.tanh(logits / rule.softcap)
        return torch.einsum("hqk,khd->qhd", logits.softmax(-1), v), logits.logsumexp(-1)

    monkeypatch.setattr(native, "_call_flex", call)
    q, k, v, dout = torch.randn(4, 20, 2, 8, dtype=torch.float64)
    rule = Rule(0.3, None, softcap, is_causal=False)
    out, lse = forward_blocks(q, k, v, rule)
    for keys in (slice(0, 7), slice(7, 20)):
        documents = make_documents((20,), key_lengths=(keys.stop - keys.start,))
        tensors = dout, q, k[keys], v[keys], out, lse
        for result, expected in zip(
            native.backward_flex(*tensors, documents, rule), backward_blocks(*tensors, rule), strict=True
        ):
            torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("lengths", [(3, 1, 200), (140,)])
def test_flex_attention_lets_queries_see_all_keys_of_their_document(lengths: tuple[int, ...]) -> None:
    key_lengths = tuple(1 + 2 * length for length in lengths)
    documents, rule = make_documents(lengths, key_lengths=key_lengths), Rule(0.3, is_causal=False)
    q, k = torch.randn(sum(lengths), 2, 16), torch.randn(sum(key_lengths), 2, 16)
    out, lse = native.forward_flex(q, k, k, documents, rule)
    for queries, keys in documents.walk():
        expected, expected_lse = attend_plainly(q[queries], k[keys], k[keys], 0.3)
        torch.testing.assert_close(out[queries], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[:, queries], expected_lse, rtol=1e-4, atol=1e-5)
    assert replace(rule, is_causal=True) != rule, "else the cached mask of the other rule would serve"


@pytest.mark.parametrize("window", [None, 8, 3])
@pytest.mark.parametrize("num_new", [1, 2])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_generations_parts_join_to_plain_attention(has_sinks: bool, num_new: int, window: int | None) -> None:
    """New tokens of several sequences: a prefix that all share, then each sequence's own. One softmax over both is the
    reference. A window ends in the prefix, or among a sequence's own tokens."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, prefix, own, sinks = (
        draw(3, num_new, 4, 8), (draw(2, 7, 8), draw(2, 7, 8)), (draw(3, 2, 5, 8), draw(3, 2, 5, 8)), draw(4),
    )  # fmt: skip
    rule, ages = Rule(0.3, window), torch.arange(7, 0, -1)
    parts = [attend_to_own(q, *own, rule), attend_to_prefix(q, *prefix, rule, 5 - num_new, ages)]
    joined = join_parts(parts, sinks if has_sinks else None, torch.float64)
    keys, values = (
        torch.cat([shared.expand(3, -1, -1, -1), each], 2).repeat_interleave(2, 1)
        for shared, each in zip(prefix, own, strict=True)
    )
    logits = torch.einsum("snhd,shtd->shnt", q, keys) * rule.scale
    for token in range(num_new):
        at = 12 - num_new + token
        logits[:, :, token, at + 1 :] = -math.inf
        logits[:, :, token, : max(0, at + 1 - (window or 12))] = -math.inf
    column = sinks[None, :, None, None].expand(3, 4, num_new, 1) if has_sinks else logits[..., :0]
    weights = torch.cat([logits, column], -1).softmax(-1)[..., :12]
    torch.testing.assert_close(joined, torch.einsum("shnt,shtd->snhd", weights, values), rtol=1e-12, atol=1e-12)
