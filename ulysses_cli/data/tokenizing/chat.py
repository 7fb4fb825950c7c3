"""A chat, as a template renders it -> the text and which of its characters the assistant says.

Exact or not at all: each bound is found by rendering and checked against the whole text; what does not agree raises.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ulysses_cli.data.problems import BadRow

Messages = Sequence[dict[str, Any]]
MARK = "uQ7zMARKz7Qu"  # stands for a message's content; letters that no template touches


class Render(Protocol):
    def __call__(self, messages: Messages, *, prompt: bool = False) -> str: ...


@dataclass(frozen=True)
class Spans:
    """What the assistant says, message by message, and where each of its turns ends, in characters."""

    said: list[tuple[int, int]]
    ends: list[int]


class InexactTemplate(BadRow):
    """The template does not tell where a turn begins or ends."""


def find_spans(render: Render, messages: Messages, text: str, specials: Sequence[str]) -> Spans:
    """For each assistant message: from where the generation prompt ends to the end of its turn, the end mark included.
    White space behind a special token that ends a turn is the template's, not the assistant's."""
    said: list[tuple[int, int]] = []
    ends: list[int] = []
    finder = _Finder(render, messages, text)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = finder.find_end(index - 1) if index else None
        end = finder.find_end(index)
        head = finder.find_head(index, start)
        last = _trim(text, head, end, specials)
        answer = str(message.get("content") or "").rpartition("</think>")[2].strip()
        if head >= last or answer not in text[head:last] or (said and head < said[-1][1]):
            raise InexactTemplate(f"the chat template does not show turn {index + 1} as it is, in its place")
        said.append((head, last))
        ends.append(end)
    return Spans(said, ends)


class _Finder:
    """Bounds of turns. What stands between two contents recurs in a chat, and is taken apart once: a rendering of every
    prefix would take time quadratic in the turns. Where contents are not shown as they are, so each turn is."""

    def __init__(self, render: Render, messages: Messages, text: str) -> None:
        self.render, self.messages, self.text = render, messages, text
        self.places = find_contents(render, messages, text)
        self._known: dict[tuple[object, ...], int] = {}

    def find_end(self, index: int) -> int:
        if self.places is None or index == len(self.messages) - 1:
            return find_turn_end(self.render, self.messages, index, self.text)
        first, last = self.places[index][1], self.places[index + 1][0]
        key = ("end", self._describe(index, index + 1), self.text[first:last])
        if key in self._known:
            return first + self._known[key]
        end = find_turn_end(self.render, self.messages, index, self.text)
        if first <= end <= last:
            self._known[key] = end - first
        return end

    def find_head(self, index: int, start: int | None) -> int:
        if self.places is None or start is None or not self.places[index - 1][1] <= start <= self.places[index][0]:
            return _find_head(self.render, self.messages, index, self.text, start)
        content = self.places[index][0]
        key = ("head", self._describe(index - 1, index), self.text[start:content])
        if key in self._known:
            return start + self._known[key]
        head = _find_head(self.render, self.messages, index, self.text, start)
        prompt = _find_prompt(self.render, self.messages, index)
        is_whole = bool(prompt) and head - start == len(prompt or "") and head <= content
        if is_whole or (prompt == "" and head in (start, content)):  # else the words of this turn had a say in it
            self._known[key] = head - start
        return head

    def _describe(self, *indices: int) -> tuple[object, ...]:
        """What a template may tell turns apart by: their roles and keys."""
        return tuple((self.messages[at]["role"], tuple(self.messages[at])) for at in indices)


def find_contents(render: Render, messages: Messages, text: str) -> list[tuple[int, int]] | None:
    """Where each message's content stands in the text, but for white space around it: by one rendering with a mark for
    each, which must agree with the text from its first character to its last. None where it does not."""
    marked = [{**message, "content": f"{MARK}{index}{MARK}"} for index, message in enumerate(messages)]
    try:
        parts = re.split(f"{MARK}([0-9]+){MARK}", render(marked))
    except Exception:  # noqa: BLE001 - a template may raise what it likes, or want other words
        return None
    if parts[1::2] != [str(index) for index in range(len(messages))] or not text.startswith(parts[0]):
        return None
    places: list[tuple[int, int]] = []
    at = len(parts[0])
    for message, gap in zip(messages, parts[2::2], strict=True):
        content = str(message.get("content") or "")
        shown = (content, content.strip(), content.lstrip(), content.rstrip())
        found = next((words for words in shown if text.startswith(words + gap, at)), None)
        if found is None:
            return None
        places.append((at, at + len(found)))
        at += len(found) + len(gap)
    return places if at == len(text) else None


def find_turn_end(render: Render, messages: Messages, index: int, text: str) -> int:
    """Where message `index` ends in the text: the rendering of all up to it, when the text begins with that.

    Some templates show a turn otherwise when it is the last (thoughts are kept there alone). Then the message's content
    is replaced by a mark: what follows the mark when the message is last is the turn's own end.
    """
    if index == len(messages) - 1:
        return len(text)
    try:
        part = render(messages[: index + 1])
        if text.startswith(part):
            return len(part)
        marked = [*messages[:index], {**messages[index], "content": MARK}]
        tail = _after_mark(render(marked))
        whole = _after_mark(render([*marked, *messages[index + 1 :]]))
    except BadRow:
        raise
    except Exception as error:  # noqa: BLE001 - a template may raise what it likes
        raise InexactTemplate(f"the chat template cannot show the first {index + 1} turns alone: {error}") from None
    rest = whole[len(tail) :]
    if not whole.startswith(tail) or not text.endswith(rest) or not tail:
        raise InexactTemplate(f"the chat template does not tell where turn {index + 1} ends")
    return len(text) - len(rest)


def _find_head(render: Render, messages: Messages, index: int, text: str, start: int | None) -> int:
    """Where the assistant begins to speak: behind as much of the generation prompt as its turn begins with."""
    if start is None:
        return _find_first_head(render, messages, index, text)
    prompt = _find_prompt(render, messages, index)
    if prompt is None:
        raise InexactTemplate("the chat template's generation prompt does not follow the turns before it")
    shared = _count_shared(prompt, text[start : start + len(prompt)])
    if prompt and shared == len(prompt):
        return start + shared
    marked = _mark_turn(render, messages, index)
    content = marked.find(MARK)
    if not prompt and text[start:content].strip() and content > start and marked[:content] == text[:content]:
        return content  # no prompt at all, but a heading: it is the template's
    if prompt:  # it goes on with what a finished turn may lack, such as the start of a thought
        if marked[:start] != text[:start]:
            raise InexactTemplate(f"the chat template does not tell where turn {index + 1} begins")
        shared = min(shared, _count_shared(prompt, marked[start:]))
        if not shared:
            raise InexactTemplate(f"turn {index + 1} does not begin with the chat template's generation prompt")
    if marked[:start] == text[:start] and content >= start:
        shared = min(shared, content - start)
    return start + shared


def _find_first_head(render: Render, messages: Messages, index: int, text: str) -> int:
    """Nothing tells where the first message of all begins but the prompt itself."""
    marked = _mark_turn(render, messages, index)
    content = marked.find(MARK)
    asked = next((at for at, message in enumerate(messages) if message["role"] == "user"), None)
    prompt = _find_prompt(render, messages, asked + 1) if asked is not None else None
    if content < 0 or not prompt or not marked[:content].endswith(prompt) or text[:content] != marked[:content]:
        raise InexactTemplate("the chat template does not tell where a first turn of the assistant begins")
    return content


def _mark_turn(render: Render, messages: Messages, index: int) -> str:
    try:
        return render([*messages[:index], {**messages[index], "content": MARK}, *messages[index + 1 :]])
    except Exception as error:  # noqa: BLE001 - a template may raise what it likes
        raise InexactTemplate(f"the chat template refuses other words in turn {index + 1}: {error}") from None


def _find_prompt(render: Render, messages: Messages, index: int) -> str | None:
    """What the template adds before the assistant speaks."""
    try:
        before, after = render(messages[:index]), render(messages[:index], prompt=True)
    except Exception as error:  # noqa: BLE001 - a template may raise what it likes
        raise InexactTemplate(f"the chat template cannot show the first {index} turns alone: {error}") from None
    return after[len(before) :] if after.startswith(before) else None


def _count_shared(one: str, other: str) -> int:
    """Characters that two texts begin with alike."""
    size = min(len(one), len(other))
    return next((at for at in range(size) if one[at] != other[at]), size)


def _after_mark(text: str) -> str:
    if text.count(MARK) != 1:
        raise InexactTemplate("the chat template does not show each turn's content once")
    return text.partition(MARK)[2]


def _trim(text: str, start: int, end: int, specials: Sequence[str]) -> int:
    """Without the white space behind a special token that ends the turn."""
    turn = text[start:end]
    bare = turn.rstrip()
    return start + len(bare) if bare != turn and bare.endswith(tuple(specials)) and specials else end


def make_render(tokenizer: Any, tools: Any) -> Render:
    """A tokenizer's own template, for one chat's tools."""

    def render(messages: Messages, *, prompt: bool = False) -> str:
        found: str = tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt
        )
        return found

    return render


def read_marked_spans(tokenizer: Any, messages: Messages, tools: Any) -> tuple[str, list[tuple[int, int]]]:
    """The text and spans of a template that marks them itself with {% generation %}."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = tokenizer.get_chat_template(tools=tools)
    texts, spans = render_jinja_template(
        conversations=[list(messages)],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    return texts[0], [(int(start), int(stop)) for start, stop in spans[0]]


@dataclass(frozen=True)
class ShownChat:
    """What a template makes of a chat. `odd`: why it does not tell what the assistant says; then there are no spans.
    `marked`: text and spans of a template that marks them itself."""

    text: str
    said: list[tuple[int, int]]
    ends: list[int]
    odd: str = ""
    marked: tuple[str, list[tuple[int, int]]] = ("", [])


def show_chat(
    tokenizer: Any, render: Render, messages: Messages, tools: Any, specials: Sequence[str], *, is_marked: bool
) -> ShownChat:
    """`is_marked`: the template's own marks are wanted, too. Raises whatever the template raises."""
    text = render(messages)
    if not text:
        return ShownChat("", [], [])
    spans, odd = Spans([], []), ""
    try:
        spans = find_spans(render, messages, text, specials)
    except InexactTemplate as error:
        odd = str(error)
    marked = read_marked_spans(tokenizer, messages, tools) if is_marked else ("", [])
    return ShownChat(text, spans.said, spans.ends, odd, marked)
