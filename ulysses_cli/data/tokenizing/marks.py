"""Renders a chat with marks in place of its words, and maps the places of marks to the text.

Between marks stands what the template writes. It recurs in a chat, whatever is said, so that bounds of turns are found
once for each manner in which turns follow each other.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ulysses_cli.data.tokenizing.lost_parts import THOUGHT_KEYS

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
        froms, tos, at, last = [0], [0], 0, 0
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
