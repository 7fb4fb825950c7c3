"""Finds what the assistant said and a chat template does not show: text, thoughts, and calls of tools. Renders a chat
with marks in place of its words, and maps the places of marks to the text.

Templates write the arguments of calls in many forms, so names and values are looked for one by one. What a template
writes between marks recurs, so bounds of turns are found once for each manner in which turns follow each other."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ulysses_cli.plan.models.model_files import KEY, THOUGHT_MARKS, find_switch
from ulysses_cli.plan.problem import Problem
from ulysses_cli.plan.secrets import mask_document
from ulysses_cli.plan.units import format_count
from ulysses_cli.readers.problems import make_where

TEXT = "text"
THOUGHT = "thought"
CALLS = "calls"
TOOLS = "tools"
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


def compute_growth(turns: Mapping[str, int], *, shares_prompts: bool = False) -> float | None:
    """How many times the tokens of its chats a source would have if they were split; None where that is not known. Only
    chats that lose something are split. `shares_prompts`: what texts of a chat begin with counts once."""
    tokens, split, whole = (turns.get(name, 0) for name in ("whole tokens", "split tokens", "split from"))
    is_known = tokens and split and not turns.get("never shown")
    repeated = turns.get("repeated tokens", 0) if shares_prompts else 0
    return (tokens - whole + split - repeated) / tokens if is_known else None


def explain_lost_parts(
    lost: LostCounts, template: str, source: str, turns: Mapping[str, int], growth: float | None, *, has_lines: bool
) -> Problem:
    """`source`: the name of what was read; `turns`: counts of its turns; `growth`: how many times the tokens there are
    if each is shown as the model writes it. The problem's place is that of the example."""
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


Messages = Sequence[Mapping[str, Any]]
WORD, NUMBER = "uQ7z{}z7Qu", "73108{:06d}37"  # no template changes these letters and digits
MARKS = re.compile(r"uQ7z([0-9]+)z7Qu|73108([0-9]{6})37")
# Templates look for these in contents, so they stay.
READ_TAGS = re.compile(r"(</?(?:think|seed:think|tool_response|tool_call)>|\[/?THINK\])")
IDS = ("id", "tool_call_id")


class MarkedChat:
    """`messages` with marks; `values` are what they stand for; `owners` the message of each. Equal ids have equal
    marks, as templates compare them; they are nobody's."""

    def __init__(self, messages: Messages) -> None:
        self.values: list[Any] = []
        self.owners: list[int | None] = []
        self._ids: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._owner = 0
        self.messages = [self._mark_message(message, at) for at, message in enumerate(messages)]

    def _mark_message(self, message: Mapping[str, Any], at: int) -> dict[str, Any]:
        self._owner = at
        marked = dict(message)
        for key, value in message.items():
            if key == "content" and isinstance(value, str):
                marked[key] = "".join(
                    part if READ_TAGS.fullmatch(part) else self._mark_text(part) for part in READ_TAGS.split(value)
                )
            elif key in THOUGHT_KEYS and isinstance(value, str):
                marked[key] = self._mark_text(value)
            elif key in IDS and isinstance(value, str):
                marked[key] = self._mark_id(value)
            elif key == "name" and message.get("role") == "tool":
                marked[key] = self._names.get(value, value) if isinstance(value, str) else value
            elif key == "tool_calls" and isinstance(value, list):
                marked[key] = [self._mark_call(call) for call in value]
        return marked

    def _mark_call(self, call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        marked = dict(call)
        for key, value in call.items():
            if key == "function":
                marked[key] = self._mark_call(value)
            elif key in ("arguments", "parameters"):
                marked[key] = self._mark_value(value)
            elif key in IDS and isinstance(value, str):
                marked[key] = self._mark_id(value)
            elif key == "name" and isinstance(value, str):
                marked[key] = self._names[value] = self._mark_text(value)
        return marked

    def _mark_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return int(NUMBER.format(self._add(value, self._owner)))
        if isinstance(value, Mapping):
            return {key: self._mark_value(item) for key, item in value.items()}
        return [self._mark_value(item) for item in value] if isinstance(value, list) else value

    def _mark_text(self, text: str) -> str:
        """White space around the words stays: templates strip it."""
        words = text.strip()
        if not words:
            return text
        start = text.index(words)
        return text[:start] + WORD.format(self._add(words, self._owner)) + text[start + len(words) :]

    def _mark_id(self, name: str) -> str:
        if name not in self._ids:
            self._ids[name] = WORD.format(self._add(name, None))
        return self._ids[name]

    def _add(self, value: Any, owner: int | None) -> int:
        self.values.append(value)
        self.owners.append(owner)
        return len(self.values) - 1

    def find_anchors(self, marked: str) -> list[tuple[int, int] | None] | None:
        """From the first mark of each message to its last; None for one without marks. None for all where the
        template changes their order. A mark counts where it stands first: results repeat the names of calls."""
        anchors: list[tuple[int, int] | None] = [None] * len(self.messages)
        latest, seen = 0, set[int]()
        for number, match in _walk_marks(marked):
            owner = self.owners[number] if number < len(self.owners) else None
            if owner is None or number in seen:
                continue
            seen.add(number)
            if owner < latest:
                return None
            latest = owner
            start, _ = anchors[owner] or match.span()
            anchors[owner] = start, match.end()
        return anchors

    def map_places(self, marked: str, text: str) -> Callable[[int], int] | None:
        """Gives the place in `text` of one in `marked`, outside of marks. None where the texts do not agree."""
        marks = list(_walk_marks(marked))
        froms = [0]
        tos = [0]
        at = 0
        last = 0
        for index, (number, match) in enumerate(marks):
            gap = marked[last : match.start()]
            if not text.startswith(gap, at) or number >= len(self.values):
                return None
            at, last = at + len(gap), match.end()
            after = marked[last : marks[index + 1][1].start()] if index + 1 < len(marks) else marked[last:]
            shown = next((form for form in _walk_forms(self.values[number]) if _follows(text, at, form, after)), None)
            if shown is None:
                return None
            at += len(shown)
            froms.append(last)
            tos.append(at)
        if text[at:] != marked[last:]:
            return None

        def map_place(place: int) -> int:
            index = bisect_right(froms, place) - 1
            start = marks[index][1].start() if index < len(marks) else len(marked)
            if place > start:
                raise ValueError(place)
            return tos[index] + place - froms[index]

        return map_place


def _walk_marks(marked: str) -> Iterator[tuple[int, re.Match[str]]]:
    for match in MARKS.finditer(marked):
        yield int(match.group(1) or match.group(2)), match


def _walk_forms(value: Any) -> Iterator[str]:
    """How templates write a value: as it is, or as JSON or Python within quotes."""
    text = value if isinstance(value, str) else json.dumps(value)
    yield text
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]
    yield repr(text)[1:-1]
    yield json.dumps(json.dumps(text, ensure_ascii=False)[1:-1], ensure_ascii=False)[1:-1]
    yield json.dumps(json.dumps(text)[1:-1])[1:-1]
    if not isinstance(value, str):
        yield repr(value)


def _follows(text: str, at: int, form: str, after: str) -> bool:
    return text.startswith(form, at) and text.startswith(after, at + len(form))
