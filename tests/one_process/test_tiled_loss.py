"""Compares the tiled loss with cross-entropy over all logits at once, in float64; bounds its error in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byte_counter import ByteCounter
from support.tiers import count_examples
from torch import Tensor, nn

from ulysses_cli.data.steps import IGNORE_INDEX
from ulysses_cli.train.loss import HeadRule
from ulysses_cli.train.memory.tiled_loss import compute_losses, make_tiled_loss

HIDDEN, VOCABULARY = 6, 11


def make_case(tokens: int, seed: int, share: float = 0.7, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, VOCABULARY, (1, tokens), generator=generator)
    hidden = torch.rand(1, tokens, generator=generator) >= share
    torch.manual_seed(seed)
    return {
        "hidden": torch.randn(1, tokens, HIDDEN, generator=generator, dtype=torch.float64).to(dtype) * 3,
        "labels": labels.masked_fill(hidden, IGNORE_INDEX),
        "head": nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=dtype),
    }


def compute_reference(hidden: Tensor, labels: Tensor, head: nn.Module, rule: HeadRule) -> Tensor:
    """Returns [S] losses, by the definition of each term."""
    logits = head(hidden)[0] / rule.divisor
    if rule.softcap is not None:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    shares = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
    picked = shares.gather(-1, labels[0].clamp(min=0)[:, None])[:, 0]
    losses = -torch.log(picked)
    losses = losses if rule.token_loss is None else rule.token_loss(losses)
    losses = losses + rule.z_loss_weight * torch.log(torch.exp(logits).sum(-1)) ** 2
    return torch.where(labels[0] == IGNORE_INDEX, torch.zeros_like(losses), losses)


RULES = st.builds(
    HeadRule,
    softcap=st.sampled_from([None, 1.5]),
    divisor=st.sampled_from([1.0, 2.5]),
    z_loss_weight=st.sampled_from([0.0, 0.1]),
    token_loss=st.sampled_from([None, torch.sqrt, lambda losses: (1 - torch.exp(-losses)) ** 2 * losses]),
)


@settings(max_examples=count_examples(80))
@given(st.integers(1, 23), st.integers(1, 30), RULES, st.integers(0, 99), st.sampled_from([0.0, 0.7, 1.0]))
def test_loss_and_gradients(tokens: int, tile: int, rule: HeadRule, seed: int, share: float) -> None:
    case = make_case(tokens, seed, share)
    hidden, labels, head = case["hidden"].requires_grad_(), case["labels"], case["head"]
    expected = compute_reference(hidden, labels, head, rule)
    grads = torch.autograd.grad(expected.sum() * 0.3, [hidden, head.weight])
    tiled = make_tiled_loss(head, rule, tile)
    total = tiled(hidden, labels)
    assert total.requires_grad
    (total * 0.3).backward()
    torch.testing.assert_close(total, expected.sum(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hidden.grad, grads[0], rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(head.weight.grad, grads[1], rtol=1e-11, atol=1e-12)
    plain = compute_reference(hidden.detach(), labels, head, rule.measure()).detach()
    torch.testing.assert_close(tiled.per_token(hidden, labels)[0], plain, rtol=1e-12, atol=1e-12)
    assert not tiled.per_token(hidden, labels).requires_grad


def test_the_loss_of_a_bare_head_is_unchanged() -> None:
    case = make_case(5, 0)
    expected = case["head"](case["hidden"])
    make_tiled_loss(case["head"], HeadRule(), 2)
    assert torch.equal(case["head"](case["hidden"]), expected)


def test_a_frozen_head_gets_no_gradient() -> None:
    case = make_case(9, 1)
    case["head"].requires_grad_(False)
    hidden = case["hidden"].requires_grad_()
    expected = torch.autograd.grad(compute_reference(hidden, case["labels"], case["head"], HeadRule()).sum(), hidden)[0]
    make_tiled_loss(case["head"], HeadRule(), 4)(hidden, case["labels"]).backward()
    torch.testing.assert_close(hidden.grad, expected, rtol=1e-12, atol=1e-13)
    assert case["head"].weight.grad is None


def test_a_head_that_is_also_the_embedding() -> None:
    case = make_case(9, 2)
    weight, labels = case["head"].weight, case["labels"]
    ids = labels.clamp(min=0)
    hidden = nn.functional.embedding(ids, weight)
    expected = torch.autograd.grad(compute_reference(hidden, labels, case["head"], HeadRule()).sum(), weight)[0]
    make_tiled_loss(case["head"], HeadRule(), 4)(nn.functional.embedding(ids, weight), labels).backward()
    torch.testing.assert_close(weight.grad, expected, rtol=1e-12, atol=1e-13)


def test_a_head_with_adapters() -> None:
    """Only the adapter's weights are trained, and the loss asks for the whole head."""
    from peft import LoraConfig, get_peft_model

    case = make_case(9, 3)
    model = get_peft_model(nn.Sequential(case["head"]), LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    head = model.base_model.model[0]
    head.double()
    learning = [weight for weight in head.parameters() if weight.requires_grad]
    hidden, labels = case["hidden"].requires_grad_(), case["labels"]
    expected = torch.autograd.grad(compute_reference(hidden, labels, head, HeadRule()).sum(), [hidden, *learning])
    wholes: list[nn.Module] = []
    make_tiled_loss(head, HeadRule(), 4, wholes.append)(hidden, labels).backward()
    assert wholes == [head]
    assert len(learning) == 2
    for tensor, grad in zip([hidden, *learning], expected, strict=True):
        torch.testing.assert_close(tensor.grad, grad, rtol=1e-11, atol=1e-13)


def test_bfloat16_is_as_near_as_one_rounding() -> None:
    """Uses fifty tiles: sums in bfloat16 would lose small gradients; these sums are in float32."""
    case = make_case(400, 4, dtype=torch.bfloat16)
    hidden, head = case["hidden"], case["head"]
    exact_head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.float64)
    exact_head.weight.data = head.weight.data.double()
    exact_hidden = hidden.double().requires_grad_()
    expected = compute_reference(exact_hidden, case["labels"], exact_head, HeadRule()).sum() / 277
    grads = torch.autograd.grad(expected, [exact_hidden, exact_head.weight])
    hidden.requires_grad_()
    total = make_tiled_loss(head, HeadRule(), 8)(hidden, case["labels"])
    assert total.dtype == torch.float32
    (total / 277).backward()
    assert abs(total.item() / 277 - expected.item()) < 2e-3 * expected.item()
    for ours, exact in ((hidden.grad, grads[0]), (head.weight.grad, grads[1])):
        assert (ours.double() - exact).norm() < 2**-8 * exact.norm()


def test_a_second_backward_is_refused() -> None:
    case = make_case(5, 5)
    total = make_tiled_loss(case["head"], HeadRule(), 2)(case["hidden"].requires_grad_(), case["labels"])
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_the_largest_tensor_is_a_tile() -> None:
    """The largest tensor has the size of one tile, however long the row."""
    case = make_case(1000, 6)
    with ByteCounter() as counter:
        make_tiled_loss(case["head"], HeadRule(), 4)(case["hidden"].requires_grad_(), case["labels"]).backward()
    assert counter.largest == 1000 * HIDDEN * 8


def test_losses_alone() -> None:
    logits = torch.randn(3, VOCABULARY, dtype=torch.float64)
    labels = torch.tensor([1, IGNORE_INDEX, 4])
    losses, _ = compute_losses(logits, labels, HeadRule())
    expected = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    torch.testing.assert_close(losses, expected)
