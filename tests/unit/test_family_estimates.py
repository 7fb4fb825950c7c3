"""Compares the formula with saved traces of families whose every size random recipes do not draw."""

from __future__ import annotations

import json
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

from ulysses_cli.plan.ledger.job import COMPARED, check_known, is_known
from ulysses_cli.plan.models.families import FAMILIES
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.plan.recipe.loader import parse_recipe

RECORD = json.loads((ROOT / "benchmarks" / "results" / "estimate-families.json").read_text())


def list_names() -> list[str]:
    return [f"{row['family']}, {number}" for number, row in enumerate(RECORD["rows"])]


@pytest.mark.parametrize("row", RECORD["rows"], ids=list_names())
def test_the_formula_agrees_with_a_trace_of_the_family(row: dict[str, Any]) -> None:
    loaded = parse_recipe(yaml.safe_dump(row["recipe"]), "a saved recipe", [])
    drawn = DrawnRecipe(0, 0, row["recipe"], loaded.recipe)
    compared = ComparedPhases(drawn, predict_phases(make_drawn_job(drawn)), row["traced"])
    assert abs(compared.peak_error) <= PEAK_BAR
    assert abs(compared.worst_phase[1]) <= PHASE_BAR


def test_every_formula_was_compared_with_a_trace() -> None:
    assert {row["family"] for row in RECORD["rows"]} | set(DRAWN) == COMPARED
    assert set(FAMILIES) == COMPARED


def test_a_model_with_weights_that_no_formula_knows_is_refused_by_name() -> None:
    shape = read_model_shape(make_config("gemma4_text").to_dict(), "owner/model")
    with pytest.raises(RecipeError, match="no memory formula for owner/model, a model of type gemma4_text"):
        check_known(shape)


def test_weights_that_the_formula_does_not_know_are_refused() -> None:
    """Embeddings of single layers and shared keys, which some sizes of Gemma 4 have. Experts beside the MLP are
    known."""
    plain = {"hidden_size_per_layer_input": 0}
    unknown = {"such as embeddings of single layers": {}, "values of an earlier one": {"num_kv_shared_layers": 1}}
    for reason, changes in unknown.items():
        shape = read_model_shape(make_config("gemma4_text", **changes).to_dict(), "with")
        assert not is_known(shape)
        with pytest.raises(RecipeError, match=reason):
            check_known(shape)
    for changes in ({}, {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}):
        assert is_known(read_model_shape(make_config("gemma4_text", **plain, **changes).to_dict(), "without"))
