"""Parses YAML text into nodes that know their place, and reads plain scalars.

Every error of YAML becomes a RecipeError here. No tag is constructed, so no text runs code.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from ulysses_cli.plan.problem import Problem, RecipeError, Where

COMMAND_LINE = "command line"
TEXT_TAG, MAP_TAG, SEQ_TAG = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "map", "seq"))
NUMBER = re.compile(r"(?P<number>[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?)(?P<suffix>[KMGT]i?)?", re.ASCII)
SUFFIXES = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
MAX_NUMBER_DIGITS = 40
MAX_DEPTH = 100  # of brackets
YAML_HINTS = {
    "'\\t'": "indent with spaces; YAML takes no tabs",
    "expected ':'": "a setting is written key: value",
    "mapping values are not allowed": "quote a value that holds a colon, or fix the indentation",
    "end of stream": "close the quote or bracket",
    "expected the node content": "close the bracket, or write what is missing here",
    "found another document": "a recipe is one document: remove the line --- and what is below it, or save it apart",
    "cannot start any token": "quote a value that begins with @, % or a backquote",
}
NULLS = ("", "~", "null", "Null", "NULL")
BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


class Loader(yaml.SafeLoader):
    """Refuses deep brackets: its base looks at every open one for each token, which takes minutes for 100,000."""

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        if self.flow_level >= MAX_DEPTH:
            raise RecursionError
        super().fetch_flow_collection_start(token)


def compose(text: str, file: str) -> yaml.Node | None:
    """The node of the text's single document; None for empty text."""
    hint = ""
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=Loader)
        return node
    except yaml.MarkedYAMLError as error:
        reason = (error.problem or error.context or "cannot be parsed").removeprefix("but ")
        begins_earlier = "expected ':'" in reason or "end of stream" in reason
        mark = (error.context_mark if begins_earlier else None) or error.problem_mark or error.context_mark
        where = Where(file, mark.line + 1, mark.column + 1) if mark else Where(file, 1, 1)
        hint = next((hint for words, hint in YAML_HINTS.items() if words in reason), "")
    except yaml.reader.ReaderError as error:
        before = text[: int(error.position)]
        letter = error.character if isinstance(error.character, str) else chr(error.character)
        where = Where(file, before.count("\n") + 1, len(before) - before.rfind("\n"))
        reason, hint = f"character {letter!r} is not allowed", "remove it; an editor may not show it"
    except RecursionError:
        where, reason = Where(file, 1, 1), "nested too deeply"
    except (yaml.YAMLError, ValueError) as error:
        where, reason = Where(file, 1, 1), str(error)
    raise RecipeError([Problem("", f"not valid YAML: {reason}", hint, where)])


def read_place(node: yaml.Node, file: str) -> Where:
    mark = node.start_mark
    if mark is None or mark.name == COMMAND_LINE:
        return Where(COMMAND_LINE)
    return Where(file, mark.line + 1, mark.column + 1)


def parse_plain(node: yaml.Node) -> Any:
    """A scalar node's value by YAML 1.2's rules, with underscores and size suffixes. Quoted scalars are text."""
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
