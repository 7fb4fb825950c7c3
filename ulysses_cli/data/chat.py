"""A chat, as a template renders it -> the text and which of its characters the assistant says.

Exact or not at all: each bound is found by rendering and checked against the whole text; what does not agree raises.
"""

from __future__ import annotations

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
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = find_turn_end(render, messages, index - 1, text) if index else None
        end = find_turn_end(render, messages, index, text)
        head = _find_head(render, messages, index, text, start)
        last = _trim(text, head, end, specials)
        answer = str(message.get("content") or "").rpartition("</think>")[2].strip()
        if head >= last or answer not in text[head:last] or (said and head < said[-1][1]):
            raise InexactTemplate(f"the chat template does not show turn {index + 1} as it is, in its place")
        said.append((head, last))
        ends.append(end)
    return Spans(said, ends)


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
    marked = render([*messages[:index], {**messages[index], "content": MARK}, *messages[index + 1 :]])
    content = marked.find(MARK)
    if start is None:  # the first message of all: nothing tells where it begins but the prompt itself
        prompt = _find_prompt(render, messages, index) or _find_later_prompt(render, messages)
        if content < 0 or not prompt or not marked[:content].endswith(prompt) or text[:content] != marked[:content]:
            raise InexactTemplate("the chat template does not tell where a first turn of the assistant begins")
        return content
    prompt = _find_prompt(render, messages, index)
    if prompt is None:
        raise InexactTemplate("the chat template's generation prompt does not follow the turns before it")
    if not prompt and text[start:content].strip() and content > start and marked[:content] == text[:content]:
        return content  # no prompt at all, but a heading: it is the template's
    shared = _count_shared(prompt, text[start:])
    if shared < len(prompt):  # the prompt goes on with what a finished turn may lack, such as the start of a thought
        if marked[:start] != text[:start]:
            raise InexactTemplate(f"the chat template does not tell where turn {index + 1} begins")
        shared = min(shared, _count_shared(prompt, marked[start:]))
        if not shared:
            raise InexactTemplate(f"turn {index + 1} does not begin with the chat template's generation prompt")
    if marked[:start] == text[:start] and content >= start:
        shared = min(shared, content - start)
    return start + shared


def _find_prompt(render: Render, messages: Messages, index: int) -> str | None:
    """What the template adds before the assistant speaks."""
    if not index:
        return None
    try:
        before, after = render(messages[:index]), render(messages[:index], prompt=True)
    except Exception as error:  # noqa: BLE001 - a template may raise what it likes
        raise InexactTemplate(f"the chat template cannot show the first {index} turns alone: {error}") from None
    return after[len(before) :] if after.startswith(before) else None


def _find_later_prompt(render: Render, messages: Messages) -> str | None:
    asked = next((at for at, message in enumerate(messages) if message["role"] == "user"), None)
    return None if asked is None else _find_prompt(render, messages, asked + 1)


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
