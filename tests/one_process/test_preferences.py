"""Compares losses of preferences with what TRL's own code returned (benchmarks/preferences.py)."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
import torch
from support.paths import ROOT
from torch import Tensor

from ulysses_cli.plan.recipe.preference_section import SMOOTHED, LossName
from ulysses_cli.train.preferences import (
    PAIR_LOSSES,
    AnswerPairs,
    PreferenceSettings,
    compute_pair_losses,
    measure_pairs,
)

STORED: dict[str, Any] = json.loads((ROOT / "benchmarks/results/preferences-trl.json").read_text())
BATCH = STORED["batch"]
CASES = [case for case in STORED["cases"] if case["name"] in PAIR_LOSSES]
TOLERANCES = {"exo_pair": 1e-6}  # TRL holds its smoothing in float32


def make_pairs() -> tuple[AnswerPairs, Tensor]:
    sums = torch.tensor(BATCH["sums"], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(BATCH["reference_sums"], dtype=torch.float64)
    return AnswerPairs(*sums.chunk(2), *torch.tensor(BATCH["targets"]).chunk(2), *reference.chunk(2)), sums


def check_close(ours: Any, theirs: Any, name: str) -> None:
    tolerance = TOLERANCES.get(name, 1e-12)
    ours = torch.as_tensor(ours, dtype=torch.float64)
    torch.testing.assert_close(ours, torch.tensor(theirs, dtype=torch.float64), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_pairs_lose_what_they_lose_in_trl(case: dict[str, Any]) -> None:
    own = {key: value for key, value in case["settings"].items() if key in PreferenceSettings.__dataclass_fields__}
    settings = PreferenceSettings(loss=case["name"], **own)
    pairs, sums = make_pairs()
    mean = compute_pair_losses(pairs, settings).mean()
    check_close(torch.autograd.grad(mean, sums)[0], case["grad"], case["name"])
    check_close(mean.item(), case["loss"], case["name"])
    measures = measure_pairs(pairs, settings)
    assert measures.keys() == case["metrics"].keys()
    for key, value in case["metrics"].items():
        # TRL logs accuracies in float32
        check_close(measures[key].mean(), value, "exo_pair" if key == "rewards/accuracies" else case["name"])


def test_every_loss_of_a_recipe_is_compared() -> None:
    assert {case["name"] for case in CASES} == {*PAIR_LOSSES} == {*get_args(LossName)}
    smoothed = {case["name"] for case in CASES if case["settings"].get("label_smoothing")}
    assert smoothed == {*SMOOTHED}
