"""Compares weights loaded into a model on several ranks with transformers' own loading on one process."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import make_config
from support.rank_pool import RankError, run_on_ranks
from support.run_harness import RunHarness
from support.tiers import sample
from support.training import CONFIG, MemoryRows, make_recipe
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.train.model.loading import gather_whole

ROWS = [[(30, 0), (20, 0)]]
STRETCH = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "yarn": {"rope_parameters": STRETCH},
    "several": {"model_type": "gemma3_text", "num_hidden_layers": 6, "query_pre_attn_scalar": 8, "sliding_window": 16},
}


def read_frequencies(model: Any) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("inv_freq")}


def load_and_read(recipe: Recipe) -> dict[str, torch.Tensor]:
    return read_frequencies(RunHarness(recipe, MemoryRows(ROWS), 1).built.module.model)


@pytest.mark.check
@pytest.mark.parametrize(("kind", "stage"), sample(product(KINDS, (3, 2)), quick=[("yarn", 3)], checked=()))
def test_rotary_frequencies_stay_in_float32(kind: str, stage: int, tmp_path: Path) -> None:
    """This also holds where the model's weights are bfloat16, and under zero.Init everything that it makes."""
    config = {**CONFIG, **KINDS[kind]}
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    plain.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    expected = read_frequencies(AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)))
    common = ("model.dtype=bfloat16", f"parallel.zero_stage={stage}", "parallel.dp_shard_size=2")
    drawn = make_recipe(*common, config=config)
    read = make_recipe(*common, "model.config=null", f"model.name_or_path={tmp_path / 'base'}")
    for recipe in (drawn, read):
        for ours in run_on_ranks(2, load_and_read, recipe):
            assert ours.keys() == expected.keys()
            for name, frequencies in ours.items():
                assert frequencies.dtype == torch.float32
                assert torch.equal(frequencies, expected[name]), (name, frequencies - expected[name])


@pytest.mark.parametrize(
    ("change", "named"),
    sample(
        [("more", "model.vision.weight"), ("fewer", "model.norm.weight"), ("spoilt", "layers.1.mlp.up_proj.weight")],
        quick=[("spoilt", "layers.1.mlp.up_proj.weight")],
    ),
)
def test_missing_unexpected_and_spoilt_weights_are_refused(change: str, named: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    if change == "more":
        weights["model.vision.weight"] = torch.zeros(2, 2)
    elif change == "spoilt":
        weights["model.layers.1.mlp.up_proj.weight"][-1, -1] = float("inf")  # in rank 1's share
    else:
        del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    recipe = make_recipe("parallel.dp_shard_size=2", "model.config=null", f"model.name_or_path={tmp_path}")
    with pytest.raises(RankError, match=named):
        run_on_ranks(2, load_and_read, recipe)


VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}


def load_and_gather(recipe: Recipe) -> dict[str, torch.Tensor]:
    weights = {}
    for name, parameter in RunHarness(recipe, MemoryRows(ROWS), 1).built.module.model.named_parameters():
        with gather_whole(parameter):
            weights[name] = parameter.detach().clone()
    return weights


@pytest.mark.parametrize(("layout", "stage"), sample(product(("stacked", "split"), (3, 1)), [], [("stacked", 3)]))
def test_experts_are_read_stacked_and_one_by_one(layout: str, stage: int, tmp_path: Path) -> None:
    """They stand in the files of a multimodal model."""
    text = make_config("qwen3_5_moe_text").to_dict()
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5_moe", text_config=text, vision_config=VISION)
    whole = AutoModelForImageTextToText.from_config(config)
    whole.save_pretrained(tmp_path)
    if layout == "stacked":
        save_file(whole.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    has_stacked = any(name.endswith("experts.gate_up_proj") for name in load_file(tmp_path / "model.safetensors"))
    assert has_stacked == (layout == "stacked")
    where = ("model.config=null", f"model.name_or_path={tmp_path}")
    recipe = make_recipe(f"parallel.zero_stage={stage}", "parallel.dp_shard_size=2", *where)
    expected = {f"model.{name}": value for name, value in whole.model.language_model.named_parameters()}
    for ours in run_on_ranks(2, load_and_gather, recipe):
        assert ours.keys() == {*expected, "lm_head.weight"}
        assert all(torch.equal(ours[name], value) for name, value in expected.items())
