"""Compares losses of preferences with what TRL's own code returned (benchmarks/preferences.py)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support.paths import ROOT
from torch import Tensor

from ulysses_cli.train.preferences import (
    PAIR_LOSSES,
    AnswerPairs,
    PreferenceSettings,
    check_settings,
    compute_kl,
    compute_kto_losses,
    compute_pair_losses,
    measure_pairs,
)

STORED: dict[str, Any] = json.loads((ROOT / "benchmarks/results/preferences-trl.json").read_text())
BATCH, CASES = STORED["batch"], STORED["cases"]
# TRL holds exo_pair's smoothing in float32, and all of orpo
TOLERANCES = {"exo_pair": 1e-6, "orpo": 1e-6}


def make_pairs(*, has_reference: bool) -> tuple[AnswerPairs, Tensor]:
    sums = torch.tensor(BATCH["sums"], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(BATCH["reference_sums"], dtype=torch.float64)
    parts = (*sums.chunk(2), *torch.tensor(BATCH["targets"]).chunk(2))
    return AnswerPairs(*parts, *(reference.chunk(2) if has_reference else ())), sums


def check_close(ours: Any, theirs: Any, name: str) -> None:
    tolerance = TOLERANCES.get(name, 1e-12)
    ours = torch.as_tensor(ours, dtype=torch.float64)
    torch.testing.assert_close(ours, torch.tensor(theirs, dtype=torch.float64), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", [case for case in CASES if case["name"] != "kto"], ids=lambda case: case["name"])
def test_pairs_lose_what_they_lose_in_trl(case: dict[str, Any]) -> None:
    name, settings = case["name"], PreferenceSettings(**case["settings"])
    loss = PAIR_LOSSES[name]
    pairs, sums = make_pairs(has_reference=loss.has_reference)
    mean = compute_pair_losses(pairs, {name: 1.0}, settings).mean()
    check_close(torch.autograd.grad(mean, sums)[0], case["grad"], name)
    nll = BATCH["chosen_nll_with_prompt" if loss.sft_on_prompt else "chosen_nll"]
    check_close(mean.item() + loss.sft_weight * nll, case["loss"], name)
    measures = measure_pairs(pairs, name, settings)
    assert measures.keys() == case["metrics"].keys()
    for key, value in case["metrics"].items():
        # TRL logs accuracies in float32
        check_close(measures[key].mean(), value, "orpo" if key == "rewards/accuracies" else name)


@pytest.mark.parametrize("case", [case for case in CASES if case["name"] == "kto"], ids=[0, 1])
def test_answers_without_a_partner_lose_what_they_lose_in_trl(case: dict[str, Any]) -> None:
    settings = PreferenceSettings(**case["settings"])
    _, sums = make_pairs(has_reference=False)
    is_chosen = torch.tensor(case["is_chosen"])
    kl = compute_kl(torch.tensor(case["mismatched"], dtype=torch.float64).sum(), len(case["mismatched"]))
    reference = torch.tensor(BATCH["reference_sums"], dtype=torch.float64)
    losses = compute_kto_losses(sums - reference, is_chosen, kl, settings)
    check_close(losses.mean(), case["loss"], "kto")
    check_close(torch.autograd.grad(losses.mean(), sums)[0], case["grad"], "kto")
    check_close(kl, case["metrics"]["kl"], "kto")
    assert kl > 0
    assert compute_kl(torch.tensor(-3.0), 2) == 0


def test_every_loss_is_compared_and_weighed() -> None:
    assert {case["name"] for case in CASES} == {*PAIR_LOSSES, "kto"}
    pairs, _ = make_pairs(has_reference=True)
    single = [compute_pair_losses(pairs, {name: 1.0}, PreferenceSettings()) for name in ("sigmoid", "bco_pair")]
    mixed = compute_pair_losses(pairs, {"sigmoid": 0.8, "bco_pair": 0.2}, PreferenceSettings())
    torch.testing.assert_close(mixed, 0.8 * single[0] + 0.2 * single[1])


def test_odds_of_certain_and_impossible_answers_have_a_gradient() -> None:
    """Of both branches of log(1 - exp(x)) only one may be computed: the other one's gradient is not finite."""
    sums = torch.tensor([-1e-20, -300.0, -1e-20, -300.0], dtype=torch.float64, requires_grad=True)
    pairs = AnswerPairs(*sums.chunk(2), *torch.ones(4, dtype=torch.long).chunk(2))
    compute_pair_losses(pairs, {"orpo": 1.0}, PreferenceSettings()).sum().backward()
    assert sums.grad is not None
    assert torch.isfinite(sums.grad).all()


@pytest.mark.parametrize(
    ("names", "settings", "message"),
    [
        (["sigmoid"], {"label_smoothing": 0.1}, "sigmoid cannot smooth labels; losses that can: robust, exo_pair, cpo"),
        (["robust"], {"label_smoothing": 0.5}, "less than half of the labels can be wrong"),
        (["exo_pair"], {}, "exo_pair needs label_smoothing above 0"),
        (["sigmoid", "cpo"], {}, "do not mix: some have a reference, others none"),
        (["dpo"], {}, "dpo is no loss of pairs: sigmoid, robust"),
    ],
)
def test_what_a_loss_lacks_is_refused(names: list[str], settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_settings(dict.fromkeys(names, 1.0), PreferenceSettings(**settings))


def test_a_loss_without_its_reference_is_refused() -> None:
    for has_reference, name in ((False, "sigmoid"), (True, "simpo")):
        with pytest.raises(ValueError, match=f"{name} has (a|no) reference"):
            compute_pair_losses(make_pairs(has_reference=has_reference)[0], {name: 1.0}, PreferenceSettings())
