"""Loads a recipe file and overrides into a Recipe, or raises a RecipeError with every mistake and its place.

Walks YAML nodes and the schema in parallel. No input raises anything else. Rules across fields are in rules/.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ulysses_cli.plan.problem import Problem, RecipeError, Where
from ulysses_cli.plan.recipe.complaints import explain_control, explain_missing, explain_unknown, explain_value
from ulysses_cli.plan.recipe.overrides import apply_override
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.recipe.schema import Accepts, Setting, find_short, inspect_annotation, list_names, list_settings
from ulysses_cli.plan.recipe.setting import Section, find_control
from ulysses_cli.plan.recipe.yaml_tree import compose, parse_plain, read_place

MAX_RECIPE_BYTES = 1 << 20
MAX_VALUES = 20_000  # an anchor that repeats itself must not grow without bound
MAX_DEPTH = 50


@dataclass(frozen=True)
class Loaded:
    """A recipe, the place of each of its values, and notes about keys that were written as an alias."""

    recipe: Recipe
    file: str
    places: dict[str, Where]
    notes: tuple[str, ...]

    def locate(self, key: str) -> Where:
        return locate(key, self.places, self.file)


def locate(key: str, places: dict[str, Where], file: str) -> Where:
    """The place where a key, or else the nearest section that holds it, was written."""
    while key:
        if key in places:
            return places[key]
        key = key.rpartition(".")[0]
    return Where(file, 1, 1)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Reads a recipe file and applies `section.key=value` overrides to it."""
    file = str(path)
    if not file:
        hint = "name a recipe, or leave the argument out; is a variable of the shell unset?"
        raise RecipeError([Problem("RECIPE", "is an empty argument", hint)])
    if odd := find_control(file):
        message = f"its name holds the control character {odd!r}"
        raise RecipeError([Problem("", message, "rename the file", Where(file))])
    try:
        with open(path, "rb") as stream:
            content = stream.read(MAX_RECIPE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        hint = "name a file; `ulysses recipes copy NAME` makes one of those that `ulysses recipes list` shows"
        raise RecipeError([Problem("", f"cannot be read: {reason}", hint, Where(file))]) from None
    if len(content) > MAX_RECIPE_BYTES:
        raise RecipeError([Problem("", f"larger than {MAX_RECIPE_BYTES:,} bytes: not a recipe", "", Where(file))])
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = Where(file, content[: error.start].count(b"\n") + 1, 1)
        raise RecipeError([Problem("", "not UTF-8 text", "save the recipe as UTF-8", where)]) from None
    return parse_recipe(text, file, overrides)


def parse_recipe(text: str, file: str = "recipe", overrides: Sequence[str] = ()) -> Loaded:
    """The same from text; `file` is its name in problems."""
    tree = compose(text, file) or yaml.MappingNode("tag:yaml.org,2002:map", [])
    if not isinstance(tree, yaml.MappingNode):
        where = read_place(tree, file)
        raise RecipeError([Problem("", "a recipe is a mapping of sections", "start with `model:`", where)])
    mistakes: list[Problem] = []
    for override in overrides:
        try:
            apply_override(tree, override)
        except RecipeError as error:
            mistakes += error.problems
    reader = _Reader(file, mistakes)
    values = reader.read(tree, Accepts(section=Recipe), "")
    recipe = None
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        reader.add_validation(error)
    if recipe is None or reader.problems:
        problems = sorted(reader.problems, key=lambda problem: problem.where)
        raise RecipeError(problems, _load_readable(values, reader))
    return Loaded(recipe, file, reader.places, tuple(reader.notes))


def _load_readable(values: Any, reader: _Reader) -> Loaded | None:
    """The recipe without its bad values; None if that is not a recipe."""
    for problem in reader.problems:
        holder = values
        for part in problem.key.split("."):
            inner = holder.get(part)
            if not isinstance(inner, dict) or problem.key.endswith(f".{part}"):
                holder.pop(part, None)
                break
            holder = inner
    try:
        return Loaded(Recipe.model_validate(values), reader.file, reader.places, ())
    except ValidationError:
        return None


@dataclass
class _Reader:
    """Walks nodes and the schema in parallel; collects places, notes and problems."""

    file: str
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    places: dict[str, Where] = field(default_factory=dict)
    typed: dict[str, str] = field(default_factory=dict)  # plain scalars as they were written
    num_values: int = 0

    def read(self, node: yaml.Node, accepts: Accepts, key: str, setting: Setting | None = None) -> Any:
        """The node's plain value. Whether the setting accepts it is left to the schema."""
        self.num_values += 1
        if self.num_values > MAX_VALUES or key.count(".") > MAX_DEPTH:
            where = read_place(node, self.file)
            raise RecipeError([Problem("", "too many or too deeply nested values: not a recipe", "", where)])
        if key:
            self.places[key] = read_place(node, self.file)
        if not node.tag.startswith("tag:yaml.org,2002:") or ":python" in node.tag:
            self.add(key, f"the tag {node.tag} is refused: a recipe is plain data", "remove the tag", node)
            return None
        if isinstance(node, yaml.ScalarNode) and not accepts.takes_lines and (odd := find_control(node.value)):
            self.add(key, *explain_control(odd), node)
            return None
        if isinstance(node, yaml.MappingNode) and accepts.is_text and node.flow_style:
            what = "begins with {, which YAML reads as a mapping"
            self.add(key, what, "put it in quotes, or in lines below `|`", node)
            return None
        item = inspect_annotation(Any if accepts.item is None else accepts.item)
        if isinstance(node, yaml.SequenceNode):
            return tuple(self.read(child, item, f"{key}.{index}") for index, child in enumerate(node.value))
        stands_alone = accepts.item is not None and accepts.value is None
        if isinstance(node, yaml.MappingNode):
            if stands_alone and item.section:
                return (self.read(node, item, f"{key}.0"),)
            return (
                self.read_section(node, accepts.section, key) if accepts.section else self.read_free(node, accepts, key)
            )
        if isinstance(node, yaml.ScalarNode) and node.style is None:
            self.typed[key] = node.value
        value = _resolve(node, accepts, setting)
        if value is None or value == "":
            return value
        if stands_alone and value not in accepts.literals:
            return value if isinstance(value, tuple) else (self.read(node, item, f"{key}.0"),)
        if accepts.section and (short := find_short(accepts.section)) and type(value) in short.accepts.scalars:
            return {short.key: value}
        return value

    def read_section(self, node: yaml.MappingNode, section: type[Section], prefix: str) -> dict[str, Any]:
        names, settings = list_names(section), list_settings(section)
        values: dict[str, Any] = {}
        written: dict[str, str] = {}
        for name, key_node, child in self.walk_pairs(node, prefix):
            key = _join(prefix, name)
            if name not in names:
                self.add(key, "unknown key", explain_unknown(name, section, prefix, parse_plain(child)), key_node)
                continue
            own = names[name]
            if own in written:
                self.add(key, f"says again what {written[own]} says", "keep one of the two", key_node)
                continue
            if name != own:
                self.notes.append(f"{key} is understood as {_join(prefix, own)}")
            written[own] = key
            if settings[own].accepts.section and isinstance(child, yaml.ScalarNode) and not child.value:
                ways = f"{own}: {{}} for its defaults" + (
                    f" or {own}: null for none" if settings[own].accepts.is_optional else ""
                )
                self.add(key, "is empty", f"write {ways}", child)
                continue
            setting = settings[own]
            if name in setting.spellings_by_alias:
                setting = replace(setting, spellings={**setting.spellings, **setting.spellings_by_alias[name]})
            values[own] = self.read(child, setting.accepts, _join(prefix, own), setting)
        return values

    def read_free(self, node: yaml.MappingNode, accepts: Accepts, prefix: str) -> dict[str, Any]:
        """A mapping whose keys the schema does not name."""
        value = inspect_annotation(Any if accepts.value is None else accepts.value)
        pairs = self.walk_pairs(node, prefix)
        return {name: self.read(child, value, _join(prefix, name)) for name, _, child in pairs}

    def walk_pairs(self, node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        """Yields each key once; keys that `<<` merges come after the written ones, which take precedence."""
        first: dict[str, yaml.Node] = {}
        merged: list[tuple[yaml.Node, yaml.Node]] = []
        for key_node, child in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.add(prefix, "a key must be plain text", "", key_node)
            elif odd := find_control(key_node.value):
                self.add(prefix, f"a key holds the control character {odd!r}", "write it in one line", key_node)
            elif key_node.value == "<<" and key_node.style is None:
                merged += self.list_merged(child, prefix)
            elif key_node.value in first:
                line = first[key_node.value].start_mark.line + 1
                key = _join(prefix, key_node.value)
                self.add(key, f"written twice, first in line {line}", "keep one of the two", key_node)
            else:
                first[key_node.value] = key_node
                yield key_node.value, key_node, child
        for key_node, child in merged:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value not in first:
                first[key_node.value] = key_node
                yield key_node.value, key_node, child

    def list_merged(self, node: yaml.Node, prefix: str) -> list[tuple[yaml.Node, yaml.Node]]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if all(isinstance(source, yaml.MappingNode) for source in sources):
            return [pair for source in sources for pair in source.value]
        self.add(prefix, "`<<` takes a mapping or a list of mappings", "", node)
        return []

    def add_validation(self, error: ValidationError) -> None:
        """Turns the schema's errors into problems: one for each key, and none for a section with a problem inside."""
        known = {problem.key for problem in self.problems}
        for item in error.errors(include_url=False, include_context=False):
            key, setting, accepts = _follow(item["loc"])
            if key in known or any(other.startswith(f"{key}.") for other in known):
                continue
            known.add(key)
            if item["type"] == "missing":
                message, hint = explain_missing(setting, accepts)
            else:
                message, hint = explain_value(setting, accepts, item["input"], self.typed.get(key, ""))
            self.problems.append(Problem(key, message, hint, locate(key, self.places, self.file)))

    def add(self, key: str, message: str, hint: str, node: yaml.Node) -> None:
        self.problems.append(Problem(key, message, hint, read_place(node, self.file)))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _resolve(node: yaml.Node, accepts: Accepts, setting: Setting | None) -> Any:
    """A scalar's value as its setting accepts it: `1e5` is a number for a rate and text for a commit."""
    plain = parse_plain(node)
    known = {} if setting is None else setting.spellings
    for spelling, value in [*known.items(), *((literal, literal) for literal in accepts.literals)]:
        if spelling == node.value or (type(spelling) is type(plain) and spelling == plain):
            return value
    takes_text = str in accepts.scalars
    if plain is None:
        return None
    if accepts.literals and isinstance(plain, bool | float) and type(plain) not in accepts.scalars:
        return node.value  # `true` equals the literal 1 in Python, but does not mean it
    if type(plain) is int and int not in accepts.scalars and float in accepts.scalars:
        return float(plain)
    if type(plain) is float and int in accepts.scalars and float not in accepts.scalars and plain.is_integer():
        return int(plain)
    return node.value if takes_text and type(plain) not in accepts.scalars else plain


def _follow(loc: tuple[int | str, ...]) -> tuple[str, Setting, Accepts]:
    """Takes pydantic's location, returns our key, its setting and what it accepts. The name of a union's branch, which
    follows a key, is dropped."""
    key, setting, accepts = "", None, Accepts(section=Recipe)
    for part in loc:
        if isinstance(part, int):
            key = f"{key}.{part}"
            accepts = inspect_annotation(accepts.item)
        elif accepts.section and part in list_settings(accepts.section):
            setting = list_settings(accepts.section)[part]
            key, accepts = _join(key, part), setting.accepts
        elif accepts.value is not None:
            key, accepts = _join(key, part), inspect_annotation(accepts.value)
    if setting is None:
        raise AssertionError(f"the schema complained about {loc}, which it does not hold")
    return key, setting, accepts
