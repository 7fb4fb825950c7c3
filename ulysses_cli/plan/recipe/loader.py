"""Loads a recipe file and the `section.key=value` words of a command line into a Recipe, or raises a RecipeError with
every mistake and its place. Walks YAML nodes and the schema in parallel. No input raises anything else.
A word's text is taken as typed, so that *.jsonl needs no quotes. Rules across fields are in rules/."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ulysses_cli.plan.problem import Problem, RecipeError, Where
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.recipe.schema import (
    COMMAND_LINE,
    MAP_TAG,
    SEQ_TAG,
    TEXT_TAG,
    Accepts,
    Setting,
    compose,
    descend,
    explain_control,
    explain_missing,
    explain_unknown,
    explain_value,
    find_short,
    inspect_annotation,
    list_homes,
    list_names,
    list_settings,
    parse_plain,
    read_place,
)
from ulysses_cli.plan.recipe.sections import Section, find_control
from ulysses_cli.plan.units import format_count

HERE = Where(COMMAND_LINE)
EXTENDS = "extends"
QUOTES, BRACKETS = ("'", '"'), ("[", "{")
SPECIAL = ("*", "&", "!", "@", "%", "`", "#", "|", ">")  # special to YAML; no setting's value begins with one


def apply_override(tree: yaml.MappingNode, override: str) -> None:
    """Applies one `a.b.c=value`. Replaces any alias of the same setting; adds sections that are missing."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals:
        key, _, value = re.sub("[ :]+", " ", key, count=1).partition(" ")
        if (unknown := _find_unknown(key)) is not None:
            raise RecipeError([Problem(key, "unknown key, and no value", unknown, HERE)])
        hint = " or ".join(f"{home}={value or 'VALUE'}" for home in list_homes(key) or [key])
        raise RecipeError([Problem(key, "has no value", f"write {hint}", HERE)])
    if "[" in key:
        dotted = re.sub(r"\[(\w*)\]", r".\1", key)
        raise RecipeError([Problem(key, "elements of a list have no brackets", f"write {dotted}={text.strip()}", HERE)])
    parts = key.split(".")
    if parts[0] == EXTENDS:
        raise RecipeError([Problem(key, "is no setting of a command line", f"write {EXTENDS} in the recipe", HERE)])
    if not all(parts):
        hint = "write section.key=value, as in train.max_steps=10"
        raise RecipeError([Problem("", f"{override!r} names no setting", hint, HERE)])
    node: yaml.Node = tree
    known: Accepts | None = Accepts(section=Recipe)
    for depth, part in enumerate(parts):
        index = _find(node, part, known)
        is_next = isinstance(node, yaml.SequenceNode) and part == str(len(node.value))
        if index is None and not is_next and not isinstance(node, yaml.MappingNode):
            raise RecipeError([_explain_miss(node, ".".join(parts[:depth]), ".".join(parts[depth:]), known)])
        known = descend(known, part)
        if depth == len(parts) - 1:
            if known is not None and not text.strip():
                none = f", or {key}=null for none" if known.is_optional else ""
                raise RecipeError([Problem(key, "has an empty value", f"write {key}=VALUE{none}", HERE)])
            if not (known and known.takes_lines) and (odd := find_control(override)):
                raise RecipeError([Problem(key, *explain_control(odd), HERE)])
            _put(node, index, part, _read_value(text.strip(), known, key), is_new=True)
            return
        child = _make_room(_get(node, index), known, parts[depth + 1])
        _put(node, index, part, child, is_new=child.start_mark is None)
        node = child


def _find_unknown(key: str) -> str | None:
    """What to write instead of a section that a recipe does not have, or of a key that a section does not have. None
    for the others, and for keys without their section."""
    first, _, name = key.partition(".")
    if first not in list_settings(Recipe):
        return None if list_homes(first) and not name else explain_unknown(first, Recipe, "")
    section = list_settings(Recipe)[first].accepts.section
    if section is None or not name or name.partition(".")[0] in list_names(section):
        return None
    return explain_unknown(name.partition(".")[0], section, first)


def _read_value(text: str, accepts: Accepts | None, key: str) -> yaml.Node:
    if odd := yaml.reader.Reader.NON_PRINTABLE.search(text):
        raise RecipeError([Problem(key, f"character {odd[0]!r} is not allowed", "remove it", HERE)])
    is_quoted, is_bracket = text.startswith(QUOTES), text.startswith(BRACKETS) and not (accepts and accepts.is_text)
    holds_more = accepts is None or accepts.section is not None or accepts.value is not None
    if is_quoted or is_bracket or (holds_more and not text.startswith(SPECIAL)):
        try:
            return compose(text, COMMAND_LINE) or yaml.ScalarNode(TEXT_TAG, "")
        except RecipeError as error:
            if is_quoted or is_bracket:
                hint = "lists are [a, b], mappings {a: b}; quote what YAML reads as its own, such as '*.jsonl'"
                hint = "close the quote" if is_quoted else hint
                raise RecipeError([Problem(key, error.problems[0].message, hint, HERE)]) from None
    return yaml.ScalarNode(TEXT_TAG, text)


def _explain_miss(node: yaml.Node, reached: str, rest: str, known: Accepts | None) -> Problem:
    message = f"{reached} has no element `{rest.partition('.')[0]}`"
    if not isinstance(node, yaml.SequenceNode):
        return Problem(f"{reached}.{rest}", message, f"write {reached}=VALUE", HERE)
    if not rest[0].isdigit():
        part, _, below = rest.partition(".")
        is_setting = known is not None and known.inner is not None and part in list_names(known.inner)
        first = ".".join(filter(None, (reached, "0", rest if is_setting else below)))
        return Problem(f"{reached}.{rest}", message, f"count its elements from 0: {first}", HERE)
    last = len(node.value)
    hint = f"it has {format_count(last, 'element')}, counted from 0; {reached}.{last} adds one"
    return Problem(f"{reached}.{rest}", message, hint, HERE)


def _find(node: yaml.Node, part: str, known: Accepts | None) -> int | None:
    """The index in a node of the setting called `part`, under any of its names."""
    if isinstance(node, yaml.MappingNode):
        names = list_names(known.section) if known is not None and known.section else {}
        own = names.get(part, part)
        written = [key.value if isinstance(key, yaml.ScalarNode) else "" for key, _ in node.value]
        return next((index for index, name in enumerate(written) if names.get(name, name) == own), None)
    if isinstance(node, yaml.SequenceNode) and part.isascii() and part.isdigit() and int(part) < len(node.value):
        return int(part)
    return None


def _get(node: yaml.Node, index: int | None) -> yaml.Node | None:
    if index is None:
        return None
    held: yaml.Node = node.value[index][1] if isinstance(node, yaml.MappingNode) else node.value[index]
    return held


def _make_room(child: yaml.Node | None, known: Accepts | None, part: str) -> yaml.Node:
    """The node that holds `part`: the existing one, or a new one. A single value in place of a list becomes a list,
    and one in place of a section its short setting."""
    is_list = known is not None and known.item is not None and known.value is None and part.isdigit()
    if child is None or (isinstance(child, yaml.ScalarNode) and parse_plain(child) is None):
        return yaml.SequenceNode(SEQ_TAG, []) if is_list else yaml.MappingNode(MAP_TAG, [])
    if is_list and not isinstance(child, yaml.SequenceNode):
        return yaml.SequenceNode(SEQ_TAG, [child], child.start_mark, child.end_mark)
    short = find_short(known.section) if known is not None and known.section else None
    if short is not None and isinstance(child, yaml.ScalarNode):
        name = yaml.ScalarNode(TEXT_TAG, short.key, child.start_mark, child.end_mark)
        return yaml.MappingNode(MAP_TAG, [(name, child)], child.start_mark, child.end_mark)
    if isinstance(child, yaml.CollectionNode):  # an anchor may be used in several places; change only this one
        return type(child)(child.tag, list(child.value), child.start_mark, child.end_mark)
    return child


def _put(node: yaml.Node, index: int | None, name: str, value: yaml.Node, *, is_new: bool) -> None:
    if is_new:
        _mark(value)
    if isinstance(node, yaml.SequenceNode):
        at = len(node.value) if index is None else index
        node.value[at : at + 1] = [value]
        return
    key = yaml.ScalarNode(TEXT_TAG, name)
    _mark(key)
    if index is None:
        node.value.append((key, value))
    else:
        node.value[index] = (key if is_new else node.value[index][0], value)


def _mark(node: yaml.Node) -> None:
    if node.start_mark is not None and node.start_mark.name == COMMAND_LINE:
        return  # marked already: an anchor may contain itself
    node.start_mark = node.end_mark = yaml.Mark(COMMAND_LINE, 0, 0, 0, None, 0)
    for child in node.value if isinstance(node, yaml.CollectionNode) else ():
        for part in child if isinstance(child, tuple) else (child,):
            _mark(part)


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
    return parse_recipe(_read_text(str(path)), str(path), overrides)


def load_whole_text(path: str | Path) -> str:
    """The text of a recipe file; of one that extends another, the text of all of them as one document."""
    text, file = _read_text(str(path)), str(path)
    tree, _, bases = _compose_chain(text, file)
    if not bases:
        return text
    files = ", over ".join(Path(each).name for each in (file, *bases))
    return f"# {files}\n{yaml.serialize(tree, Dumper=yaml.SafeDumper, allow_unicode=True, width=120)}"


def _read_text(file: str) -> str:
    if not file:
        hint = "name a recipe, or leave the argument out; is a variable of the shell unset?"
        raise RecipeError([Problem("RECIPE", "is an empty argument", hint)])
    if odd := find_control(file):
        message = f"its name holds the control character {odd!r}"
        raise RecipeError([Problem("", message, "rename the file", Where(file))])
    try:
        with open(file, "rb") as stream:
            content = stream.read(MAX_RECIPE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        hint = "name a file; `ulysses recipes copy NAME` makes one of those that `ulysses recipes list` shows"
        raise RecipeError([Problem("", f"cannot be read: {reason}", hint, Where(file))]) from None
    if len(content) > MAX_RECIPE_BYTES:
        raise RecipeError([Problem("", f"larger than {MAX_RECIPE_BYTES:,} bytes: not a recipe", "", Where(file))])
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = Where(file, content[: error.start].count(b"\n") + 1, 1)
        raise RecipeError([Problem("", "not UTF-8 text", "save the recipe as UTF-8", where)]) from None


def _compose_chain(text: str, file: str) -> tuple[yaml.MappingNode, list[Problem], list[str]]:
    """The tree of a recipe, laid over that of the one that it extends, and so on; the mistakes in each of these files,
    since what another file replaces is not seen in the tree; and the names of the files that are extended."""
    whole = tree = _compose_mapping(text, file)
    mistakes: list[Problem] = []
    chain = [file]
    while len(chain) > 1 or EXTENDS in (name for name, _, _ in _Reader("").walk_pairs(tree, "")):
        reader = _Reader(chain[-1])
        name = reader.read(tree, Accepts(section=Recipe), "").get(EXTENDS)
        mistakes += reader.problems
        if any(problem.key == EXTENDS for problem in mistakes):  # what the other file holds would be said to be missing
            raise RecipeError(sorted(mistakes, key=lambda problem: problem.where))
        if name is None:
            break
        try:
            tree = _open_base(name, reader, chain)
        except RecipeError as error:
            problems = sorted([*mistakes, *error.problems], key=lambda problem: problem.where)
            raise RecipeError(problems) from None
        whole = _merge(tree, whole, Accepts(section=Recipe))
        whole.value = [pair for pair in whole.value if pair[0].value != EXTENDS]
    return whole, mistakes, chain[1:]


def _open_base(name: Any, reader: _Reader, chain: list[str]) -> yaml.MappingNode:
    """The tree of the file that the last of the chain extends; its name is added to the chain."""
    where, setting = reader.places[EXTENDS], list_settings(Recipe)[EXTENDS]
    if not isinstance(name, str) or not 0 < len(name) <= setting.accepts.bounds["max_length"]:
        message, hint = explain_value(setting, setting.accepts, name, reader.typed.get(EXTENDS, ""))
        raise RecipeError([Problem(EXTENDS, message, hint, where)])
    file = str(Path(chain[-1]).parent / os.path.expanduser(name))
    chain.append(file)
    if os.path.realpath(file) in map(os.path.realpath, chain[:-1]):
        message, hint = f"leads back to a file of its own chain: {' -> '.join(chain)}", "remove one of these links"
        raise RecipeError([Problem(EXTENDS, message, hint, where)])
    try:
        return _compose_mapping(_read_text(file), file)
    except RecipeError as error:
        if error.problems[0].where.line:
            raise
        hint = "the path is relative to the file in which it stands"
        raise RecipeError([Problem(EXTENDS, f"{file} {error.problems[0].message}", hint, where)]) from None


def _compose_mapping(text: str, file: str) -> yaml.MappingNode:
    tree = compose(text, file) or yaml.MappingNode(MAP_TAG, [])
    if not isinstance(tree, yaml.MappingNode):
        raise RecipeError([Problem("", "a recipe is a mapping of sections", "start with `model:`", read_place(tree))])
    return tree


def _merge(base: yaml.MappingNode, over: yaml.MappingNode, accepts: Accepts | None) -> yaml.MappingNode:
    """Mappings are merged key by key, under whatever names keys are written. Anything else replaces: a list, which is
    one value, a scalar, null."""
    names = list_names(accepts.section) if accepts is not None and accepts.section else {}
    pairs = {names.get(name, name): (key, child) for name, key, child in _Reader("").walk_pairs(base, "")}
    for name, key, child in _Reader("").walk_pairs(over, ""):
        own = names.get(name, name)
        below = descend(accepts, name)
        is_list = below is not None and below.item is not None and below.value is None
        held = pairs[own][1] if own in pairs else None
        if isinstance(held, yaml.MappingNode) and isinstance(child, yaml.MappingNode) and not is_list:
            child = _merge(held, child, below)
        pairs[own] = (key, child)
    return yaml.MappingNode(MAP_TAG, list(pairs.values()), over.start_mark, over.end_mark)


def parse_recipe(text: str, file: str = "recipe", overrides: Sequence[str] = ()) -> Loaded:
    """The same from text; `file` is its name in problems."""
    tree, mistakes, _ = _compose_chain(text, file)
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
        problems = sorted(dict.fromkeys(reader.problems), key=lambda problem: problem.where)
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
            where = read_place(node)
            raise RecipeError([Problem("", "too many or too deeply nested values: not a recipe", "", where)])
        if key:
            self.places[key] = read_place(node)
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
        self.problems.append(Problem(key, message, hint, read_place(node)))


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
