"""The recipes that come with this tool: in a wheel next to this file, in a checkout at its root. Writes a user's first
copy of a recipe, with what editors need to check it."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

from ulysses_cli.plan.problem import Problem, RecipeError

IN_WHEEL = Path(__file__).parent / "recipes"
IN_CHECKOUT = Path(__file__).parent.parent / "recipes"
SCHEMA_FILE = "ulysses.schema.json"  # beside a recipe
SCHEMA_LINE = f"# yaml-language-server: $schema={SCHEMA_FILE}\n"


def get_folder() -> Path:
    return IN_WHEEL if IN_WHEEL.is_dir() else IN_CHECKOUT


def list_recipes() -> list[tuple[str, str]]:
    """(name, first line of its header) of each recipe."""
    return [(file.stem, _read_summary(file)) for file in sorted(get_folder().glob("*.yaml"))]


def read_recipe(name: str) -> str:
    return _find(name).read_text(encoding="utf-8")


def copy_recipe(name: str, to: Path | None, *, force: bool) -> Path:
    source = _find(name)
    target = to or Path(source.name)
    try:
        if target.is_dir():
            target = target / source.name
        if target.exists() and not force:
            raise RecipeError(
                [Problem("", f"{target} already exists", "add --force to overwrite it, or name another file")]
            )
        if not target.parent.is_dir():
            raise RecipeError([Problem("", f"{target.parent} is not a folder", "make it, or name another file")])
    except OSError as error:
        raise RecipeError([Problem("", f"{target} cannot be written: {error.strerror}")]) from None
    write_recipe(target, source.read_text(encoding="utf-8"))
    return target


def write_recipe(file: Path, text: str) -> None:
    """Writes a recipe with the line by which editors find its schema, and this version's schema beside it."""
    from ulysses_cli.plan.recipe.schema import make_json_schema

    schema = json.dumps(make_json_schema(), indent=2) + "\n"
    for target, content in ((file, SCHEMA_LINE + text), (file.with_name(SCHEMA_FILE), schema)):
        try:
            target.write_text(content, encoding="utf-8")
        except OSError as error:
            raise RecipeError([Problem("", f"{target} cannot be written: {error.strerror}")]) from None


def _find(name: str) -> Path:
    stem = name.removesuffix(".yaml")
    names = [known for known, _ in list_recipes()]
    if stem in names:
        return get_folder() / f"{stem}.yaml"
    close = difflib.get_close_matches(stem.lower(), names, n=1)
    hint = f"did you mean {close[0]}?" if close else "`ulysses recipes list` shows them all"
    raise RecipeError([Problem("", f"no recipe is called {name}", hint)])


def _read_summary(file: Path) -> str:
    with open(file, encoding="utf-8") as stream:
        return stream.readline().lstrip("# ").strip()
