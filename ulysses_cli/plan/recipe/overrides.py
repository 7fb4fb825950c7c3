"""Applies `section.key=value` words of a command line to a recipe's YAML tree, before the tree is read.

How a value is read depends on its setting: text is taken as typed, so that a pattern such as *.jsonl needs no quotes;
lists and mappings are written as in YAML.
"""

from __future__ import annotations

import re

import yaml

from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.problem import Problem, RecipeError, Where
from ulysses_cli.plan.recipe.complaints import explain_control, explain_unknown, list_homes
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.recipe.schema import Accepts, descend, find_short, list_names, list_settings
from ulysses_cli.plan.recipe.setting import find_control
from ulysses_cli.plan.recipe.yaml_tree import COMMAND_LINE, MAP_TAG, SEQ_TAG, TEXT_TAG, compose, parse_plain

HERE = Where(COMMAND_LINE)
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
