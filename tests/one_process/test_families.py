"""Compares the light half's facts about model families with transformers: defaults, windows, parameters, modules."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import make_config
from transformers import AutoConfig, AutoModelForCausalLM

from ulysses_cli.hub import SHIPPED_TABLE
from ulysses_cli.plan.models.families import FAMILIES
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.train.assembly.loading import find_unused_weights

LAYERS = {"num_hidden_layers": 6}  # with fewer layers, no family has both kinds


def make_model(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_transformers_own(model_type: str) -> None:
    fields = {f.name: f.default for f in dataclasses.fields(type(AutoConfig.for_model(model_type)))}
    for name, value in FAMILIES[model_type].defaults.items():
        if name in fields and fields[name] is not dataclasses.MISSING:
            assert fields[name] == value, name
        elif value not in (None, False):
            pytest.fail(f"{model_type} has no {name} in transformers")


def walk_attention(model: Any) -> Iterator[Any]:
    for layer in model.model.layers:
        yield layer.self_attn


VARIANTS = [(model_type, {}) for model_type in FAMILIES]
VARIANTS += [("qwen3", {"use_sliding_window": True, "max_window_layers": 4}), ("llama", {"attention_bias": True})]
VARIANTS += [("llama", {"mlp_bias": True, "tie_word_embeddings": True}), ("qwen3_moe", {"decoder_sparse_step": 2})]
VARIANTS += [("gemma3_text", {"num_hidden_layers": 7}), ("granite", {"attention_multiplier": 0.1})]
VARIANTS += [("qwen3_moe", {"mlp_only_layers": [0, 3]}), ("mistral", {"sliding_window": None})]


@pytest.mark.parametrize(("model_type", "changes"), VARIANTS)
def test_the_shape_equals_the_models(model_type: str, changes: dict[str, Any]) -> None:
    config = make_config(model_type, **{**LAYERS, **changes})
    model = make_model(config)
    shape = read_model_shape(json.loads(config.to_json_string(use_diff=False)), "tiny")
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    for layer, attention in zip(shape.layers, walk_attention(model), strict=True):
        window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
        assert layer.window_tokens == (window if model_type in WINDOWED else None)
        assert attention.scaling == pytest.approx(shape.attention_scale)
        assert attention.attention_dropout == shape.attention_dropout
    # where peft would adapt experts by the MLP's names, only attention's names are offered
    linear = {
        name.split(".")[-1]
        for name, module in model.model.named_modules()
        if isinstance(module, torch.nn.Linear) and not (shape.adapts_experts and ".mlp." in name)
    }
    assert set(shape.linear_modules) == linear - {"router"}


WINDOWED = {"mistral", "mixtral", "phi3", "gemma2", "gemma3_text", "gpt_oss", "qwen2", "qwen3", "qwen3_moe", "smollm3"}
TABLE = [json.loads(file.read_text()) for file in sorted(SHIPPED_TABLE.glob("*.json"))]


@pytest.mark.full
@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry["repo"])
def test_the_tables_parameters_are_transformers_own(entry: dict[str, Any]) -> None:
    config = entry["config"].get("text_config", entry["config"])
    shape = read_model_shape(entry["config"], entry["repo"])
    if shape.inexact:
        pytest.skip(f"refused: {shape.inexact}")
    values = {k: v for k, v in config.items() if k not in ("rope_scaling", "quantization_config", "architectures")}
    model = make_model(AutoConfig.for_model(**values))
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_saved_model_of_each_family_has_no_weight_without_a_place(model_type: str, tmp_path: Path) -> None:
    """transformers saves some families under other names than their modules have (experts, one by one)."""
    AutoModelForCausalLM.from_config(make_config(model_type)).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert find_unused_weights(model, str(tmp_path)) == []
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.extra.weight": torch.zeros(1)}, file, {"format": "pt"})
    assert find_unused_weights(model, str(tmp_path)) == ["model.layers.0.extra.weight"]
