"""Tests which models have a formula: unknown families, and weights beside those of usual layers, are refused."""

from dataclasses import replace
from typing import Any

import pytest
from support.families import make_config

from ulysses_cli.plan.ledger.job import check_known, is_known
from ulysses_cli.plan.ledger.weights import list_weights
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.problem import RecipeError


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
