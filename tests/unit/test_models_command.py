"""What `ulysses models` lists, and its JSON. What it prints of a model or a family is in commands.txt."""

import json

from support.commands import run
from support.model_shapes import get_shape
from support.paths import ROOT

from ulysses_cli.plan.models.families import FAMILIES, REFUSED_FAMILIES, find_text_types
from ulysses_cli.plan.recipe.loader import load_recipe
from ulysses_cli.plan.resolved import choose_layout


def test_the_list_names_every_family() -> None:
    listed = json.loads(run("models", "--format", "json").stdout)
    assert listed["families"] == list(FAMILIES)
    assert listed["refused"] == REFUSED_FAMILIES
    assert not FAMILIES.keys() & REFUSED_FAMILIES
    assert all(model["is_served"] for model in listed["models"])
    text = run("models").stdout
    assert text.startswith(f"{len(FAMILIES)} families ")
    assert "phimoe" in text


def test_the_ring_of_a_shipped_recipe_is_the_one_that_is_named() -> None:
    recipe = load_recipe(ROOT / "recipes" / "qwen2.5-7b-128k-8gpu.yaml").recipe
    model = json.loads(run("models", "Qwen/Qwen2.5-7B", "--format", "json").stdout)
    assert choose_layout(recipe, get_shape("Qwen/Qwen2.5-7B")).ring_size == model["auto_rings"]["8"] == 2
    model = json.loads(run("models", "meta-llama/Llama-3.1-8B", "--format", "json").stdout)
    assert (model["gated"], model["sp_sizes"], model["refused"]) == (True, [1, 2, 4, 8, 16, 32], "")


def test_a_multimodal_model_answers_as_its_text_part() -> None:
    listed = json.loads(run("models", "llama4", "--format", "json").stdout)
    assert (listed["families"], listed["refused"]) == ([], {"llama4_text": REFUSED_FAMILIES["llama4_text"]})
    assert find_text_types("mistral3", FAMILIES) == ("mistral", "ministral3")
    assert not find_text_types("llama", FAMILIES)
