"""Renders a chat with a chat template, and finds which characters of the text are the assistant's.

Never guesses: each bound comes from rendering parts of the chat and is checked against the whole text. If they
disagree, InexactTemplate is raised. A turn is faithful where the text up to its end is what the template writes when
the turn is the last one, and begins with the prompt that the model gets.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from ulysses_cli.data.tokenizing.lost_parts import MARKS, MarkedChat, list_calls, split_content
from ulysses_cli.plan.models.model_files import THINKING_SWITCHES, THOUGHT_MARKS
from ulysses_cli.readers.problems import BadRow

Messages = Sequence[dict[str, Any]]
Span = tuple[int, int]
MARK = "uQ7zMARKz7Qu"  # a placeholder for a message's content; no template changes these letters
MAX_MESSAGE_CHARS = 300
KEPT_RENDERINGS = 4
EMPTY_THOUGHT = re.compile(
    "|".join(rf"(?:{re.escape(opening)})?\s*{re.escape(closing)}" for opening, closing in THOUGHT_MARKS)
)


class Render(Protocol):
    """`prompt`: followed by the generation prompt; `thinks`: as the model is asked to think, or not to."""

    def __call__(self, messages: Messages, *, prompt: bool = False, thinks: bool | None = None) -> str: ...


@dataclass(frozen=True)
class Spans:
    """The assistant's answers as spans of characters, one per message, the ends of the assistant's turns, whether each
    turn is faithful, and whether it has the end mark that it has where it is the last."""

    answers: list[Span]
    turn_ends: list[int]
    faithful: list[bool] = field(default_factory=list)
    has_own_end: list[bool] = field(default_factory=list)


class InexactTemplate(BadRow):
    """The rendered text does not show where a turn begins or ends."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "set data.assistant_only_loss: false to learn every token of such chats")


def find_spans(render: Render, messages: Messages, text: str, specials: Sequence[str]) -> Spans:
    """An answer is the text from the end of the generation prompt to the end of the turn, with the end-of-turn token.
    White space after a special token that ends the turn is the template's, so it is left out.

    Looked for in the chat with marks in place of words, if the template treats that alike; else in the chat itself.
    """
    chat = MarkedChat(messages)
    try:
        marked = render(chat.messages)
        map_place, anchors = chat.map_places(marked, text), chat.find_anchors(marked)
        if map_place is not None and anchors is not None:
            found = _find_spans(_TurnFinder(render, chat.messages, marked, specials, anchors))
            answers = [(map_place(start), map_place(stop)) for start, stop in found.answers]
            return replace(found, answers=answers, turn_ends=list(map(map_place, found.turn_ends)))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - a template may raise any exception for marks
        pass
    return _find_spans(_TurnFinder(render, messages, text, specials, None))


def _find_spans(finder: _TurnFinder) -> Spans:
    spans = Spans([], [], [], [])
    text = finder.text
    for index, message in enumerate(finder.messages):
        if message["role"] == "user":
            finder.begin_round()
        if message["role"] != "assistant":
            continue
        turn_start = finder.find_end(index - 1).place if index else None
        end = finder.find_end(index)
        start = finder.find_answer(index, turn_start)
        stop = _trim(text, start.place, end.place, finder.specials) - end.num_foreign
        # a template may leave out the text beside a call, which find_lost_parts tells
        is_shown = split_content(message)[1] in text[start.place : stop] or bool(list_calls(message))
        if start.place >= stop or not is_shown or (spans.answers and start.place < spans.answers[-1][1]):
            raise InexactTemplate(f"the chat template changes or moves the content of turn {index + 1}")
        start = finder.leave_out_empty_thought(index, start, stop)
        spans.answers.append((start.place, stop))
        spans.turn_ends.append(end.place)
        spans.faithful.append(start.is_as_asked and end.is_as_asked)
        spans.has_own_end.append(end.has_own_mark)
        finder.is_rewritten = finder.is_rewritten or not spans.faithful[-1]
    return spans


@dataclass(frozen=True)
class _Bound:
    """`is_as_asked`: the text up to here is what the template writes when the chat ends here. `num_foreign`: characters
    of an end mark that the turn has only inside of a chat. `has_own_mark`: it ends as it does where it is the last."""

    place: int
    is_as_asked: bool = True
    num_foreign: int = 0
    has_own_mark: bool = True


class _TurnFinder:
    """Finds the bounds of turns. With `anchors`, the places of marks of each message, what the template writes between
    two of them recurs in a chat, so each variant is analysed once: rendering every prefix of the chat would take time
    quadratic in the number of turns. Without, each turn is analysed by itself."""

    def __init__(
        self,
        render: Render,
        messages: Messages,
        text: str,
        specials: Sequence[str],
        anchors: list[Span | None] | None,
    ) -> None:
        self.render = render
        self.messages = messages
        self.text = text
        self.specials = specials
        self.anchors = anchors
        self.is_rewritten = self.was_rewritten = False  # a turn of this round; one of an earlier round
        self.last_user = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=0)
        self._known: dict[tuple[object, ...], _Bound] = {}
        self._kept: OrderedDict[tuple[int, bool], str] = OrderedDict()
        self._empty = ""

    def begin_round(self) -> None:
        self.was_rewritten = self.was_rewritten or self.is_rewritten
        self.is_rewritten = False

    def find_end(self, index: int) -> _Bound:
        """Where message `index` ends."""
        if self.anchors is None or index == len(self.messages) - 1:
            return self._find_turn_end(index)
        key, first, last = self._describe_gap("end", index)
        if key in self._known:
            return replace(self._known[key], place=first + self._known[key].place)
        end = self._find_turn_end(index)
        if first <= end.place <= last:
            self._known[key] = replace(end, place=end.place - first)
        return end

    def find_answer(self, index: int, start: int | None) -> _Bound:
        """Where the answer of message `index` begins; its turn begins at `start`."""
        if start is None:
            return self._find_first_answer(index)
        if self.anchors is None:
            return self._find_answer(index, start)
        key, first, last = self._describe_gap("answer", index - 1)
        if key in self._known:
            return replace(self._known[key], place=first + self._known[key].place)
        answer = self._find_answer(index, start)
        if first <= answer.place <= last:
            self._known[key] = replace(answer, place=answer.place - first)
        return answer

    def leave_out_empty_thought(self, index: int, start: _Bound, stop: int) -> _Bound:
        """An answer that begins with an empty thought, or with its end, begins after it where the template's own prompt
        writes it when thinking is turned off. The model is never asked to write that. Shown by the first such
        answer."""
        text, at = self.text, start.place
        if at and text[at - 1] in "<[":  # `<think>` of the prompt and `</think>` of the turn have this in common
            at -= 1 if EMPTY_THOUGHT.match(text, at - 1, stop) else 0
        if EMPTY_THOUGHT.match(text, at, stop) is None:
            return start
        if not self._empty:
            prompt = self._render_prompt(index, thinks=False)
            if not (prompt and text.startswith(prompt) and len(prompt) > at):
                return start
            self._empty = text[at : len(prompt)]
        if not text.startswith(self._empty, at) or at + len(self._empty) > stop:
            return start
        return _Bound(at + len(self._empty))

    def _describe_gap(self, name: str, index: int) -> tuple[tuple[object, ...], int, int]:
        """A key for the bound after message `index`, and the gap between marks around it. It holds the properties by
        which a template may treat turns differently: their roles and keys, and whether turns before are rewritten."""
        anchors = self.anchors or []
        before = next((at for at in range(index, -1, -1) if anchors[at]), -1)
        after = next((at for at in range(index + 1, len(anchors)) if anchors[at]), len(anchors))
        first = (anchors[before] or (0, 0))[1] if before >= 0 else 0
        last = (anchors[after] or (0, 0))[0] if after < len(anchors) else len(self.text)
        around = tuple(_describe(message) for message in self.messages[max(before, 0) : after + 1])
        gap = MARKS.sub("#", self.text[first:last])
        place = (index - before, index >= self.last_user, self.is_rewritten, self.was_rewritten)
        return (name, place, around, gap), first, last

    def _render_first(self, count: int, *, prompt: bool = False) -> str:
        """The first `count` messages alone."""
        key = count, prompt
        if key not in self._kept:
            self._kept[key] = self.render(self.messages[:count], prompt=prompt)
            if len(self._kept) > KEPT_RENDERINGS:
                self._kept.popitem(last=False)
        return self._kept[key]

    def _render_prompt(self, index: int, *, thinks: bool) -> str:
        try:
            return self.render(self.messages[:index], prompt=True, thinks=thinks)
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - a template may raise any exception
            return ""

    def _find_turn_end(self, index: int) -> _Bound:
        """Where message `index` ends in the text: after the rendering of the messages up to it, if the text begins with
        that.

        Some templates render the last turn differently (they keep its thoughts only). Then the message's content is
        replaced by a mark: the text after the mark, when the message is the last one, is the end of the turn.
        """
        text, messages = self.text, self.messages
        if index == len(messages) - 1:
            return _Bound(len(text))
        anchor = self.anchors[index] if self.anchors is not None else None
        try:
            alone = self._render_first(index + 1)
            part = _leave_out_end(alone, text, self.specials)
            if text.startswith(part):
                has_mark = part == alone or part.rstrip().endswith(tuple(filter(None, self.specials)))
                return _Bound(len(part), has_own_mark=has_mark)
            if anchor is not None:
                last = next(match for match in MARKS.finditer(text) if match.end() == anchor[1]).group()
                tail, whole = part.rpartition(last)[2] if last in part else None, text[anchor[1] :]
            else:
                marked = [*messages[:index], {**messages[index], "content": MARK}]
                tail = _after_mark(self.render(marked)) or None
                whole = _after_mark(self.render([*marked, *messages[index + 1 :]]))
        except (BadRow, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - a template may raise any exception
            raise InexactTemplate(
                f"the chat template cannot render the first {index + 1} turns alone: {cut_message(error)}"
            ) from None
        if tail is None:
            raise InexactTemplate(f"the chat template does not show where turn {index + 1} ends")
        tail = _leave_out_end(tail, whole, self.specials)
        bare = part[: _trim(part, 0, len(part), self.specials)]
        own, foreign = _find_end_mark(tail, self.specials), _find_end_mark(whole, self.specials)
        if whole.startswith(tail):
            rest, foreign = whole[len(tail) :], ""
        elif own and foreign and own != foreign:  # such as gpt-oss, which ends the last turn with another mark
            rest, bare = whole[len(foreign) :], bare.removesuffix(own)
        else:
            raise InexactTemplate(f"the chat template does not show where turn {index + 1} ends")
        if not text.endswith(rest):
            raise InexactTemplate(f"the chat template does not show where turn {index + 1} ends")
        return _Bound(len(text) - len(rest), text.startswith(bare), len(foreign), not foreign)

    def _find_answer(self, index: int, start: int) -> _Bound:
        """Where the assistant's answer begins: after the part of the generation prompt with which its turn begins."""
        text = self.text
        prompt = self._find_prompt(index)
        if prompt is None:
            raise InexactTemplate("the chat template's generation prompt is not appended to the turns before it")
        shared = _count_shared(prompt, text[start : start + len(prompt)])
        is_as_asked = text.startswith(self._render_first(index, prompt=True))
        if prompt and shared == len(prompt):
            return _Bound(start + shared, is_as_asked)
        if prompt:
            for thinks in (True, False):
                other = self._render_prompt(index, thinks=thinks)
                if len(other) > start and text.startswith(other):
                    return _Bound(len(other))
        elif is_as_asked and self._has_prompt:
            return _Bound(start)  # the turn goes on after the result of a call
        marked = self._mark_turn(index)
        content = marked.find(MARK)
        if not prompt and text[start:content].strip() and content > start and marked[:content] == text[:content]:
            return _Bound(content, is_as_asked)  # the template has no prompt, but writes a heading before the content
        if prompt:  # the prompt ends in text that a finished turn may lack, such as the start of a thought
            if marked[:start] != text[:start]:
                raise InexactTemplate(f"the chat template does not show where turn {index + 1} begins")
            shared = min(shared, _count_shared(prompt, marked[start:]))
            if not shared:
                raise InexactTemplate(f"turn {index + 1} does not begin with the chat template's generation prompt")
        if marked[:start] == text[:start] and content >= start:
            shared = min(shared, content - start)
        return _Bound(start + shared, is_as_asked)

    def _find_first_answer(self, index: int) -> _Bound:
        """Where the answer begins if it is the chat's first message: only the generation prompt shows that."""
        marked = self._mark_turn(index)
        content = marked.find(MARK)
        first_user = next((at for at, message in enumerate(self.messages) if message["role"] == "user"), None)
        prompt = self._find_prompt(first_user + 1) if first_user is not None else None
        is_shown = content >= 0 and bool(prompt) and marked[:content].endswith(prompt or "")
        if not is_shown or self.text[:content] != marked[:content]:
            raise InexactTemplate(
                "the chat template does not show where an assistant turn begins if it is the first turn"
            )
        return _Bound(content)

    @cached_property
    def _has_prompt(self) -> bool:
        """Whether the template writes a generation prompt at all."""
        first_user = next((at for at, message in enumerate(self.messages) if message["role"] == "user"), None)
        return first_user is not None and bool(self._find_prompt(first_user + 1))

    def _mark_turn(self, index: int) -> str:
        turns = [*self.messages]
        turns[index] = {**turns[index], "content": MARK}
        with _explained(f"refuses a changed content of turn {index + 1}"):
            return self.render(turns)

    def _find_prompt(self, index: int) -> str | None:
        """The generation prompt after the first `index` messages; None if the template changes those messages, too."""
        with _explained(f"cannot render the first {index} turns alone"):
            before, after = self._render_first(index), self._render_first(index, prompt=True)
        before = _leave_out_end(before, after, self.specials)
        return after[len(before) :] if after.startswith(before) else None


@contextmanager
def _explained(refusal: str) -> Iterator[None]:
    """The error of a template that runs inside says what it refuses."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a template may raise any exception
        raise InexactTemplate(f"the chat template {refusal}: {cut_message(error)}") from None


def _describe(message: Mapping[str, Any]) -> tuple[object, ...]:
    return message["role"], tuple(message)


def _count_shared(first: str, second: str) -> int:
    """The length of the common prefix of two texts."""
    size = min(len(first), len(second))
    return next((at for at in range(size) if first[at] != second[at]), size)


def _after_mark(text: str) -> str:
    if text.count(MARK) != 1:
        raise InexactTemplate("the chat template does not show each turn's content once")
    return text.partition(MARK)[2]


def _leave_out_end(part: str, text: str, specials: Sequence[str]) -> str:
    """The rendering of a chat's first messages without the token that ends a text, which some templates write whenever
    they write no generation prompt."""
    if text.startswith(part):
        return part
    ends = [part.removesuffix(special) for special in specials if special and part.endswith(special)]
    return next((bare for bare in ends if bare.strip() and text.startswith(bare)), part)


def _find_end_mark(text: str, specials: Sequence[str]) -> str:
    return max((special for special in specials if text.startswith(special)), key=len, default="")


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


def make_render(tokenizer: Any, tools: Any, settings: Mapping[str, Any] | None = None) -> Render:
    """A function that renders messages with the tokenizer's template, these tools and these variables."""

    def render(messages: Messages, *, prompt: bool = False, thinks: bool | None = None) -> str:
        switches = {} if thinks is None else dict.fromkeys(THINKING_SWITCHES, thinks)
        options = {**(settings or {}), **switches, "tokenize": False, "add_generation_prompt": prompt}
        text: str = tokenizer.apply_chat_template(list(messages), tools=tools, **options)
        return text

    return render


def read_marked_spans(
    tokenizer: Any, messages: Messages, tools: Any, settings: Mapping[str, Any] | None = None
) -> tuple[str, list[Span]]:
    """The text and the assistant's spans, from a template that marks them with {% generation %}."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = tokenizer.get_chat_template(tools=tools)
    texts, spans = render_jinja_template(
        conversations=[list(messages)],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=True,
        **{**tokenizer.special_tokens_map, **(settings or {})},
    )
    return texts[0], [(int(start), int(stop)) for start, stop in spans[0]]
