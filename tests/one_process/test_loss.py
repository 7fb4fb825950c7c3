"""Compares the head's logits with the models' own; tests the precision of the loss, and losses of a user's own."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import ATTENTION_ONLY, OWN_VALUES, make_model
from support.refusals import explain
from support.tiers import sample_every
from syrupy.assertion import SnapshotAssertion
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


@pytest.mark.parametrize("evaluates", [False, True])
def test_half_precision_logits_are_freed_before_the_loss(evaluates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is computed in float32. The memory formula counts two such tensors, and nothing of the head's own."""
    kept: list[weakref.ref[Tensor]] = []
    at_loss: list[bool] = []
    compute = functional.cross_entropy

    def head(hidden: Tensor) -> Tensor:
        logits = hidden @ torch.ones(4, 8, dtype=torch.bfloat16)
        kept.append(weakref.ref(logits.untyped_storage()))
        return logits

    def watch(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert logits.dtype == torch.float32
        at_loss.append(kept[0]() is not None)
        return compute(logits, *args, **kwargs)

    monkeypatch.setattr(functional, "cross_entropy", watch)
    loss = PlainLoss(head, HeadRule())
    (loss.per_token if evaluates else loss)(torch.ones(1, 3, 4, dtype=torch.bfloat16), torch.zeros(1, 3).long())
    assert at_loss == [False]


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


def test_a_function_that_is_no_token_loss_is_refused(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    (tmp_path / "losses.py").write_text(LOSSES)
    said = {}
    for name in ("mean", "total", "detached", "endless", "failing", "missing"):
        said[name] = explain(load_token_loss, f"{tmp_path}/losses.py:{name}", error=BuildError)
    said["no module"] = explain(load_token_loss, "no_such_module:mean", error=BuildError)
    assert said == snapshot
