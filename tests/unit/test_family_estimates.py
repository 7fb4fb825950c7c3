"""Compares the formula with saved traces of families whose every size random recipes do not draw."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml
from support.families import make_config
from support.paths import ROOT
from support.random_recipes import (
    DRAWN,
    PEAK_BAR,
    PHASE_BAR,
    ComparedPhases,
    DrawnRecipe,
    make_drawn_job,
    predict_phases,
)
from support.tiers import mark_by

from ulysses_cli.plan.ledger.job import check_known, is_known
from ulysses_cli.plan.ledger.weights import list_weights
from ulysses_cli.plan.models.families import FAMILIES
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.plan.recipe.loader import parse_recipe

RECORD = json.loads((ROOT / "benchmarks" / "results" / "estimate-families.json").read_text())


def list_names() -> list[str]:
    return [f"{row['family']}, {number}" for number, row in enumerate(RECORD["rows"])]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=mark_by(False, row["family"] != RECORD["rows"][at - 1]["family"]))
        for at, row in enumerate(RECORD["rows"])
    ],
    ids=list_names(),
)
def test_the_formula_agrees_with_a_trace_of_the_family(row: dict[str, Any]) -> None:
    loaded = parse_recipe(yaml.safe_dump(row["recipe"]), "a saved recipe", [])
    drawn = DrawnRecipe(0, 0, row["recipe"], loaded.recipe)
    compared = ComparedPhases(drawn, predict_phases(make_drawn_job(drawn)), row["traced"])
    assert abs(compared.peak_error) <= PEAK_BAR
    assert abs(compared.worst_phase[1]) <= PHASE_BAR


def test_every_formula_was_compared_with_a_trace() -> None:
    assert {row["family"] for row in RECORD["rows"]} | set(DRAWN) == set(FAMILIES)


def test_a_model_of_an_unknown_family_is_refused_by_name() -> None:
    shape = read_model_shape({**make_config("llama").to_dict(), "model_type": "other"}, "owner/model")
    with pytest.raises(RecipeError, match="no memory formula for owner/model, a model of type other"):
        check_known(shape)


def test_weights_that_the_formula_does_not_know_are_refused() -> None:
    shape = read_model_shape(make_config("gemma4_text").to_dict(), "with")
    assert is_known(shape)
    more = replace(shape, num_parameters=(shape.num_parameters or 0) + 1)
    assert not is_known(more)
    with pytest.raises(RecipeError, match="weights beside those of usual layers"):
        check_known(more)


GEMMA_4: list[dict[str, Any]] = [
    {}, {"hidden_size_per_layer_input": 0},
    {"num_hidden_layers": 12, "num_kv_shared_layers": 6, "use_double_wide_mlp": True},
    {"enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0},
]  # fmt: skip


@pytest.mark.parametrize("changes", GEMMA_4)
def test_the_formula_knows_every_weight_of_gemma_4(changes: dict[str, Any]) -> None:
    """Vectors of single layers, keys that later layers borrow, MLPs twice as wide, experts beside the MLP."""
    shape = read_model_shape(make_config("gemma4_text", **changes).to_dict(), "any")
    assert is_known(shape)
    assert list_weights(shape, None).num_elements == sum(list_weights(shape, None).persistent_sizes)
