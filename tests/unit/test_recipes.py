"""Every shipped recipe is valid, has its header, and is listed."""

from pathlib import Path

import pytest

from ulysses_cli.plan.load import load_recipe
from ulysses_cli.shipped import list_recipes
from ulysses_cli.validate import validate_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
HEADER = ("model", "hardware", "launch", "predicted")


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_is_valid_and_has_its_header(file: Path) -> None:
    result = validate_recipe(str(file))
    assert [str(problem) for problem in result.problems] == []
    lines = file.read_text().splitlines()
    header = [line[2:] for line in lines[: lines.index("")]]
    assert header[0].endswith(".")
    for field in HEADER:
        assert any(line.startswith(f"{field:<11}") for line in header), field
    assert f"ulysses train recipes/{file.name}" in "\n".join(header)


def test_the_recipes_that_people_want_are_there() -> None:
    assert len(RECIPES) >= 11
    assert [name for name, _ in list_recipes()] == [file.stem for file in RECIPES]
    loaded = [load_recipe(file).recipe for file in RECIPES]
    assert {r.parallel.sp_size for r in loaded} >= {1, 2, 4, 8}
    assert any(r.parallel.sp_size > 1 and r.parallel.dp_shard_size > 1 for r in loaded)
    assert any(r.lora for r in loaded)
    assert any(r.data.assistant_only_loss for r in loaded)
    assert max(r.data.max_length for r in loaded) == 2**20
