"""Compares losses of preferences with what TRL's own code returned (benchmarks/preferences.py)."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from support.paths import ROOT
from torch import Tensor

from ulysses_cli.plan.recipe.sections import SMOOTHED, UNPAIRED, WITHOUT_REFERENCE, LossName
from ulysses_cli.train.preferences import (
    PAIR_LOSSES,
    AnswerPairs,
    PreferenceSettings,
    compute_kl,
    compute_kto_losses,
    compute_pair_losses,
    find_sft_weight,
    measure_pairs,
)

STORED: dict[str, Any] = json.loads((ROOT / "benchmarks/results/preferences-trl.json").read_text())
BATCH = STORED["batch"]
CASES = [case for case in STORED["cases"] if case["losses"] != ["kto"]]
SINGLE = [case for case in CASES if len(case["losses"]) == 1]
# TRL holds exo_pair's smoothing in float32, and all of orpo
TOLERANCES = {"exo_pair": 1e-6, "orpo": 1e-6}


def make_pairs(*, has_reference: bool = True) -> tuple[AnswerPairs, Tensor]:
    sums = torch.tensor(BATCH["sums"], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(BATCH["reference_sums"], dtype=torch.float64) * has_reference
    return AnswerPairs(*sums.chunk(2), *torch.tensor(BATCH["targets"]).chunk(2), *reference.chunk(2)), sums


def check_close(ours: Any, theirs: Any, losses: Sequence[str]) -> None:
    tolerance = max(TOLERANCES.get(loss, 1e-12) for loss in losses)
    ours = torch.as_tensor(ours, dtype=torch.float64)
    torch.testing.assert_close(ours, torch.as_tensor(theirs, dtype=torch.float64), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "+".join(case["losses"]))
def test_pairs_lose_what_they_lose_in_trl(case: dict[str, Any]) -> None:
    losses = case["losses"]
    own = {key: value for key, value in case["settings"].items() if key in PreferenceSettings.__dataclass_fields__}
    settings = PreferenceSettings(loss=tuple(losses), sft_weight=0.0, **own)
    pairs, sums = make_pairs(has_reference=all(PAIR_LOSSES[loss].has_reference for loss in losses))
    mean = compute_pair_losses(pairs, settings).mean()
    (grad,) = torch.autograd.grad(mean, sums)
    # TRL's cross-entropy is a mean over all tokens of a batch, orpo's with prompts; ours is one of each answer
    sft_weight = find_sft_weight(replace(settings, sft_weight=None))
    if "sft" in losses:
        grad[: len(pairs.chosen)] -= sft_weight / int(pairs.chosen_targets.sum())
    check_close(grad, case["grad"], losses)
    nll = BATCH["chosen_nll_with_prompt" if "orpo" in losses else "chosen_nll"]
    check_close(mean.item() + sft_weight * nll, case["loss"], losses)
    measures = measure_pairs(pairs, settings)
    assert measures.keys() == case["metrics"].keys()
    for key, value in case["metrics"].items():
        # TRL logs accuracies in float32
        check_close(measures[key].mean(), value, ["exo_pair"] if key == "rewards/accuracies" else losses)


@pytest.mark.parametrize("case", [case for case in STORED["cases"] if case["losses"] == ["kto"]], ids=[0, 1])
def test_answers_without_a_partner_lose_what_they_lose_in_trl(case: dict[str, Any]) -> None:
    settings = PreferenceSettings(loss=("kto",), **case["settings"])
    pairs, sums = make_pairs()
    is_wanted, others = torch.tensor(case["is_chosen"]), torch.tensor(case["mismatched"], dtype=torch.float64)
    kl = compute_kl(others.sum(), torch.tensor(len(others)))
    ratios = sums - torch.cat([pairs.reference_chosen, pairs.reference_rejected])
    losses = compute_kto_losses(ratios, is_wanted, kl, settings)
    check_close(losses.mean(), case["loss"], ["kto"])
    check_close(torch.autograd.grad(losses.mean(), sums)[0], case["grad"], ["kto"])
    check_close(kl, case["metrics"]["kl"], ["kto"])
    assert kl > 0
    assert compute_kl(torch.tensor(-3.0), torch.tensor(2)) == 0


def test_the_chosen_answers_own_part_is_a_mean_over_its_targets() -> None:
    pairs, _ = make_pairs(has_reference=False)
    own = -pairs.chosen / pairs.chosen_targets
    for losses, loss_weights, weight, expected in (
        (("cpo",), (), None, 1.0),
        (("simpo",), (), 0.3, 0.3),
        (("sigmoid",), (), 2.0, 2.0),
        (("sigmoid",), (), None, 0),
        (("sigmoid", "sft"), (), None, 1.0),
        (("sigmoid", "sft"), (2.0, 0.4), None, 0.4),
    ):
        plain, whole = (PreferenceSettings(losses, loss_weights, sft_weight=each) for each in (0.0, weight))
        added = compute_pair_losses(pairs, whole) - compute_pair_losses(pairs, plain)
        check_close(added.detach(), (expected * own).tolist(), losses)
        assert ("nll_loss" in measure_pairs(pairs, whole)) == bool(expected)


def test_odds_of_certain_and_impossible_answers_have_a_gradient() -> None:
    """Of both branches of log(1 - exp(x)) only one may be computed: the other one's gradient is not finite."""
    sums = torch.tensor([-1e-20, -300.0, -1e-20, -300.0], dtype=torch.float64, requires_grad=True)
    one = torch.ones(2, dtype=torch.float64)
    pairs = AnswerPairs(*sums.chunk(2), one, one, 0 * one, 0 * one)
    compute_pair_losses(pairs, PreferenceSettings(loss=("orpo",))).sum().backward()
    assert torch.isfinite(sums.grad).all()


def test_every_loss_of_a_recipe_is_compared() -> None:
    names = {case["losses"][0] for case in SINGLE}
    assert names == {*PAIR_LOSSES} - {"sft"} == {*get_args(LossName)} - {*UNPAIRED, "sft"}
    assert {loss for case in STORED["cases"] for loss in case["losses"]} == {*get_args(LossName)}
    assert {case["losses"][0] for case in SINGLE if case["settings"].get("label_smoothing")} == {*SMOOTHED}
    assert {name for name, loss in PAIR_LOSSES.items() if not loss.has_reference} == {*WITHOUT_REFERENCE}
