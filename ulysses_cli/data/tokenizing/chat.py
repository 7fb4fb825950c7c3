"""Renders a chat with a chat template, and finds which characters of the text are the assistant's.

Never guesses: each bound comes from rendering parts of the chat and is checked against the whole text. If they
disagree, InexactTemplate is raised.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ulysses_cli.data.tokenizing.lost_parts import LostPart, find_lost_parts, list_calls, split_content
from ulysses_cli.plan.models.chat_template import THINKING_SWITCHES, THOUGHT_MARKS
from ulysses_cli.readers.problems import BadRow

Messages = Sequence[dict[str, Any]]
MARK = "uQ7zMARKz7Qu"  # a placeholder for a message's content; no template changes these letters
MAX_MESSAGE_CHARS = 300
EMPTY_THOUGHT = re.compile(
    "|".join(rf"(?:{re.escape(opening)})?\s*{re.escape(closing)}" for opening, closing in THOUGHT_MARKS)
)


class Render(Protocol):
    def __call__(self, messages: Messages, *, prompt: bool = False) -> str: ...


@dataclass(frozen=True)
class Spans:
    """The assistant's answers as spans of characters, one per message, and the ends of the assistant's turns."""

    answers: list[tuple[int, int]]
    turn_ends: list[int]


class InexactTemplate(BadRow):
    """The rendered text does not show where a turn begins or ends."""


def find_spans(render: Render, messages: Messages, text: str, specials: Sequence[str]) -> Spans:
    """An answer is the text from the end of the generation prompt to the end of the turn, with the end-of-turn token.
    White space after a special token that ends the turn is the template's, so it is left out."""
    answers: list[tuple[int, int]] = []
    turn_ends: list[int] = []
    finder = _TurnFinder(render, messages, text)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        turn_start = finder.find_end(index - 1) if index else None
        turn_end = finder.find_end(index)
        start = finder.find_answer(index, turn_start)
        stop = _trim(text, start, turn_end, specials)
        # a template may leave out the text beside a call, which find_lost_parts tells
        is_shown = split_content(message)[1] in text[start:stop] or bool(list_calls(message))
        if start >= stop or not is_shown or (answers and start < answers[-1][1]):
            raise InexactTemplate(f"the chat template changes or moves the content of turn {index + 1}")
        answers.append((start, stop))
        turn_ends.append(turn_end)
    return Spans(answers, turn_ends)


class _TurnFinder:
    """Finds the bounds of turns. The text between two contents recurs in a chat, so each variant is analysed once:
    rendering every prefix of the chat would take time quadratic in the number of turns. If the template changes
    contents, `places` is None and each turn is analysed by itself."""

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

    def find_answer(self, index: int, start: int | None) -> int:
        """Where the answer of message `index` begins; its turn begins at `start`."""
        if self.places is None or start is None or not self.places[index - 1][1] <= start <= self.places[index][0]:
            return _find_answer(self.render, self.messages, index, self.text, start)
        content = self.places[index][0]
        key = ("answer", self._describe(index - 1, index), self.text[start:content])
        if key in self._known:
            return start + self._known[key]
        answer = _find_answer(self.render, self.messages, index, self.text, start)
        prompt = _find_prompt(self.render, self.messages, index)
        is_whole = bool(prompt) and answer - start == len(prompt or "") and answer <= content
        if is_whole or (prompt == "" and answer in (start, content)):  # else the result depends on this turn's content
            self._known[key] = answer - start
        return answer

    def _describe(self, *indices: int) -> tuple[object, ...]:
        """The properties by which a template may treat turns differently: their roles and keys."""
        return tuple((self.messages[at]["role"], tuple(self.messages[at])) for at in indices)


def find_contents(render: Render, messages: Messages, text: str) -> list[tuple[int, int]] | None:
    """The place of each message's content in the text, possibly without white space around it. One rendering with a
    mark for each content gives the text between contents. None if that does not agree with the whole text."""
    marked = [{**message, "content": f"{MARK}{index}{MARK}"} for index, message in enumerate(messages)]
    try:
        parts = re.split(f"{MARK}([0-9]+){MARK}", render(marked))
    except Exception:  # noqa: BLE001 - a template may raise any exception, or refuse marks as contents
        return None
    if parts[1::2] != [str(index) for index in range(len(messages))] or not text.startswith(parts[0]):
        return None
    places: list[tuple[int, int]] = []
    at = len(parts[0])
    for message, gap in zip(messages, parts[2::2], strict=True):
        content = str(message.get("content") or "")
        variants = (content, content.strip(), content.lstrip(), content.rstrip())
        shown = next((variant for variant in variants if text.startswith(variant + gap, at)), None)
        if shown is None:
            return None
        places.append((at, at + len(shown)))
        at += len(shown) + len(gap)
    return places if at == len(text) else None


def find_turn_end(render: Render, messages: Messages, index: int, text: str) -> int:
    """Where message `index` ends in the text: after the rendering of the messages up to it, if the text begins with
    that.

    Some templates render the last turn differently (they keep its thoughts only). Then the message's content is
    replaced by a mark: the text after the mark, when the message is the last one, is the end of the turn.
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
    except Exception as error:  # noqa: BLE001 - a template may raise any exception
        raise InexactTemplate(
            f"the chat template cannot render the first {index + 1} turns alone: {cut_message(error)}"
        ) from None
    rest = whole[len(tail) :]
    if not whole.startswith(tail) or not text.endswith(rest) or not tail:
        raise InexactTemplate(f"the chat template does not show where turn {index + 1} ends")
    return len(text) - len(rest)


def _find_answer(render: Render, messages: Messages, index: int, text: str, start: int | None) -> int:
    """Where the assistant's answer begins: after the part of the generation prompt with which its turn begins."""
    if start is None:
        return _find_first_answer(render, messages, index, text)
    prompt = _find_prompt(render, messages, index)
    if prompt is None:
        raise InexactTemplate("the chat template's generation prompt is not appended to the turns before it")
    shared = _count_shared(prompt, text[start : start + len(prompt)])
    if prompt and shared == len(prompt):
        return start + shared
    marked = _mark_turn(render, messages, index)
    content = marked.find(MARK)
    if not prompt and text[start:content].strip() and content > start and marked[:content] == text[:content]:
        return content  # the template has no prompt, but writes a heading before the content
    if prompt:  # the prompt ends in text that a finished turn may lack, such as the start of a thought
        if marked[:start] != text[:start]:
            raise InexactTemplate(f"the chat template does not show where turn {index + 1} begins")
        shared = min(shared, _count_shared(prompt, marked[start:]))
        if not shared:
            raise InexactTemplate(f"turn {index + 1} does not begin with the chat template's generation prompt")
    if marked[:start] == text[:start] and content >= start:
        shared = min(shared, content - start)
    return start + shared


def _find_first_answer(render: Render, messages: Messages, index: int, text: str) -> int:
    """Where the answer begins if it is the chat's first message: only the generation prompt shows that."""
    marked = _mark_turn(render, messages, index)
    content = marked.find(MARK)
    first_user = next((at for at, message in enumerate(messages) if message["role"] == "user"), None)
    prompt = _find_prompt(render, messages, first_user + 1) if first_user is not None else None
    if content < 0 or not prompt or not marked[:content].endswith(prompt) or text[:content] != marked[:content]:
        raise InexactTemplate("the chat template does not show where an assistant turn begins if it is the first turn")
    return content


def _mark_turn(render: Render, messages: Messages, index: int) -> str:
    try:
        return render([*messages[:index], {**messages[index], "content": MARK}, *messages[index + 1 :]])
    except Exception as error:  # noqa: BLE001 - a template may raise any exception
        raise InexactTemplate(
            f"the chat template refuses a changed content of turn {index + 1}: {cut_message(error)}"
        ) from None


def _find_prompt(render: Render, messages: Messages, index: int) -> str | None:
    """The generation prompt after the first `index` messages; None if the template changes those messages, too."""
    try:
        before, after = render(messages[:index]), render(messages[:index], prompt=True)
    except Exception as error:  # noqa: BLE001 - a template may raise any exception
        raise InexactTemplate(
            f"the chat template cannot render the first {index} turns alone: {cut_message(error)}"
        ) from None
    return after[len(before) :] if after.startswith(before) else None


def _count_shared(first: str, second: str) -> int:
    """The length of the common prefix of two texts."""
    size = min(len(first), len(second))
    return next((at for at in range(size) if first[at] != second[at]), size)


def _after_mark(text: str) -> str:
    if text.count(MARK) != 1:
        raise InexactTemplate("the chat template does not show each turn's content once")
    return text.partition(MARK)[2]


def _trim(text: str, start: int, end: int, specials: Sequence[str]) -> int:
    """The end of the turn without white space after the special token that ends it."""
    turn = text[start:end]
    bare = turn.rstrip()
    return start + len(bare) if bare != turn and bare.endswith(tuple(specials)) and specials else end


def cut_message(error: BaseException) -> str:
    """The first line of what a template raised, which may be gigabytes."""
    words = str(error)[: 4 * MAX_MESSAGE_CHARS].strip()
    line = (words.splitlines() or [type(error).__name__])[0]
    return line if len(line) <= MAX_MESSAGE_CHARS else f"{line[:MAX_MESSAGE_CHARS]} ..."


def make_render(tokenizer: Any, tools: Any) -> Render:
    """A function that renders messages with the tokenizer's template and these tools."""

    def render(messages: Messages, *, prompt: bool = False) -> str:
        text: str = tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt
        )
        return text

    return render


def read_marked_spans(tokenizer: Any, messages: Messages, tools: Any) -> tuple[str, list[tuple[int, int]]]:
    """The text and the assistant's spans, from a template that marks them with {% generation %}."""
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
class RenderedChat:
    """A chat as its template renders it, with the fields of Spans. `inexact_reason`: why there are no spans, if so.
    `marked`: text and spans by the template's own {% generation %} marks, where they were asked for. `lost`: what the
    assistant said and the text lacks."""

    text: str
    answers: list[tuple[int, int]]
    turn_ends: list[int]
    inexact_reason: str = ""
    marked: tuple[str, list[tuple[int, int]]] = ("", [])
    lost: list[LostPart] = field(default_factory=list)


def render_chat(
    tokenizer: Any, render: Render, messages: Messages, tools: Any, specials: Sequence[str], *, is_marked: bool
) -> RenderedChat:
    """`is_marked` asks for the template's own marks, too. Raises what the template raises."""
    text = render(messages)
    if not text:
        return RenderedChat("", [], [])
    spans, reason = Spans([], []), ""
    try:
        spans = find_spans(render, messages, text, specials)
    except InexactTemplate as error:
        reason = str(error)
    spans = _leave_out_empty_thoughts(tokenizer, messages, tools, text, spans)
    marked = read_marked_spans(tokenizer, messages, tools) if is_marked else ("", [])
    return RenderedChat(text, spans.answers, spans.turn_ends, reason, marked, _find_lost(messages, text, spans))


def _leave_out_empty_thoughts(tokenizer: Any, messages: Messages, tools: Any, text: str, spans: Spans) -> Spans:
    """Answers that begin with an empty thought, or with its end, begin after it where the template's own prompt writes
    it when thinking is turned off. The model is never asked to write that. Shown by the first such answer."""
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    answers, empty = list[tuple[int, int]](), ""
    for turn, (start, stop) in zip(turns, spans.answers, strict=False):
        if start and text[start - 1] in "<[":  # `<think>` of the prompt and `</think>` of the turn have this in common
            start -= 1 if EMPTY_THOUGHT.match(text, start - 1, stop) else 0
        found = EMPTY_THOUGHT.match(text, start, stop)
        if found and not empty:
            off = dict.fromkeys(THINKING_SWITCHES, False)
            options = {"tools": tools, "tokenize": False, "add_generation_prompt": True, **off}
            try:
                prompt = str(tokenizer.apply_chat_template(list(messages[:turn]), **options))
            except Exception:  # noqa: BLE001 - a template may raise any exception
                prompt = ""
            if not (text.startswith(prompt) and len(prompt) > start):
                break
            empty = text[start : len(prompt)]
        skipped = len(empty) if found and text.startswith(empty, start) else 0
        answers.append((min(start + skipped, stop), stop))
    return Spans([*answers, *spans.answers[len(answers) :]], spans.turn_ends)


def _find_lost(messages: Messages, text: str, spans: Spans) -> list[LostPart]:
    turns = [(at, message) for at, message in enumerate(messages) if message["role"] == "assistant"]
    places = spans.answers or [(0, len(text))] * len(turns)
    return [
        part
        for (at, message), (start, stop) in zip(turns, places, strict=True)
        for part in find_lost_parts(message, at, text[start:stop])
    ]
