"""Turns a row's columns into a sample: text, chat, prompt and completion, or tokens. Parts of a turn (text, thoughts,
calls of tools and their results) are read as OpenAI's Chat and Responses, Anthropic's and Mistral's have them.

Never guesses: a row that lacks something raises BadRow with the reason. Knows no file and no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ulysses_cli.plan.models.model_files import CLOCK, DATE, OUR_VARIABLES, read_date
from ulysses_cli.plan.recipe.sections import COLUMNS, RowType
from ulysses_cli.plan.units import format_count
from ulysses_cli.readers.problems import SOURCE, BadRow

TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # and the key of the words
THOUGHTS = ("thinking", "reasoning", "reasoning_text")
CALL, RESULT = "tool_use", "tool_result"
PLACES = {RESULT: 0, "thinking": 1, "text": 2, CALL: 3}
NOUNS = {RESULT: "the result of a call", "thinking": "a thought", "text": "text", CALL: "a call"}
# Items of OpenAI's Responses that stand beside turns.
ITEM_CALL, ITEM_RESULT, ITEM_THOUGHT = "function_call", "function_call_output", "reasoning"


@dataclass
class TurnParts:
    """`calls` as they are given; `results`: each as a message."""

    text: str = ""
    thought: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)


def read_parts(parts: list[Any], number: int, role: str) -> TurnParts:
    """`number`: the turn's. Raises BadRow for parts of other kinds, and for places where the meaning is not certain."""
    found, thoughts, last = TurnParts(), list[str](), RESULT
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        place = _find_place(part, kind, role)
        if not place:
            raise BadRow(f"turn {number} holds a part that is not text: {kind}")
        if place == "text":
            words = part[TEXTS[str(kind)]]
            found.text += words
            if not words.strip():
                continue
        elif place == "thinking":
            words = part.get(kind, part.get("text"))
            thoughts.append(words if isinstance(words, str) else read_parts(words, number, role).text)
        elif place == CALL:
            call = {"id": part.get("id"), "name": part.get("name"), "arguments": part.get("input")}
            found.calls.append({name: value for name, value in call.items() if value is not None})
        else:
            found.results.append(_read_result(part, number))
        if PLACES[place] < PLACES[last]:
            message = f"turn {number}: {NOUNS[place]} stands after {NOUNS[last]}, where templates write it before"
            raise BadRow(f"{message}; make two turns of it")
        last = place
    found.thought = "\n".join(thoughts)
    return found


def _find_place(part: Any, kind: Any, role: str) -> str:
    """The kind of a part that this role may have; '' for others."""
    if not isinstance(part, dict) or not isinstance(kind, str):
        return ""
    if kind in TEXTS and isinstance(part.get(TEXTS[kind]), str):
        return "text"
    if kind in THOUGHTS and role == "assistant" and isinstance(part.get(kind, part.get("text")), str | list):
        return "thinking"
    return kind if (kind, role) in ((CALL, "assistant"), (RESULT, "user")) else ""


def _read_result(part: Mapping[str, Any], number: int) -> dict[str, Any]:
    """An error is told to the model by its text; `is_error` stays, which templates may read."""
    content = part.get("content")
    text = read_parts(content, number, "tool").text if isinstance(content, list) else content or ""
    if not isinstance(text, str):
        raise BadRow(f"turn {number}: the result of a call is {type(text).__name__}, not text or parts")
    more = {"tool_call_id": part.get("tool_use_id"), "is_error": part.get("is_error") or None}
    return {"role": "tool", "content": text, **{name: value for name, value in more.items() if value is not None}}


def read_item(item: Mapping[str, Any], number: int) -> dict[str, Any] | None:
    """An item of OpenAI's Responses as a turn with a role; None for what is none."""
    kind = item.get("type")
    if kind == ITEM_CALL:
        call = {"id": item.get("call_id"), "name": item.get("name"), "arguments": item.get("arguments")}
        return {"role": kind, "content": {name: value for name, value in call.items() if value is not None}}
    if kind == ITEM_RESULT:
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    if kind == ITEM_THOUGHT:
        if not item.get("content"):
            raise BadRow(f"turn {number} is a thought of which only a summary is there; leave it out of the row")
        return {"role": "assistant", "content": item["content"], "is_thought": True}
    return None


Row = Mapping[str, Any]
Names = Mapping[str, str]  # the file's own name of a column, by the name that is expected here
SAME: Names = {}
ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE_NAMES = {
    **{role: role for role in ROLES},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"},
    **{"model": "assistant", "ai": "assistant", "function_response": "tool", "observation": "tool"},
    **{"tool_response": "tool", "ipython": "tool"},
}
CALLING_ROLES = ("function_call", "tool_call")  # turns of the assistant that hold a call alone
CONTENTS = ("content", "value", "text")
LONG_REWARD = ("context", "query", "win_response", "lose_response")
TURN_COLUMNS = ("messages", "conversations", "trajectory", "prompt", "completion", "chosen", "rejected")
FLAGS = ("weight", "train", "training", "loss", "trainable")
MASK, NOT = "mask", "not "  # a field of two meanings; what stands before the name of one that says the opposite
THOUGHT_PARTS = ("thinking", "reasoning")
THOUGHT_KEY = "reasoning_content"
FLAT_TOOLS = (("type", "function"), ("type", "custom"))  # what says of a tool that it has a name and a schema

NAMES: dict[type, str] = {
    **{type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text"},
    **{list: "a list", dict: "a mapping"},
}


@dataclass(frozen=True)
class PlainText:
    text: str


@dataclass(frozen=True)
class Chat:
    """Messages for a chat template. Messages before `first_target` are never targets. `flags`: whether a message is a
    target, where it says so itself. `settings`: variables for the template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    first_target: int = 0
    is_completion: bool = False
    flags: tuple[bool | None, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


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


@dataclass(frozen=True)
class Reading:
    """How rows are read: the file's names of columns, the field of messages that says whether they are targets, and
    variables for the template of all chats."""

    names: Names = field(default_factory=dict)
    train_field: str = "auto"
    variables: Row = field(default_factory=dict)

    @property
    def named_field(self) -> str:
        """The field of messages that the recipe names; '' if it names none."""
        return "" if self.train_field in ("auto", "none") else self.train_field.removeprefix(NOT)


PLAIN = Reading()


def detect_kind(row: Row, names: Names = SAME) -> RowType:
    """The kind of a source, by the columns of its first row."""
    renamed = find_pair(_find_chat(rename(row, names)))
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


def _find_chat(row: Row) -> Row:
    """A row of agents' or of calls' data sets, as one with messages."""
    if not isinstance(row, dict) or "messages" in row or "conversations" in row:
        return row
    if isinstance(row.get("trajectory"), list | str):
        return {**row, "messages": row["trajectory"]}
    if "query" in row and "answers" in row and "tools" in row:
        turns = [{"role": "user", "content": row["query"]}, {"role": "assistant", "tool_calls": row["answers"]}]
        return {**row, "messages": turns}
    return row


def find_pair(row: Row) -> Row:
    """A row of LongReward as one with `chosen` and `rejected`. Its question stands below the text that it is about."""
    if not isinstance(row, dict) or any(name not in row for name in LONG_REWARD):
        return row
    context, query, win, lose = (_read_text(row, name) for name in LONG_REWARD)
    rest = {name: value for name, value in row.items() if name not in LONG_REWARD}
    prompt = [{"role": "user", "content": f"{context}\n\n{query}"}]
    return {**rest, "prompt": prompt, "chosen": win, "rejected": lose}


def read_sample(kind: RowType, row: Row, *, has_template: bool = True, reading: Reading = PLAIN) -> Sample:
    """Raises BadRow with the reason if the row cannot be used. `has_template`: instructions become a chat."""
    if not isinstance(row, dict):
        raise BadRow(f"{_name(row)} where a row of columns is needed")
    names = reading.names
    given, row = row, rename(row, names)
    row = _find_chat(row) if kind == "chat" else row
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
        return _read_completion(row, reading)
    if kind == "instruction":
        return _read_instruction(row, has_template)
    turns = row[COLUMNS[kind][0]]
    messages = read_messages(turns, COLUMNS[kind][0])
    system = row.get("system")
    system = read_parts(system, 1, "system").text if isinstance(system, list) else system
    if system is not None and not isinstance(system, str):
        raise BadRow(f"column `system` holds {_name(system)}, not text")
    if system and messages[0]["role"] == "system" and messages[0]["content"] != system:
        raise BadRow("column `system` and the first turn are two different system prompts")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": check_text(system, "system")})
    return _make_chat(messages, row, reading)


def _make_chat(messages: list[dict[str, Any]], row: Row, reading: Reading, first: int | None = None) -> Chat:
    """`first`: the first message of a completion."""
    flags = _take_flags(messages, reading.train_field)
    variables = row.get("chat_template_kwargs")
    if isinstance(variables, str) and variables.strip():
        variables = _parse_json(variables, "column `chat_template_kwargs`")
    if variables and not isinstance(variables, dict):
        raise BadRow(f"column `chat_template_kwargs` holds {_name(variables)}, not a mapping")
    settings = {**reading.variables, **(variables or {})}
    if ours := [name for name in settings if name in OUR_VARIABLES]:
        raise BadRow(f"column `chat_template_kwargs` holds {ours[0]}, which is not a variable of its own")
    try:
        read_date(settings)
    except ValueError:
        raise BadRow(f"the variable {CLOCK} is {settings[CLOCK]!r}, which is not a date such as {DATE}") from None
    return Chat(messages, _read_tools(row.get("tools")), first or 0, first is not None, flags, settings)


def _take_flags(messages: list[dict[str, Any]], train_field: str) -> tuple[bool | None, ...]:
    """Takes from each message whether it is a target, where it says so: the template never sees that. `mask` of agents'
    data sets, which is false throughout, says nothing."""
    if train_field == "none":
        return ()
    flags: list[bool | None] = []
    for turn, message in enumerate(messages, 1):
        said: dict[str, bool] = {}
        for name in (*FLAGS, MASK) if train_field == "auto" else (train_field.removeprefix(NOT),):
            value = message.pop(name, None)
            if value is None:
                continue
            if value not in (0, 1) or isinstance(value, str):
                raise BadRow(f"turn {turn}: {name} is {value!r}; only true and false, or 1 and 0, are understood")
            if train_field == "auto" and name == MASK:
                if value:
                    remedy = (
                        f"write {SOURCE}.train_field: mask where that is a target, or {SOURCE}.train_field: not mask "
                    )
                    remedy += "where it is none"
                    raise BadRow(
                        f"turn {turn}: mask is true, which is a target in some data sets, in others none", remedy
                    )
            elif train_field.startswith(NOT):
                said |= {name: False} if value else {}  # what is not masked is a target where it is chosen
            else:
                said[name] = bool(value)
        if len(set(said.values())) > 1:
            raise BadRow(f"turn {turn}: {' and '.join(said)} do not agree on whether it is a target")
        flag = next(iter(said.values()), None)
        if flag and message["role"] != "assistant":
            raise BadRow(f"turn {turn} ({message['role']}) cannot be a target: only what the assistant says is")
        flags.append(flag)
    return tuple(flags) if any(flag is not None for flag in flags) else ()


def has_field(row: Row, name: str) -> bool:
    """Whether some message of a row has a field of this name."""
    columns = (row.get(column) for column in TURN_COLUMNS)
    return any(
        isinstance(turn, dict) and name in turn for turns in columns if isinstance(turns, list) for turn in turns
    )


def read_messages(turns: Any, column: str) -> list[dict[str, Any]]:
    """Reads turns of role and content, or of from and value, as messages of role and content. A turn that holds a call
    alone belongs to the assistant's turn before, one that holds a thought alone to the one after."""
    turns = _parse_json(turns, column) if isinstance(turns, str) else turns
    if not isinstance(turns, Sequence) or isinstance(turns, str | bytes):
        raise BadRow(f"column `{column}` holds {_name(turns)}, not a list of turns")
    if not turns:
        raise BadRow(f"column `{column}` is an empty list")
    messages: list[dict[str, Any]] = []
    thought = ""
    for number, turn in enumerate(turns, 1):
        for message in _read_turn(turn, number):
            is_call = message.pop("is_call", False)
            if message.pop("is_thought", False):
                thought = "\n".join(filter(None, (thought, message[THOUGHT_KEY])))
            elif thought:
                if message["role"] != "assistant" or THOUGHT_KEY in message:
                    raise BadRow(f"turn {number} follows a thought and is no answer without one")
                messages.append({**message, THOUGHT_KEY: thought})
                thought = ""
            elif is_call and messages and messages[-1]["role"] == "assistant":
                before = messages[-1]
                before["tool_calls"] = [*before.get("tool_calls", ()), *message["tool_calls"]]
            else:
                messages.append(message)
    if thought:
        raise BadRow(f"column `{column}` ends with a thought that no answer follows")
    return messages


def _read_turn(turn: Any, number: int) -> list[dict[str, Any]]:
    """Several where a user's turn holds results of calls."""
    if turn is None:
        raise BadRow(f"turn {number} is null")
    if not isinstance(turn, dict):
        raise BadRow(f"turn {number} is {_name(turn)}, not role and content")
    turn = turn if "role" in turn or "from" in turn else read_item(turn, number) or turn
    role_key = "role" if "role" in turn else "from"
    if role_key not in turn:
        raise BadRow(f"turn {number} has no role; there is {list_columns(turn)}")
    given = turn[role_key]
    is_call = given in CALLING_ROLES
    role = "assistant" if is_call else ROLE_NAMES.get(given) if isinstance(given, str) else None
    if role is None:
        known = ", ".join((*ROLE_NAMES, *CALLING_ROLES))
        raise BadRow(f"turn {number} has the unknown role {given!r}; known are {known}")
    key = next((name for name in CONTENTS if turn.get(name) is not None), "content" if role_key == "role" else "value")
    content = turn.get(key)
    if content is None and role == "system":  # of SWE-agent's trajectories
        key, content = "system_prompt", turn.get("system_prompt")
    others = {name: value for name, value in turn.items() if name not in (role_key, key) and value is not None}
    if is_call:
        return [{"role": role, "content": "", "tool_calls": _read_calls(content, number), "is_call": True}]
    calls, results = others.pop("tool_calls", None) or others.pop("function_call", None), list[dict[str, Any]]()
    if isinstance(content, list):
        parts = read_parts(content, number, role)
        if calls and parts.calls:
            raise BadRow(f"turn {number} holds calls in its content and beside it")
        content, calls, results = parts.text, calls or parts.calls, parts.results
        others |= {THOUGHT_KEY: parts.thought} if parts.thought else {}
        if results and not content.strip():
            return [{**others, **result} for result in results]
    if calls:
        others["tool_calls"] = _read_calls(calls, number)
    if role == "tool" and (content is None or not isinstance(content, str)):
        content = "" if content is None else json.dumps(content, ensure_ascii=False)
    if content is None and any(others.get(name) for name in ("tool_calls", THOUGHT_KEY, *THOUGHT_PARTS)):
        content = ""
    if content is None:
        raise BadRow(f"turn {number} ({role}) has no content")
    if not isinstance(content, str):
        raise BadRow(f"turn {number} ({role}) holds {_name(content)}, not text")
    for name in (THOUGHT_KEY, *THOUGHT_PARTS):
        if role == "assistant" and not isinstance(others.get(name, ""), str):
            raise BadRow(f"turn {number}: {name} is {_name(others[name])}, not text")
    if not content.strip() and role in ("user", "assistant") and not {*others} - {*FLAGS, MASK}:
        raise BadRow(f"turn {number} ({role}) is empty")
    return [*results, {"role": role, "content": check_text(content, f"turn {number}"), **others}]


def _read_calls(calls: Any, number: int) -> list[Any]:
    """Calls in the form of OpenAI's chats, with arguments as a mapping: templates expect that."""
    calls = _parse_json(calls, f"turn {number}: tool_calls") if isinstance(calls, str) else calls
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not calls or not all(isinstance(call, dict) for call in calls):
        raise BadRow(f"turn {number}: tool_calls is not a list of calls")
    return [_read_call(call, number) for call in calls]


def _read_call(call: Row, number: int) -> dict[str, Any]:
    function = call.get("function")
    holder = dict(function) if isinstance(function, dict) else dict(call)
    if not isinstance(holder.get("name"), str):
        raise BadRow(f"turn {number}: a tool call has no name")
    arguments = holder.pop("arguments", holder.pop("parameters", None))
    if isinstance(arguments, str):
        name = f"turn {number}: arguments of a tool call"
        arguments = _parse_json(arguments, name) if arguments.strip() else {}
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise BadRow(f"turn {number}: the arguments of a tool call are {_name(arguments)}, not a mapping")
    if isinstance(function, dict):
        return {**call, "function": {**holder, "arguments": arguments}}
    more = {key: holder.pop(key) for key in ("id", "type") if key in holder}
    return {"type": "function", **more, "function": {**holder, "arguments": arguments}}


def _read_tools(tools: Any) -> list[dict[str, Any]] | None:
    tools = _parse_json(tools, "tools") if isinstance(tools, str) and tools.strip() else tools
    if not tools:
        return None
    if isinstance(tools, list):
        tools = [_parse_json(tool, "tools") if isinstance(tool, str) else tool for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("column `tools` is not a list of JSON schemas")
    return [tool if "function" in tool or "name" not in tool else _read_tool(tool) for tool in tools]


def _read_tool(tool: Row) -> dict[str, Any]:
    """A tool whose name and schema stand at its top, as in OpenAI's Responses and in Anthropic's messages."""
    names = {"input_schema": "parameters"}
    kept = {names.get(name, name): value for name, value in tool.items() if (name, value) not in FLAT_TOOLS}
    return {"type": "function", "function": kept}


def _read_completion(row: Row, reading: Reading) -> Sample:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = read_messages(prompt, "prompt")
        after = read_messages(completion, "completion")
        return _make_chat([*before, *after], row, reading, len(before))
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
