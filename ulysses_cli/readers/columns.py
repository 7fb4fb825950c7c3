"""Turns a row's columns into a sample: text, chat, prompt and completion, or tokens.

Never guesses: a row that lacks something raises BadRow with the reason. Knows no file and no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.recipe.data_section import COLUMNS, RowType
from ulysses_cli.readers.problems import BadRow

Row = Mapping[str, Any]
Names = Mapping[str, str]  # the file's own name of a column, by the name that is expected here
SAME: Names = {}
ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE_NAMES = {
    **{role: role for role in ROLES},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"},
    **{"model": "assistant", "function_response": "tool", "observation": "tool"},
}

NAMES: dict[type, str] = {
    **{type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text"},
    **{list: "a list", dict: "a mapping"},
}


@dataclass(frozen=True)
class PlainText:
    text: str


@dataclass(frozen=True)
class Chat:
    """Messages for a chat template. Messages before `first_target` are never targets."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    first_target: int = 0
    is_completion: bool = False


@dataclass(frozen=True)
class Completion:
    prompt: str
    completion: str


@dataclass(frozen=True)
class Tokens:
    """`targets` marks the tokens that are targets; None: all are."""

    ids: list[int]
    targets: list[bool] | None


Sample = PlainText | Chat | Completion | Tokens


def detect_kind(row: Row, names: Names = SAME) -> RowType:
    """The kind of a source, by the columns of its first row."""
    renamed = rename(row, names)
    for kind, columns in COLUMNS.items():
        if all(column in renamed for column in columns):
            return kind
    known = "; ".join(" + ".join(names.get(column, column) for column in columns) for columns in COLUMNS.values())
    raise BadRow(f"a row with {list_columns(row)} is not understood: one of these is needed: {known}")


def rename(row: Row, names: Names) -> Row:
    """The row by the names that are expected. A column that the file calls by such a name itself is another one."""
    if not names or not isinstance(row, dict):
        return row
    own = {name: value for name, value in row.items() if name not in names and name not in names.values()}
    return {**own, **{name: row[given] for name, given in names.items() if given in row}}


def read_sample(kind: RowType, row: Row, *, has_template: bool = True, names: Names = SAME) -> Sample:
    """Raises BadRow with the reason if the row cannot be used. `has_template`: instructions become a chat."""
    if not isinstance(row, dict):
        raise BadRow(f"{_name(row)} where a row of columns is needed")
    given, row = row, rename(row, names)
    for column in COLUMNS[kind]:
        if column not in row:
            raise BadRow(f"column `{names.get(column, column)}` is missing; there is {list_columns(given)}")
        if row[column] is None:
            raise BadRow(f"column `{names.get(column, column)}` is null")
    if kind == "text":
        return PlainText(_read_text(row, "text"))
    if kind == "tokens":
        return _read_tokens(row)
    if kind == "completion":
        return _read_completion(row)
    if kind == "instruction":
        return _read_instruction(row, has_template)
    turns = row[COLUMNS[kind][0]]
    messages = read_messages(turns, COLUMNS[kind][0])
    system = row.get("system")
    if system is not None and not isinstance(system, str):
        raise BadRow(f"column `system` holds {_name(system)}, not text")
    if system and messages[0]["role"] == "system" and messages[0]["content"] != system:
        raise BadRow("column `system` and the first turn are two different system prompts")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": check_text(system, "system")})
    return Chat(messages, _read_tools(row.get("tools")))


def read_messages(turns: Any, column: str) -> list[dict[str, Any]]:
    """Reads turns of role and content, or of from and value, as messages of role and content."""
    turns = _parse_json(turns, column) if isinstance(turns, str) else turns
    if not isinstance(turns, Sequence) or isinstance(turns, str | bytes):
        raise BadRow(f"column `{column}` holds {_name(turns)}, not a list of turns")
    if not turns:
        raise BadRow(f"column `{column}` is an empty list")
    return [_read_turn(turn, number) for number, turn in enumerate(turns, 1)]


def _read_turn(turn: Any, number: int) -> dict[str, Any]:
    if turn is None:
        raise BadRow(f"turn {number} is null")
    if not isinstance(turn, dict):
        raise BadRow(f"turn {number} is {_name(turn)}, not role and content")
    names = ("role", "content") if "role" in turn else ("from", "value")
    if names[0] not in turn:
        raise BadRow(f"turn {number} has no role; there is {list_columns(turn)}")
    role = ROLE_NAMES.get(turn[names[0]]) if isinstance(turn[names[0]], str) else None
    if role is None:
        raise BadRow(f"turn {number} has the unknown role {turn[names[0]]!r}; known are {', '.join(ROLE_NAMES)}")
    others = {key: value for key, value in turn.items() if key not in names and value is not None}
    content = turn.get(names[1])
    calls = others.get("tool_calls")
    if calls is not None:
        others["tool_calls"] = _read_calls(calls, number)
    if isinstance(content, list):
        content = _join_parts(content, number)
    if content is None and calls:
        content = ""
    if content is None:
        raise BadRow(f"turn {number} ({role}) has no content")
    if not isinstance(content, str):
        raise BadRow(f"turn {number} ({role}) holds {_name(content)}, not text")
    if not content and role in ("user", "assistant") and not others:
        raise BadRow(f"turn {number} ({role}) is empty")
    return {"role": role, "content": check_text(content, f"turn {number}"), **others}


def _join_parts(parts: list[Any], number: int) -> str:
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else _name(part)
            raise BadRow(f"turn {number} holds a part that is not text: {kind}")
    return "".join(part["text"] for part in parts)


def _read_calls(calls: Any, number: int) -> list[Any]:
    """Parses arguments that are JSON text: templates expect a mapping."""
    calls = _parse_json(calls, f"turn {number}: tool_calls") if isinstance(calls, str) else calls
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRow(f"turn {number}: tool_calls is not a list of calls")
    parsed = []
    for call in calls:
        function = call.get("function")
        holder = dict(function) if isinstance(function, dict) else dict(call)
        if isinstance(holder.get("arguments"), str):
            holder["arguments"] = _parse_json(holder["arguments"], f"turn {number}: arguments of a tool call")
        parsed.append({**call, "function": holder} if isinstance(function, dict) else holder)
    return parsed


def _read_tools(tools: Any) -> list[dict[str, Any]] | None:
    tools = _parse_json(tools, "tools") if isinstance(tools, str) and tools.strip() else tools
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("column `tools` is not a list of JSON schemas")
    return tools


def _read_completion(row: Row) -> Sample:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = read_messages(prompt, "prompt")
        after = read_messages(completion, "completion")
        return Chat([*before, *after], _read_tools(row.get("tools")), len(before), is_completion=True)
    if not isinstance(prompt, str):
        raise BadRow(f"column `prompt` holds {_name(prompt)}, not text")
    return Completion(check_text(prompt, "column `prompt`"), _read_text(row, "completion"))


def _read_instruction(row: Row, has_template: bool) -> Sample:
    prompt = _read_text(row, "instruction")
    context, answer = row.get("input"), _read_text(row, "output")
    if context is not None and not isinstance(context, str):
        raise BadRow(f"column `input` holds {_name(context)}, not text")
    if context:
        prompt += "\n\n" + check_text(context, "column `input`")
    if not has_template:
        return Completion(prompt + "\n\n", answer)
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return Chat(messages, None, 1, is_completion=True)


def _read_tokens(row: Row) -> Tokens:
    ids, labels = row["input_ids"], row.get("labels")
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise BadRow("column `input_ids` is not a list of whole numbers")
    if not ids:
        raise BadRow("column `input_ids` is an empty list")
    if labels is None:
        return Tokens(ids, None)
    if not isinstance(labels, list) or len(labels) != len(ids):
        size = format_count(len(labels), "element") if isinstance(labels, list) else _name(labels)
        raise BadRow(f"column `labels` has {size} for {len(ids):,} input_ids")
    for at, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (-100, token):
            raise BadRow(
                f"label {label!r} at {at} is neither -100 nor {token}, the token there; labels are not shifted"
            )
    return Tokens(ids, [label != -100 for label in labels])


def _read_text(row: Row, column: str) -> str:
    if row[column] is None:
        raise BadRow(f"column `{column}` is null")
    if not isinstance(row[column], str):
        raise BadRow(f"column `{column}` holds {_name(row[column])}, not text")
    text = check_text(row[column], f"column `{column}`")
    if not text or text.isspace():
        raise BadRow(f"column `{column}` is empty")
    return text


def check_text(text: str, name: str) -> str:
    """Raises for half of a surrogate pair: JSON can hold it, but no tokenizer can read it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(f"{name} holds half a surrogate pair at character {error.start:,}") from None
    return text


def _parse_json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{name} is not valid JSON: {error}") from None


def list_columns(row: Row) -> str:
    names = [str(name) for name in row] if isinstance(row, dict) else []
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "no column"


def _name(value: Any) -> str:
    return NAMES.get(type(value), type(value).__name__)
