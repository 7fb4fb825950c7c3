"""Compares the loss from hidden states with the models' own losses, and with cross-entropy by its definition."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import ATTENTION_ONLY, OWN_VALUES, make_model
from support.tiers import sample_every
from torch import Tensor
from torch.nn import functional

from ulysses_cli.plan.models.families import FAMILIES
from ulysses_cli.train.loss import HeadRule, PlainLoss, apply_rule
from ulysses_cli.train.model.loading import BuildError
from ulysses_cli.train.model.loss_model import load_token_loss, read_head_rule

CHANGES = {"gemma2": {"final_logit_softcapping": 0.5}, "granite": {"logits_scaling": 3.0}}


@pytest.mark.parametrize("model_type", sample_every(8, ATTENTION_ONLY))
def test_the_head_gives_every_familys_own_logits(model_type: str) -> None:
    assert set(OWN_VALUES) <= set(FAMILIES)
    model = make_model(model_type, "eager", **CHANGES.get(model_type, {})).eval()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        hidden = model.get_decoder()(ids, use_cache=False).last_hidden_state
        ours = apply_rule(model.get_output_embeddings()(hidden), read_head_rule(model.config, 0.0))
    assert torch.allclose(ours, expected, rtol=1e-12, atol=1e-14)


def make_inputs() -> tuple[torch.nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 50, bias=False).double()
    hidden = torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 50, (2, 9))
    labels[0, 3:] = -100
    return head, hidden, labels


RULES = [HeadRule(), HeadRule(2.0, 3.0), HeadRule(None, 1.0, 0.01), HeadRule(1.0, 0.5, 0.1)]
RULES += [HeadRule(token_loss=torch.sqrt), HeadRule(2.0, 3.0, 0.1, torch.square)]


@pytest.mark.parametrize("rule", RULES)
def test_a_sum_of_token_losses_and_its_gradients(rule: HeadRule) -> None:
    head, hidden, labels = make_inputs()
    total = PlainLoss(head, rule)(hidden, labels)
    grads = torch.autograd.grad(total, [hidden, head.weight])
    expected = torch.zeros((), dtype=torch.float64)
    for row in range(2):
        for at in range(9):
            if labels[row, at] == -100:
                continue
            logits = head.weight @ hidden[row, at] / rule.divisor
            if rule.softcap:
                logits = rule.softcap * torch.tanh(logits / rule.softcap)
            norm = torch.log(torch.exp(logits).sum())
            loss = norm - logits[labels[row, at]]
            loss = rule.token_loss(loss) if rule.token_loss else loss
            expected = expected + loss + rule.z_loss_weight * norm**2
    reference = torch.autograd.grad(expected, [hidden, head.weight])
    assert total.item() == pytest.approx(expected.item(), rel=1e-12)
    for ours, others in zip(grads, reference, strict=True):
        assert torch.allclose(ours, others, rtol=1e-10, atol=1e-12)
    each = PlainLoss(head, rule).per_token(hidden, labels)
    assert each.shape == (labels.numel(),)
    plain = PlainLoss(head, HeadRule(rule.softcap, rule.divisor))(hidden, labels)
    assert each.sum().item() == pytest.approx(plain.item(), rel=1e-12)


def test_without_a_target_the_sum_is_zero_with_a_gradient() -> None:
    head, hidden, labels = make_inputs()
    for rule in (HeadRule(), HeadRule(30.0, 1.0, 0.1), HeadRule(token_loss=torch.sqrt)):
        total = PlainLoss(head, rule)(hidden, torch.full_like(labels, -100))
        assert total.item() == 0.0
        for grad in torch.autograd.grad(total, [hidden, head.weight]):
            assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("evaluates", [False, True])
def test_half_precision_logits_are_freed_before_the_loss(evaluates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory formula counts two float32 tensors of logits, and nothing of the head's own."""
    kept: list[weakref.ref[Tensor]] = []
    at_loss: list[bool] = []
    compute = functional.cross_entropy

    def head(hidden: Tensor) -> Tensor:
        logits = hidden @ torch.ones(4, 8, dtype=torch.bfloat16)
        kept.append(weakref.ref(logits.untyped_storage()))
        return logits

    def watch(*args: Any, **kwargs: Any) -> Tensor:
        at_loss.append(kept[0]() is not None)
        return compute(*args, **kwargs)

    monkeypatch.setattr(functional, "cross_entropy", watch)
    loss = PlainLoss(head, HeadRule())
    (loss.per_token if evaluates else loss)(torch.ones(1, 3, 4, dtype=torch.bfloat16), torch.zeros(1, 3).long())
    assert at_loss == [False]


def test_half_precision_logits_are_summed_in_float32() -> None:
    head, hidden, labels = make_inputs()
    low = PlainLoss(head.bfloat16(), HeadRule())(hidden.detach().bfloat16(), labels)
    assert low.dtype == torch.float32
    logits = functional.linear(hidden.detach().bfloat16(), head.weight).flatten(0, 1).float()
    assert low.item() == functional.cross_entropy(logits, labels.flatten(), reduction="sum").item()


LOSSES = """
import torch

def focal(losses): return (1 - (-losses).exp()) ** 2 * losses
def mean(losses): return losses - losses.mean()
def total(losses): return losses.sum()
def detached(losses): return losses.detach()
def endless(losses): return losses / (losses - 1)
def failing(losses): raise KeyError("no such loss")
"""


def test_a_function_of_token_losses_is_loaded_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text(LOSSES)
    focal = load_token_loss(f"{tmp_path}/losses.py:focal")
    given = torch.tensor([0.5])
    assert torch.allclose(focal(given), (1 - torch.exp(-given)) ** 2 * given)
    assert load_token_loss("torch:sqrt") is torch.sqrt
    assert load_token_loss(None) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mean", "mixes tokens"),
        ("total", "must return a loss for each of its 8 tokens"),
        ("detached", "without gradients"),
        ("endless", "NaN or infinity"),
        ("failing", "fails on losses .*KeyError: 'no such loss'"),
        ("missing", "has no function missing"),
    ],
)
def test_a_function_that_is_no_token_loss_is_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text(LOSSES)
    with pytest.raises(BuildError, match=message):
        load_token_loss(f"{tmp_path}/losses.py:{name}")
    with pytest.raises(BuildError, match="cannot be imported: ModuleNotFoundError"):
        load_token_loss(f"no_such_module:{name}")
