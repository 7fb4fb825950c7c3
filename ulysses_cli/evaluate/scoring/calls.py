"""Reads the calls of tools in what a model wrote, in the forms of known chat templates, and compares them as JSON.

Forms: objects of JSON with a name, or behind one; tags for each parameter; keys and values in tags; Python; Gemma's.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Call = tuple[str, Mapping[str, Any]]
NAME = r"[\w.:/-]+"
ARGUMENTS = ("arguments", "parameters")
TAGGED = re.compile(
    r"<(?:[\w-]+:)?(?:function=|invoke name=[\"']?)([^>\"'\n]+)[\"']?>(.*?)</(?:[\w-]+:)?(?:function|invoke)>", re.S
)
PARAMETER = re.compile(
    r"<(?:[\w-]+:)?parameter(?:=| name=[\"']?)([^>\"'\n]+)[\"']?[^>]*>(.*?)</(?:[\w-]+:)?parameter>", re.S
)
KEYED = re.compile(
    rf"<tool_call>\s*({NAME})\s*((?:<arg_key>.*?</arg_key>\s*<arg_value>.*?</arg_value>\s*)*)</tool_call>", re.S
)
KEY_AND_VALUE = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.S)
GEMMA = re.compile(rf"call:({NAME})(?=\{{)")
GEMMA_TEXT = re.compile(r"(<\|\"\|>|<escape>)(.*?)\1", re.S)
GEMMA_KEY = re.compile(r"([{,]\s*)([\w.-]+)(\s*:)")
# What stands between a call's name and its object, or before the name; the last one counts.
NAMED = re.compile(rf"(?:\bto=|<｜tool▁call▁begin｜>|<｜tool▁sep｜>|<\|tool_call_begin\|>|\[TOOL_CALLS\])\s*({NAME})")
PYTHON = re.compile(r"\[\s*[A-Za-z_][\w.]*\(.*\)\s*\]", re.S)
CONSTANTS = {"true": True, "false": False, "null": None}
THOUGHT_ENDS = ("</think>", "[/THINK]", "</seed:think>")


def read_calls(text: str) -> list[Call]:
    """The calls in what follows the last thought; [] where there is none in a form that is known."""
    for end in THOUGHT_ENDS:
        text = text.rpartition(end)[2]
    for read in READERS:
        if calls := list(read(text)):
            return [(_name(name), arguments) for name, arguments in calls]
    return []


def score_calls(answer: str, references: Sequence[str], _: Mapping[str, Any]) -> float:
    """Whether the answer makes the calls of the reference, each once, in any order: names, and arguments as JSON."""
    return float(Counter(map(_write, read_calls(answer))) == Counter(map(_write, _parse(references[0]))))


def score_names(answer: str, reference: str) -> float:
    """Whether it calls the same tools, whatever it gives them."""
    return float(Counter(name for name, _ in read_calls(answer)) == Counter(name for name, _ in _parse(reference)))


def write_calls(calls: Sequence[Call]) -> str:
    """The text of a reference."""
    return json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls], ensure_ascii=False)


def _parse(reference: str) -> list[Call]:
    return [(call["name"], call["arguments"]) for call in json.loads(reference)]


def _write(call: Call) -> str:
    """Equal for equal calls. 1.0 is 1, as in JSON; true is not."""
    return json.dumps([call[0], _settle(call[1])], sort_keys=True, ensure_ascii=False)


def _settle(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _settle(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_settle, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _name(name: str) -> str:
    """Kimi's ids are functions.find:0."""
    return re.sub(r":\d+$", "", name.strip()).removeprefix("functions.")


def _read_value(text: str) -> Any:
    """Such forms write texts as they are, so that the text 3 and the number 3 are one."""
    text = text.strip()
    if text in ("True", "False", "None"):
        return ast.literal_eval(text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _read_tagged(text: str) -> Iterator[Call]:
    for name, inside in TAGGED.findall(text):
        yield name, {key.strip(): _read_value(value) for key, value in PARAMETER.findall(inside)}


def _read_keyed(text: str) -> Iterator[Call]:
    for name, inside in KEYED.findall(text):
        yield name, {key.strip(): _read_value(value) for key, value in KEY_AND_VALUE.findall(inside)}


def _read_gemma(text: str) -> Iterator[Call]:
    for found in GEMMA.finditer(text):
        parts = GEMMA_TEXT.split(text[found.end() :])  # text outside, mark, text inside, ...
        outside = (
            re.sub(r"\bNone\b", "null", GEMMA_KEY.sub(r'\1"\2"\3', part)) if at % 3 == 0 else json.dumps(part)
            for at, part in enumerate(parts)
            if at % 3 != 1
        )
        if isinstance(arguments := _decode("".join(outside))[0], dict):
            yield found.group(1), arguments


def _read_objects(text: str) -> Iterator[Call]:
    at = last = 0
    while (begin := re.compile(r"[{\[]").search(text, at)) is not None:
        value, size = _decode(text[begin.start() :])
        if not isinstance(value, dict | list) or not size:
            at = begin.start() + 1
            continue
        before, at = text[last : begin.start()], begin.start() + size
        own = list(_list_objects(value))
        names = NAMED.findall(before)
        if own:
            yield from own
        elif names and isinstance(value, dict):
            yield names[-1], value
        last = at


def _list_objects(value: Any) -> Iterator[Call]:
    """Calls among an object, or a list of them."""
    for each in value if isinstance(value, list) else [value]:
        holder = each.get("function") if isinstance(each, dict) and isinstance(each.get("function"), dict) else each
        if not isinstance(holder, dict):
            continue
        name = holder.get("name", holder.get("tool_name"))
        arguments = next((holder[key] for key in ARGUMENTS if key in holder), None)
        if isinstance(arguments, str):
            arguments, _ = _decode(arguments)
        if isinstance(name, str) and isinstance(arguments, dict):
            yield name, arguments


def _decode(text: str) -> tuple[Any, int]:
    """The JSON that a text begins with, and its length; (None, 0) where there is none."""
    try:
        return json.JSONDecoder(strict=False).raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0


def _read_python(text: str) -> Iterator[Call]:
    if (found := PYTHON.search(text)) is None:
        return
    for source in (found.group(), found.group().replace("\n", "\\n")):  # some templates write line ends as they are
        try:
            tree = ast.parse(source, mode="eval").body
            calls = tree.elts if isinstance(tree, ast.List) else []
            yield from [
                (ast.unparse(call.func), {str(word.arg): _evaluate(word.value) for word in call.keywords})
                for call in calls
                if isinstance(call, ast.Call)
            ]
            return
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue


def _evaluate(node: ast.expr) -> Any:
    """A literal, in which JSON's constants are taken, too. Raises ValueError for anything else."""
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return list(map(_evaluate, node.elts))
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(_evaluate(key)): _evaluate(value) for key, value in pairs if key is not None}
    return ast.literal_eval(node)


READERS: tuple[Callable[[str], Iterator[Call]], ...] = (
    _read_tagged, _read_keyed, _read_gemma, _read_objects, _read_python
)  # fmt: skip
