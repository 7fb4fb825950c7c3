"""Tests how config.json becomes a shape: the shipped table, layer kinds and windows, and configs that cannot be
used."""

import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.recipes import LLAMA, load, make_shape
from support.tiers import count_examples

from ulysses_cli.hub import SHIPPED_TABLE
from ulysses_cli.plan.ledger.weights import read_weights
from ulysses_cli.plan.models.families import FAMILIES
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.plan.resolved import resolve

ENTRIES = [json.loads(file.read_text()) for file in sorted(SHIPPED_TABLE.glob("*.json"))]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["repo"])
def test_the_shipped_table(entry: dict[str, Any]) -> None:
    shape = read_model_shape(entry["config"], str(entry["repo"]))
    assert shape.inexact == ""
    assert read_weights(shape, None).num_elements == entry["num_parameters"]
    assert str(entry["source"]).startswith("https://")
    assert entry["gated"] in (True, False, None)
    assert shape.traits is not None
    assert (entry["config"].get("text_config") or entry["config"])["model_type"] in FAMILIES
    assert pickle.loads(pickle.dumps(shape)) == shape  # noqa: S301 - ranks are sent it, after it was asked


# As their makers say: billions of parameters, or GiB of bfloat16 weights. Towers for images and sound, and heads that
# predict further tokens, are not part of the text model.
PUBLISHED_BILLIONS = {
    "zai-org/GLM-4.5-Air": 106, "zai-org/GLM-4.7-Flash": 30, "allenai/Olmo-3-1025-7B": 7.3,
    "allenai/Olmo-3-1125-32B": 32.2, "mistralai/Ministral-3-8B-Base-2512": 8.4,
    "moonshotai/Kimi-Linear-48B-A3B-Base": 48, "inclusionAI/Ling-3.0-flash": 124, "LiquidAI/LFM2-350M": 0.35,
    "LiquidAI/LFM2-700M": 0.742, "LiquidAI/LFM2-2.6B": 2.6, "LiquidAI/LFM2-8B-A1B": 8.3, "LiquidAI/LFM3-1.7B": 1.7,
    "google/gemma-4-26B-A4B": 25.2, "google/gemma-4-12B": 12, "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": 120,
}  # fmt: skip
PUBLISHED_GIB = {"ibm-granite/granite-4.0-h-small": 59.99, "ibm-granite/granite-4.0-h-tiny": 12.93}


def test_totals_are_those_that_their_makers_publish() -> None:
    totals = {entry["repo"]: entry["num_parameters"] for entry in ENTRIES}
    for name, billions in PUBLISHED_BILLIONS.items():
        assert totals[name] == pytest.approx(billions * 1e9, rel=0.025), name
    for name, gib in PUBLISHED_GIB.items():
        assert 2 * totals[name] / 2**30 == pytest.approx(gib, abs=0.006), name


@pytest.mark.parametrize(("name", "width"), [("LiquidAI/LFM2-700M", 6912), ("google/gemma-4-E2B", 12288)])
def test_the_width_is_that_of_the_widest_mlp(name: str, width: int) -> None:
    """LFM2's config.json gives a number from which the width is computed, under a name of its own, and needs no
    `intermediate_size`. Some MLPs of Gemma 4 have twice that."""
    config = next(entry["config"] for entry in ENTRIES if entry["repo"] == name)
    shape = read_model_shape(config, name)
    assert (shape.intermediate_size, shape.moe_intermediate_size) == (width, width)


def windows(**changes: object) -> list[int | None]:
    return [layer.window_tokens for layer in make_shape(num_hidden_layers=6, **changes).layers]


def test_windows_by_family() -> None:
    own = {"sliding_window": 100}
    assert windows(sliding_window=None) == [None] * 6
    assert windows(model_type="mistral", **own) == [100] * 6
    assert windows(model_type="mistral", sliding_window=None) == [None] * 6, "a null wins over the family's default"
    assert windows(model_type="mistral") == [4096] * 6
    assert windows(model_type="gemma2", **own) == [100, None] * 3
    assert windows(model_type="gemma3_text", **own) == [100] * 5 + [None]
    assert windows(model_type="qwen3", max_window_layers=4, **own) == [None] * 6
    late = [None] * 4 + [100] * 2
    assert windows(model_type="qwen3", max_window_layers=4, use_sliding_window=True, **own) == late
    types = ["full_attention", "sliding_attention"] * 3
    assert windows(model_type="gemma3_text", layer_types=types, **own) == [None, 100] * 3


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


SPOILED = [*LLAMA, "layer_types", "rope_scaling", "sliding_window", "text_config", "num_experts", "mlp_only_layers"]
SPOILED += ["head_dim", "query_pre_attn_scalar", "quantization_config", "attn_logit_softcapping"]


@settings(max_examples=count_examples(400))
@given(st.sampled_from(SPOILED), JSON, st.sampled_from(["llama", "qwen3_moe", "gemma2", "gemma3_text", "novel"]))
def test_no_value_of_a_config_raises_anything_but_recipe_error(key: str, value: object, model_type: str) -> None:
    try:
        shape = read_model_shape({**LLAMA, "model_type": model_type, key: value}, "x")
    except RecipeError:
        return
    resolve(load().recipe, shape)
