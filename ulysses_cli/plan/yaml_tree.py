"""YAML text -> nodes that know their place, overrides laid over them, and what a plain scalar says.

Every way in which YAML can fail becomes a RecipeError here. No tag is ever constructed, so no text runs code.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from ulysses_cli.plan.problem import Problem, RecipeError, Where
from ulysses_cli.plan.recipe import Section
from ulysses_cli.plan.schema import inspect_annotation, list_names, list_settings

COMMAND_LINE = "command line"
NUMBER = re.compile(r"(?P<number>[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?)(?P<suffix>[KMGT]i?)?", re.ASCII)
SUFFIXES = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
MAX_NUMBER_DIGITS = 40
YAML_HINTS = {
    "'\\t'": "indent with spaces; YAML takes no tabs",
    "expected ':'": "a setting is written key: value",
    "mapping values are not allowed": "quote a value that holds a colon, or mend the indentation",
    "end of stream": "close the quote or bracket",
    "cannot start any token": "quote a value that begins with @, % or a backquote",
}
NULLS = ("", "~", "null", "Null", "NULL")
BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


def compose(text: str, file: str) -> yaml.Node | None:
    """Text -> its one document's node, or None where there is nothing."""
    hint = ""
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
        return node
    except yaml.MarkedYAMLError as error:
        reason = error.problem or error.context or "cannot be parsed"
        begins_earlier = "expected ':'" in reason or "end of stream" in reason
        mark = (error.context_mark if begins_earlier else None) or error.problem_mark or error.context_mark
        where = Where(file, mark.line + 1, mark.column + 1) if mark else Where(file, 1, 1)
        hint = next((hint for words, hint in YAML_HINTS.items() if words in reason), "")
    except yaml.reader.ReaderError as error:
        line = text[: int(error.position)].count("\n") + 1
        where, reason = Where(file, line, 1), f"character {error.character!r} is not allowed"
    except RecursionError:
        where, reason = Where(file, 1, 1), "nested too deeply"
    except (yaml.YAMLError, ValueError) as error:
        where, reason = Where(file, 1, 1), str(error)
    raise RecipeError([Problem("", f"not valid YAML: {reason}", hint, where)])


def apply_override(tree: yaml.MappingNode, override: str, section: type[Section]) -> None:
    """Lay one `a.b.c=value` over the tree, over any alias of the same setting, making sections that are not there."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    here = Where(COMMAND_LINE)
    if not equals or not all(parts):
        hint = "write section.key=value, as in train.max_steps=10"
        raise RecipeError([Problem("", f"{override!r} is not an override", hint, here)])
    try:
        value = compose(text, COMMAND_LINE) or yaml.ScalarNode("tag:yaml.org,2002:null", "")
    except RecipeError as error:
        reason = error.problems[0].message
        raise RecipeError([Problem(key, reason, "quote what YAML reads as its own", here)]) from None
    node: yaml.Node = tree
    known: type[Section] | None = section
    for depth, part in enumerate(parts):
        index = _find(node, part, known)
        if index is None and not isinstance(node, yaml.MappingNode):
            reached = ".".join(parts[:depth])
            raise RecipeError([Problem(key, f"{reached} has no element `{part}`", "", here)])
        if depth == len(parts) - 1:
            _put(node, index, part, value, is_new=True)
            return
        child = _get(node, index)
        if child is None or (isinstance(child, yaml.ScalarNode) and parse_plain(child) is None):
            child = yaml.MappingNode("tag:yaml.org,2002:map", [])
            _put(node, index, part, child, is_new=True)
        elif isinstance(child, yaml.CollectionNode):
            # An anchor may stand in several places; only this one is meant.
            child = type(child)(child.tag, list(child.value), child.start_mark, child.end_mark)
            _put(node, index, part, child, is_new=False)
        node, known = child, _find_section(known, part)


def read_place(node: yaml.Node, file: str) -> Where:
    mark = node.start_mark
    if mark is None or mark.name == COMMAND_LINE:
        return Where(COMMAND_LINE)
    return Where(file, mark.line + 1, mark.column + 1)


def parse_plain(node: yaml.Node) -> Any:
    """A scalar node by YAML 1.2's rules, plus underscores and size suffixes. What is quoted is text."""
    if not isinstance(node, yaml.ScalarNode) or node.style is not None:
        return node.value
    if node.value in NULLS:
        return None
    return BOOLEANS[node.value] if node.value in BOOLEANS else parse_number(node.value)


def parse_number(text: str) -> int | float | str:
    """`500_000`, `1e-5`, `500K` (decimal), `512Ki` (binary); anything else stays text."""
    match = NUMBER.fullmatch(text)
    if not match or len(text) > MAX_NUMBER_DIGITS:
        return text
    number, suffix = match["number"].replace("_", ""), match["suffix"]
    if number.lstrip("+-").isdigit():
        return int(number) * SUFFIXES.get(suffix, 1)
    scaled = float(number) * SUFFIXES.get(suffix, 1)
    return int(scaled) if suffix and abs(scaled) < 2**62 and scaled.is_integer() else scaled


def _find(node: yaml.Node, part: str, section: type[Section] | None) -> int | None:
    """Where a node holds the setting called `part`, whichever of its names was written."""
    if isinstance(node, yaml.MappingNode):
        names = list_names(section) if section else {}
        own = names.get(part, part)
        written = [key.value if isinstance(key, yaml.ScalarNode) else "" for key, _ in node.value]
        return next((index for index, name in enumerate(written) if names.get(name, name) == own), None)
    if isinstance(node, yaml.SequenceNode) and part.isascii() and part.isdigit() and int(part) < len(node.value):
        return int(part)
    return None


def _find_section(section: type[Section] | None, part: str) -> type[Section] | None:
    if section is None or part.isdigit():
        return section
    setting = list_settings(section).get(list_names(section).get(part, ""))
    if setting is None:
        return None
    item = setting.accepts.item
    return setting.accepts.section or (inspect_annotation(item).section if item is not None else None)


def _get(node: yaml.Node, index: int | None) -> yaml.Node | None:
    if index is None:
        return None
    held: yaml.Node = node.value[index][1] if isinstance(node, yaml.MappingNode) else node.value[index]
    return held


def _put(node: yaml.Node, index: int | None, name: str, value: yaml.Node, *, is_new: bool) -> None:
    if is_new:
        _mark_as_override(value)
    if isinstance(node, yaml.SequenceNode):
        node.value[index] = value
        return
    key = yaml.ScalarNode("tag:yaml.org,2002:str", name)
    _mark_as_override(key)
    if index is None:
        node.value.append((key, value))
    else:
        node.value[index] = (key if is_new else node.value[index][0], value)


def _mark_as_override(node: yaml.Node) -> None:
    if node.start_mark is not None and node.start_mark.name == COMMAND_LINE:
        return  # an anchor that holds itself
    node.start_mark = node.end_mark = yaml.Mark(COMMAND_LINE, 0, 0, 0, None, 0)
    for child in node.value if isinstance(node, yaml.CollectionNode) else ():
        for part in child if isinstance(child, tuple) else (child,):
            _mark_as_override(part)
