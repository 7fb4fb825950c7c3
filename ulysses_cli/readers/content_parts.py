"""Reads what stands in parts of a turn or of a list of turns: text, thoughts, calls of tools and their results, as
OpenAI's Chat and Responses, Anthropic's and Mistral's have them.

A part is read where its place says what it means: thoughts, then text, then calls; results before what a user says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ulysses_cli.readers.problems import BadRow

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
