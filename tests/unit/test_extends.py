"""Tests that a recipe is laid over the one that it extends, and that a mistake's place is in the file that has it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.recipes import VALID
from typer.testing import CliRunner

from ulysses_cli import api
from ulysses_cli.cli import app
from ulysses_cli.plan.recipe.loader import load_recipe, load_whole_text
from ulysses_cli.plan.recipe.recipe import Recipe, compute_recipe_hash
from ulysses_cli.plan.recipe.schema import make_json_schema


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = Path("base.yaml")
    file.write_text(VALID)
    return file


def lay_over(base: Any, over: Any) -> Any:
    """The reference: as Hydra merges plain data."""
    if isinstance(base, dict) and isinstance(over, dict):
        return {key: lay_over(base.get(key), over[key]) if key in over else base[key] for key in base | over}
    return over


def draw(rng: random.Random, depth: int = 0) -> Any:
    """What DeepSpeed's config may hold: keys that meet often, values of every kind."""
    if depth == 0 or (depth < 4 and rng.random() < 0.5):
        return {name: draw(rng, depth + 1) for name in rng.sample("abcd", rng.randint(depth == 0, 3))}
    return rng.choice([1, "x", None, True, [1, 2], [{"a": 1}], 0.5, []])


@pytest.mark.parametrize("seed", range(40))
def test_merging_is_that_of_plain_data(seed: int, base: Path) -> None:
    rng = random.Random(seed)
    layers = [{"train": {name: rng.randint(1, 9) for name in rng.sample(
        ("max_steps", "warmup_steps", "per_device_train_batch_size"), 2)}, "deepspeed": draw(rng)}
        for _ in range(3)]  # fmt: skip
    whole = yaml.safe_load(VALID.replace("8Ki", "8192"))
    name = "base.yaml"
    for number, layer in enumerate(layers):
        whole = lay_over(whole, layer)
        Path(f"{number}.yaml").write_text(yaml.safe_dump({"extends": name, **layer}))
        name = f"{number}.yaml"
    Path("whole.yaml").write_text(json.dumps(whole))
    assert load_recipe(name).recipe == load_recipe("whole.yaml").recipe
    assert compute_recipe_hash(load_recipe(name).recipe) == compute_recipe_hash(load_recipe("whole.yaml").recipe)
    Path("shipped.yaml").write_text(load_whole_text(name))
    assert load_recipe("shipped.yaml").recipe == load_recipe("whole.yaml").recipe


def test_each_value_has_the_place_of_its_own_file(base: Path) -> None:
    Path("r.yaml").write_text("extends: ./base.yaml\ntrain:\n  warmup_steps: 3\n")
    loaded = load_recipe("r.yaml", ["train.learning_rate=1e-4"])
    places = {key: str(loaded.locate(f"train.{key}")) for key in ("max_steps", "warmup_steps", "learning_rate")}
    assert places == {"max_steps": "base.yaml:10:14", "warmup_steps": "r.yaml:3:17", "learning_rate": "command line"}
    assert "extends" not in loaded.recipe.model_dump()


def test_a_path_is_relative_to_its_file(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("sub").mkdir()
    Path("sub/r.yaml").write_text("extends: ../base.yaml\n")
    monkeypatch.chdir("sub")
    assert load_recipe("r.yaml").recipe == load_recipe("../base.yaml").recipe
    with api._as_file({"extends": "../base.yaml"}) as file:
        assert load_recipe(file).recipe == load_recipe("r.yaml").recipe


def test_a_job_ships_the_whole_recipe(base: Path) -> None:
    base.write_text(VALID.replace("owner/model", "Qwen/Qwen3-8B"))
    Path("sub").mkdir()
    Path("sub/r.yaml").write_text("extends: ../base.yaml\n# seven\ntrain: {max_steps: 7}\n")
    words = ["launch", "k8s", "--image", "a/b:1", "--claim", "c", "--gpu", "h100", "--dry-run"]
    text = CliRunner().invoke(app, [*words, "sub/r.yaml", "run.seed=3"]).stdout
    config, *_ = yaml.safe_load_all(text)
    Path("there").mkdir()
    Path("there/r.yaml").write_text(config["data"]["r.yaml"])
    assert load_recipe("there/r.yaml").recipe == load_recipe("sub/r.yaml").recipe
    assert "run.seed=3" in text
    alone, *_ = yaml.safe_load_all(CliRunner().invoke(app, [*words, "base.yaml"]).stdout)
    assert alone["data"]["base.yaml"] == base.read_text()


def test_the_schema_of_editors_requires_nothing_that_a_base_may_hold() -> None:
    schema = make_json_schema()
    assert schema["anyOf"] == [{"required": ["model", "data"]}, {"required": ["extends"]}]
    assert "required" not in schema["$defs"]["Data"]
    assert schema["properties"].keys() >= Recipe.model_fields.keys()
    sections = {name: part["properties"] for name, part in schema["$defs"].items()}
    assert {True, False} <= set(sections["Model"]["bf16"]["anyOf"][-1]["enum"])
    assert None in sections["Memory"]["offload_optimizer"]["anyOf"][-1]["enum"]
    assert {"type": "string"} in sections["Data"]["datasets"]["anyOf"]
