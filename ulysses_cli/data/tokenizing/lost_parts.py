"""Finds what the assistant said and a chat template does not show: text, thoughts, and calls of tools.

Looks for each part of a turn in the text of that turn. Templates write the arguments of calls in many forms (JSON in
any order, tags, Python), so names and values are looked for one by one.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ulysses_cli.plan.models.chat_template import KEY, THOUGHT_MARKS, find_switch
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.problem import Problem
from ulysses_cli.plan.secrets import mask_document
from ulysses_cli.readers.problems import make_where

TEXT, THOUGHT, CALLS, TOOLS = "text", "thought", "calls", "tools"
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
NOUNS = {THOUGHT: "its thought", CALLS: "its tool calls", TEXT: "its text", TOOLS: "the tools"}
PLURALS = {THOUGHT: "thoughts", CALLS: "tool calls", TEXT: "the text", TOOLS: "the list of tools"}
LOSING_KEY = "data.on_rewritten_turns"
SHOWN_CHARS = 60
SHORT_CHARS = 8  # of a thought that may stand inside of a word


@dataclass(frozen=True)
class LostPart:
    """`turn`: the message's index. `kind`: TEXT, THOUGHT, CALLS, or TOOLS, which belong to the chat. `words`: how the
    part begins."""

    turn: int
    kind: str
    words: str


@dataclass
class LostCounts:
    """What the template did not show, over many chats. `kinds`: turns that lack a part of each kind. `example`: file,
    line, turn from 1, kind and words of the first."""

    num_turns: int = 0
    num_chats: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    example: tuple[str, int, int, str, str] | None = None

    def add_chat(self, file: str, line: int, parts: Sequence[LostPart]) -> None:
        if not parts:
            return
        self.num_turns += len({part.turn for part in parts})
        self.num_chats += 1
        for part in parts:
            self.kinds[part.kind] = self.kinds.get(part.kind, 0) + 1
        if self.example is None:
            first = parts[0]
            self.example = (file, line, first.turn + 1, first.kind, _shorten(mask_document([first.words])[0][0]))

    def add(self, other: LostCounts) -> None:
        self.num_turns += other.num_turns
        self.num_chats += other.num_chats
        self.kinds = dict(Counter(self.kinds) + Counter(other.kinds))
        self.example = self.example or other.example


def compute_growth(turns: Mapping[str, int]) -> float | None:
    """How many times the tokens of its chats a source would have if they were split; None where that is not known. Only
    chats that lose something are split."""
    tokens, split, whole = (turns.get(name, 0) for name in ("whole tokens", "split tokens", "split from"))
    is_known = tokens and split and not turns.get("never shown")
    return (tokens - whole + split) / tokens if is_known else None


def explain_lost_parts(
    lost: LostCounts, template: str, source: str, turns: Mapping[str, int], *, has_lines: bool
) -> Problem:
    """`source`: the name of what was read; `turns`: counts of its turns, also of the tokens that they have if each is
    shown as the model writes it. The problem's place is that of the example."""
    growth = compute_growth(turns)
    file, line, turn, kind, words = lost.example or (source, 0, 1, TEXT, "")
    example = f"turn {turn} loses {NOUNS[kind]}" if kind != TOOLS else "the row's column `tools` is not read"
    example += f": {words}" if words else ""
    message = f"the chat template does not show {describe_lost_parts(lost)}; here {example}"
    remedies = []
    if THOUGHT in lost.kinds and (switch := find_switch(template)) is not None:
        remedies.append(f"write data.chat_template_kwargs: {{{switch[0]}: {switch[1]}}}")
    else:
        remedies.append(f"name a template in {KEY} that shows them")
    if growth is not None:
        times = f"{'at least ' if turns.get('would split') else ''}{growth:.1f} x the tokens"
        remedies.append(f"set {LOSING_KEY}: split to train each turn as the model writes it, for {times}")
    elif set(lost.kinds) == {THOUGHT}:
        remedies.append("set data.thoughts: drop to train without thoughts")
    remedies.append(f"set {LOSING_KEY}: keep to train on what is shown")
    return Problem("", message, ", or ".join(remedies), make_where(file, line, has_lines=has_lines))


def describe_lost_parts(lost: LostCounts) -> str:
    """Such as: thoughts of 3 turns and tool calls of 1 turn, in 2 chats."""
    nouns = {kind: "chat" if kind == TOOLS else "turn" for kind in PLURALS}
    parts = [
        f"{PLURALS[kind]} of {format_count(lost.kinds[kind], nouns[kind])}" for kind in nouns if kind in lost.kinds
    ]
    head = ", ".join(parts[:-1]) + " and " if len(parts) > 1 else ""
    return f"{head}{parts[-1]}, in {format_count(lost.num_chats, 'chat')}"


def split_content(message: Mapping[str, Any]) -> tuple[list[str], str]:
    """The thoughts inside of a turn's content, and the rest of the content."""
    content = str(message.get("content") or "")
    for opening, closing in THOUGHT_MARKS:
        thought, mark, rest = content.rpartition(closing)
        if mark:
            return [bare] if (bare := thought.strip().removeprefix(opening).strip()) else [], rest.strip()
    return [], content.strip()


def list_calls(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The calls of a turn, each with its name and arguments."""
    calls = [*(message.get("tool_calls") or ()), message.get("function_call")]
    holders = [call.get("function", call) for call in calls if isinstance(call, Mapping)]
    return [holder for holder in holders if isinstance(holder, Mapping)]


def find_lost_parts(message: Mapping[str, Any], turn: int, shown: str) -> list[LostPart]:
    """At most one part of each kind. `shown`: the text of this turn, or the whole text where turns are not known."""
    whole = str(message.get("content") or "").strip()
    keys = list(dict.fromkeys(filter(None, (str(message.get(key) or "").strip() for key in THOUGHT_KEYS))))
    calls = list_calls(message)
    if not keys and not calls and whole in shown:
        return []
    inside, text = split_content(message)
    thoughts = [*keys, *inside]
    spans = _place(keys, whole, shown) or _place(thoughts, text, shown)
    lost = []
    if spans is None:
        without_thoughts, without_text = _place([], text, shown), _place(thoughts, "", shown)
        if thoughts and (without_thoughts is not None or without_text is None):
            words = next((thought for thought in thoughts if _find_thought(thought, shown, 0) < 0), thoughts[0])
            lost.append(LostPart(turn, THOUGHT, _begin(words)))
        if without_thoughts is None:
            lost.append(LostPart(turn, TEXT, _begin(text)))
        spans = without_thoughts or without_text or []
    if calls and (call := _find_lost_call(calls, _leave_out(shown, spans))):
        # a call may stand before the content and hold the same words
        last = shown.rfind(text)
        if last < 0 or _find_lost_call(calls, _leave_out(shown, [*spans[:-1], (last, last + len(text))])):
            lost.append(LostPart(turn, CALLS, _begin(f"{call.get('name')} {_get_arguments(call)}")))
    return lost


def find_words(message: Mapping[str, Any], shown: str) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """The places of a turn's thoughts and of its other words in `shown`, its text; empty where they are not found."""
    keys = list(dict.fromkeys(filter(None, (str(message.get(key) or "").strip() for key in THOUGHT_KEYS))))
    inside, text = split_content(message)
    for thoughts in ([*keys, *inside], keys, inside, []):
        spans = _place(thoughts, text, shown)
        if spans is not None:
            return spans[:-1], spans[-1]
    return [], (0, 0)


def _place(thoughts: Sequence[str], text: str, shown: str) -> list[tuple[int, int]] | None:
    """The places of the thoughts and of the text, in this order; None where one is missing."""
    spans, at = [], 0
    for part, find in (*((thought, _find_thought) for thought in thoughts), (text, _find_text)):
        start = find(part, shown, at)
        if start < 0:
            return None
        at = start + len(part)
        spans.append((start, at))
    return spans


def _find_text(text: str, shown: str, at: int) -> int:
    return shown.find(text, at)


def _find_thought(thought: str, shown: str, at: int) -> int:
    """A short thought is not looked for inside of words: a letter stands in `<think>` and in names of tools."""
    if len(thought) >= SHORT_CHARS:
        return shown.find(thought, at)
    found = re.compile(rf"(?<!\w){re.escape(thought)}(?!\w)").search(shown, at)
    return found.start() if found else -1


def _leave_out(shown: str, spans: Sequence[tuple[int, int]]) -> str:
    for start, stop in sorted(spans, reverse=True):
        shown = shown[:start] + shown[stop:]
    return shown


def _find_lost_call(calls: Sequence[Mapping[str, Any]], shown: str) -> Mapping[str, Any] | None:
    """The first call whose name or arguments are missing, or one of several with a name that is shown too rarely."""
    numbers = Counter(str(call.get("name") or "") for call in calls)
    for call in calls:
        name, arguments = str(call.get("name") or ""), _get_arguments(call)
        if shown.count(name) < numbers[name]:
            return call
        if json.dumps(arguments, ensure_ascii=False) in shown:
            continue
        if not all(_has_value(value, shown) for value in _walk_values(arguments)):
            return call
    return None


def _get_arguments(call: Mapping[str, Any]) -> Any:
    return call.get("arguments", call.get("parameters"))


def _walk_values(value: Any) -> Iterator[Any]:
    """Names and values of arguments. One that is null may be left out."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if item is not None:
                yield str(key)
                yield from _walk_values(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _walk_values(item)
    elif value is not None:
        yield value


def _has_value(value: Any, shown: str) -> bool:
    if isinstance(value, str) and value.strip() in shown:
        return True
    forms = (json.dumps(value, ensure_ascii=False), json.dumps(value), repr(value))
    return any((form[1:-1] if isinstance(value, str) else form) in shown for form in forms)


def _begin(text: str) -> str:
    return text[: 4 * SHOWN_CHARS]


def _shorten(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= SHOWN_CHARS else f"{words[:SHOWN_CHARS].rstrip()} ..."
