"""Inspects the recipe's schema: which values a setting accepts, in words and for the loader.

The only file that reads pydantic's field objects. Defines no setting.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.recipe.setting import LINES, Section
from ulysses_cli.plan.units import format_plain

SCALAR_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True)
class Accepts:
    """What one place of a recipe accepts. `item`, `value`: annotations of list elements and of mapping values."""

    section: type[Section] | None = None
    item: Any = None
    value: Any = None
    scalars: tuple[type, ...] = ()
    literals: tuple[Any, ...] = ()
    is_optional: bool = False
    takes_lines: bool = False  # a text of several lines
    bounds: dict[str, float] = field(default_factory=dict)

    @property
    def inner(self) -> type[Section] | None:
        """The section at this place, or the section of a list's elements."""
        return self.section or (inspect_annotation(self.item).section if self.item is not None else None)

    @property
    def is_text(self) -> bool:
        return str in self.scalars and not self.section and self.item is None and self.value is None

    def describe(self) -> str:
        """In words, for an error message: `a whole number from 1 to 4096`."""
        words = [f"`{format_value(value)}`" for value in self.literals]
        for kind in self.scalars:
            words += ["true", "false"] if kind is bool else [SCALAR_WORDS[kind] + self.describe_bounds(kind)]
        if self.section:
            words.append("a section")
        if self.item is not None:
            words.append(f"a list{self.describe_bounds(list)}, each {inspect_annotation(self.item).describe()}")
        if self.value is not None:
            words.append("a mapping")
        if self.is_optional:
            words.append("null")
        return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]

    def describe_bounds(self, kind: type) -> str:
        low, high = self.bounds.get("ge", self.bounds.get("gt")), self.bounds.get("le", self.bounds.get("lt"))
        if kind in (int, float) and low is not None and high is not None:
            above = "above " if "gt" in self.bounds else "from "
            below = " to below " if "lt" in self.bounds else " to "
            return f" {above}{format_plain(low)}{below}{format_plain(high)}"
        if kind is list and "max_length" in self.bounds:
            return f" of {self.bounds.get('min_length', 0):,} to {self.bounds['max_length']:,}"
        return ""


@dataclass(frozen=True)
class Setting:
    """One field, as the loader and `config-schema` see it."""

    key: str
    doc: str
    unit: str
    default: Any
    is_required: bool
    accepts: Accepts
    aliases: tuple[str, ...]
    spellings: dict[Any, Any]
    spellings_by_alias: dict[str, dict[Any, Any]]
    refused: dict[str, str]


@cache
def list_settings(section: type[Section]) -> dict[str, Setting]:
    """The settings of a section by name."""
    return {name: _read_field(name, info) for name, info in section.model_fields.items()}


@cache
def list_names(section: type[Section]) -> dict[str, str]:
    """By every name that a section accepts, aliases included, the setting's own name."""
    names = {name: name for name in list_settings(section)}
    for name, setting in list_settings(section).items():
        names.update(dict.fromkeys(setting.aliases, name))
    return names


def find_short(section: type[Section]) -> Setting | None:
    """The setting that a plain value in place of the section stands for; None where a section has none."""
    return list_settings(section)[section.SHORT] if section.SHORT else None


def descend(accepts: Accepts | None, part: str) -> Accepts | None:
    """What is accepted one name or one index below; None where the schema does not say."""
    if accepts is None:
        return None
    if accepts.section:
        setting = list_settings(accepts.section).get(list_names(accepts.section).get(part, ""))
        return setting.accepts if setting else None
    if accepts.item is not None and accepts.value is None:
        return inspect_annotation(accepts.item)
    return inspect_annotation(accepts.value) if accepts.value is not None else None


def walk_settings(section: type[Section] = Recipe, prefix: str = "") -> Iterator[Setting]:
    """Every setting with its full dotted key, sections before their content, list elements as `[]`."""
    for name, setting in list_settings(section).items():
        yield replace(setting, key=prefix + name)
        if setting.accepts.inner:
            below = f"{prefix}{name}." if setting.accepts.section else f"{prefix}{name}[]."
            yield from walk_settings(setting.accepts.inner, below)


def make_json_schema(key: str = "") -> dict[str, Any]:
    """The JSON schema for editors. Sizes such as 64Ki are text there, and a setting may be written by any of its names.
    `key`: only that section or setting."""
    schema = Recipe.model_json_schema()
    for part in (schema, *schema["$defs"].values()):
        for name, setting in list(part.get("properties", {}).items()):
            for place in (setting, *setting.get("anyOf", [])):
                if place.get("type") == "integer":
                    bounds = {key: place.pop(key) for key in list(place) if key in ("minimum", "maximum", "type")}
                    size = {"type": "string", "pattern": "^[0-9][0-9_.]*([eE][0-9]+|[KMGT]i?)?$"}
                    place["anyOf"] = [bounds, size]
            for alias in setting.get("aliases", ()):
                part["properties"][alias] = {**setting, "description": f"see {name}", "aliases": []}
    part = schema
    for name in key.split(".") if key else ():
        part = _follow_references(part, schema["$defs"])["properties"][name.removesuffix("[]")]
    return part if not key else {**_follow_references(part, schema["$defs"]), "$defs": schema["$defs"]}


def _follow_references(part: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a property's section, of its elements' section, or the property itself."""
    for branch in (part, part.get("items", {}), *part.get("anyOf", [])):
        if "$ref" in branch:
            section: dict[str, Any] = definitions[branch["$ref"].rpartition("/")[2]]
            return section
    return part


def _read_field(name: str, info: FieldInfo) -> Setting:
    extra: dict[str, Any] = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    accepts = inspect_annotation(info.annotation)
    bounds = {**accepts.bounds, **_read_bounds(info.metadata)}
    accepts = replace(accepts, bounds=bounds, takes_lines=accepts.takes_lines or LINES in info.metadata)
    return Setting(
        key=name,
        doc=info.description or "",
        unit=extra["unit"],
        default=None if info.is_required() else info.default,
        is_required=info.is_required(),
        accepts=accepts,
        aliases=tuple(extra["aliases"]),
        spellings=extra["spellings"],
        spellings_by_alias=extra["spellings_by_alias"],
        refused=extra["refused"],
    )


def inspect_annotation(annotation: Any) -> Accepts:
    """What a Python annotation accepts. The schema uses few forms; any other is a mistake in the schema."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return replace(inspect_annotation(args[0]), bounds=_read_bounds(args[1:]), takes_lines=LINES in args)
    if origin in (Union, types.UnionType):
        return _merge([inspect_annotation(arg) for arg in args])
    if origin is Literal:
        return Accepts(literals=args)
    if origin is tuple:
        return Accepts(item=args[0])
    if origin is dict:
        return Accepts(value=args[1])
    if annotation is type(None):
        return Accepts(is_optional=True)
    if annotation is Any:
        return Accepts(item=Any, value=Any, scalars=(bool, int, float, str), is_optional=True)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return Accepts(section=annotation)
    if annotation in SCALAR_WORDS:
        return Accepts(scalars=(annotation,))
    raise TypeError(f"the recipe's schema does not use {annotation}")


def _merge(parts: list[Accepts]) -> Accepts:
    return Accepts(
        section=next((part.section for part in parts if part.section), None),
        item=next((part.item for part in parts if part.item is not None), None),
        value=next((part.value for part in parts if part.value is not None), None),
        scalars=tuple(kind for part in parts for kind in part.scalars),
        literals=tuple(value for part in parts for value in part.literals),
        is_optional=any(part.is_optional for part in parts),
        takes_lines=any(part.takes_lines for part in parts),
        bounds={name: bound for part in parts for name, bound in part.bounds.items()},
    )


def _read_bounds(metadata: Any) -> dict[str, float]:
    """Bounds by pydantic's names. A FieldInfo inside Annotated holds its own list of them."""
    bounds: dict[str, float] = {}
    for item in metadata:
        if isinstance(item, FieldInfo):
            bounds.update(_read_bounds(item.metadata))
        for name in ("ge", "gt", "le", "lt", "min_length", "max_length"):
            value = getattr(item, name, None)
            if isinstance(value, int | float):
                bounds[name] = value
    return bounds


def format_value(value: object) -> str:
    """A setting's value as it would be written in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    return str(value)
