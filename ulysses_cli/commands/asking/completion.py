"""What the shell offers when Tab is pressed: recipes, settings with their values, kinds of GPU. Answers come from this
machine alone; a mistake in a file means no offer, never a trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

RECIPE_SUFFIXES = (".yaml", ".yml")


def complete_words(incomplete: str) -> list[str]:
    """Offers recipe files, folders, and settings as `section.key=`; after the `=`, the values that a setting names."""
    key, equals, start = incomplete.partition("=")
    if equals:
        return [f"{key}={value}" for value in _list_values(key) if value.startswith(start)]
    return [*_list_paths(incomplete), *(f"{name}=" for name in _list_keys() if name.startswith(incomplete))]


def complete_recipe_names(incomplete: str) -> list[str]:
    """Offers the recipes that come with this tool."""
    from ulysses_cli import shipped

    return [name for name, _ in shipped.list_recipes() if name.startswith(incomplete)]


def complete_gpus(incomplete: str) -> list[str]:
    """Offers kinds of GPU; after a comma, another one."""
    from ulysses_cli.hardware_table import load_hardware
    from ulysses_cli.plan.problem import RecipeError

    before, comma, start = incomplete.rpartition(",")
    try:
        return [f"{before}{comma}{key}" for key in load_hardware().gpus if key.startswith(start)]
    except RecipeError:
        return []


def _list_paths(incomplete: str) -> Iterator[str]:
    folder = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
    prefix = incomplete[: len(incomplete) - len(Path(incomplete).name)] if not incomplete.endswith("/") else incomplete
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    for entry in entries:
        name = f"{prefix}{entry.name}"
        is_hidden = entry.name.startswith(".") and not Path(incomplete).name.startswith(".")
        if not name.startswith(incomplete) or is_hidden:
            continue
        if entry.is_dir():
            yield f"{name}/"
        elif entry.suffix in RECIPE_SUFFIXES:
            yield name


def _list_keys() -> Iterator[str]:
    from ulysses_cli.plan.recipe.schema import walk_settings

    for setting in walk_settings():
        if not setting.accepts.section and "[" not in setting.key:
            yield setting.key


def _list_values(key: str) -> list[str]:
    from ulysses_cli.plan.recipe.schema import walk_settings

    for setting in walk_settings():
        if setting.key == key:
            literals = [str(value) for value in setting.accepts.literals]
            return [*literals, *(["true", "false"] if bool in setting.accepts.scalars else [])]
    return []
