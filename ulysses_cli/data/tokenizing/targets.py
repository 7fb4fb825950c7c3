"""Says of a chat which of its characters are targets: one function from messages, flags and a choice to classes.

A chat is one text, or several where `split` shows each turn as the model writes it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from ulysses_cli.data.store import CALL, SAID, TARGET, THOUGHT
from ulysses_cli.data.tokenizing.chat import (
    MARK,
    InexactTemplate,
    Messages,
    Render,
    Span,
    Spans,
    find_spans,
    read_marked_spans,
)
from ulysses_cli.data.tokenizing.lost_parts import (
    THOUGHT_KEYS,
    LostPart,
    find_lost_parts,
    find_words,
    list_calls,
    split_content,
)

# In counts: rewritten turns that lose something, and those behind another prompt than the model gets, where they are
# shown so and where they are no targets for that.
SHOWN, MASKED = ("rewritten", "other prompt"), ("masked as rewritten", "masked behind another prompt")

ENDS, HOLDS = "turns that end with ", "tokens inside of turns: "  # in counts, before a token


@dataclass(frozen=True)
class TargetChoice:
    """What of chats is trained; the fields that recipes have are named as there. `is_marked`: the template's own
    {% generation %} marks bound the targets. `ends`: tokens that end a turn where it ends with one; `stops`: those at
    which the model stops where it ends with none, such as GLM's `<|user|>`; `text_end`: that of the last turn, then."""

    answers_only: bool = False
    is_marked: bool = False
    train_on_turns: str = "all"
    thoughts: str = "train"
    on_rewritten_turns: str = "raise"
    ends: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    text_end: str = ""


@dataclass(frozen=True)
class ChatText:
    """`classes`: spans of characters with the flags of the store."""

    text: str
    classes: list[tuple[int, int, int]]
    turn_ends: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class RenderedChat:
    """A chat as texts to train on. `inexact_reason`: why it is not known which of it the assistant says, if so. `lost`:
    what the assistant said and the texts lack. `counts`: turns and parts of each kind. `whole`: the text of a chat that
    is split into several. `unsplit`: of a chat that is not, and could be, each text that it would become: how much of
    it the whole text begins with, up to a special token, and the rest."""

    texts: list[ChatText]
    inexact_reason: str = ""
    lost: list[LostPart] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    whole: str = ""
    unsplit: list[tuple[int, str]] = field(default_factory=list)


def choose_turns(messages: Messages, flags: Sequence[bool | None], which: str, first: int = 0) -> set[int]:
    """The messages of the assistant that are targets, from message `first` on. A flag of a message beats `which`."""
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant" and at >= first]
    users = [at for at, message in enumerate(messages) if message["role"] == "user"]
    wanted = {"all": turns, "last": turns[-1:], "last_round": [at for at in turns if not users or at > users[-1]]}
    chosen = set(wanted[which])
    for at in turns:
        flag = flags[at] if at < len(flags) else None
        if flag is not None:
            (chosen.add if flag else chosen.discard)(at)
    return chosen


def drop_thoughts(messages: Messages) -> list[dict[str, Any]]:
    """The messages as if the assistant had never thought."""
    return [
        {
            **{key: value for key, value in message.items() if key not in THOUGHT_KEYS},
            "content": split_content(message)[1],
        }
        if message["role"] == "assistant" and _has_thought(message)
        else dict(message)
        for message in messages
    ]


def _has_thought(message: Mapping[str, Any]) -> bool:
    keys = any(str(message.get(key) or "").strip() for key in THOUGHT_KEYS)
    return keys or split_content(message)[1] != str(message.get("content") or "").strip()


def count_thoughts(messages: Messages) -> int:
    return sum(message["role"] == "assistant" and _has_thought(message) for message in messages)


class _Chat:
    """A chat, or its first messages, as one text of which it is known what the assistant says."""

    def __init__(self, source: _Source, count: int, text: str, spans: Spans) -> None:
        self.source, self.text = source, text
        self.messages = source.messages[:count]
        turns = [at for at, message in enumerate(self.messages) if message["role"] == "assistant"]
        self.answers = dict(zip(turns, spans.answers, strict=True))
        self.ends = dict(zip(turns, spans.turn_ends, strict=True))
        self.faithful = {turn for turn, is_so in zip(turns, spans.faithful, strict=True) if is_so}
        # as the model writes them, with the end mark
        self.whole = {turn for turn, is_so in zip(turns, spans.has_own_end, strict=True) if is_so} & self.faithful
        self.stops: dict[int, Span] = {}
        self.endless = set[int]()
        for turn in turns:
            self._find_stop(turn)

    def _find_stop(self, turn: int) -> None:
        """Adds to a turn without an end mark the token at which the model stops: the one that follows, or, after the
        last turn, the one that would follow."""
        choice, (start, stop) = self.source.choice, self.answers[turn]
        if not choice.ends or self.text[start:stop].endswith(choice.ends):
            return
        found = next((each for each in choice.stops if self.text.startswith(each, stop)), "")
        if turn == len(self.messages) - 1:
            found = self.source.find_next_stop(turn) or choice.text_end
            self.text += found
            self.ends[turn] += len(found)
        if found:
            self.stops[turn] = (stop, stop + len(found))
            self.answers[turn] = (start, stop + len(found))
        else:
            self.endless.add(turn)

    @property
    def turn_ends(self) -> list[int]:
        return list(self.ends.values())

    def find_lost(self, turns: Collection[int]) -> list[LostPart]:
        return [
            part
            for turn in sorted(turns)
            for start, stop in [self.answers[turn]]
            for part in find_lost_parts(self.messages[turn], turn, self.text[start:stop])
        ]

    @cached_property
    def marks(self) -> list[Span]:
        source = self.source
        text, spans = read_marked_spans(source.tokenizer, self.messages, source.tools, source.settings)
        return [*spans, *self.stops.values()] if self.text.startswith(text) else [(0, len(self.text))]

    def classify(self, trained: Collection[int]) -> list[tuple[int, int, int]]:
        """The flags of each span. An answer of which the template shows the end mark alone is no target: the model
        would learn to say nothing."""
        source = self.source
        classes = [
            described
            for turn, span in self.answers.items()
            for described in _describe_answer(self.messages[turn], self.text, span)
        ]
        for turn in sorted(trained):
            start, stop = self.answers[turn]
            if source.is_bare(self.text[start:stop]) and find_lost_parts(
                self.messages[turn], turn, self.text[start:stop]
            ):
                continue
            spans = [(start, stop)]
            if source.choice.thoughts == "mask":
                spans = _leave_out(spans, [(a, b) for a, b, bits in classes if bits & THOUGHT])
            if source.choice.is_marked:
                spans = _intersect(spans, self.marks)
            classes += [(a, b, TARGET) for a, b in spans]
        return classes


class _Source:
    """What a chat is rendered from."""

    def __init__(
        self, tokenizer: Any, render: Render, messages: Messages, tools: Any, settings: Any, specials: Sequence[str],
        choice: TargetChoice,
    ) -> None:  # fmt: skip
        self.tokenizer = tokenizer
        self.render = render
        self.messages = messages
        self.tools = tools
        self.settings, self.specials, self.choice = settings, specials, choice

    def look(self, count: int, text: str | None = None) -> _Chat:
        """Raises InexactTemplate."""
        text = self.render(self.messages[:count]) if text is None else text
        return _Chat(self, count, text, find_spans(self.render, self.messages[:count], text, self.specials))

    def find_next_stop(self, turn: int) -> str:
        """The token at which the model stops after a turn that is the last: with it the template begins what follows,
        the result of a call or a message of the user. '' where there is none."""
        calls = self.messages[turn].get("tool_calls") or [{}]
        has_calls = bool(list_calls(self.messages[turn]))
        role = {"role": "tool", "tool_call_id": calls[0].get("id", "")} if has_calls else {"role": "user"}
        try:
            shown = self.render([*self.messages[: turn + 1], {**role, "content": MARK}]) if self.choice.stops else ""
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - a template may raise any exception
            return ""
        before = shown.partition(MARK)[0]
        return max(self.choice.stops, key=before.rfind, default="") if any(map(before.count, self.choice.stops)) else ""

    def is_bare(self, text: str) -> bool:
        for special in self.specials:
            text = text.replace(special, "")
        return not text.strip()


def render_chat(
    tokenizer: Any,
    render: Render,
    messages: Messages,
    tools: Any,
    specials: Sequence[str],
    choice: TargetChoice,
    flags: Sequence[bool | None] = (),
    first: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> RenderedChat:
    """`first`: the first message that may be a target. Raises what the template raises."""
    if choice.thoughts == "drop":
        messages = drop_thoughts(messages)
    messages, text = _render_whole(render, messages)
    if not text:
        return RenderedChat([])
    chosen = choose_turns(messages, flags, choice.train_on_turns, first)
    source = _Source(tokenizer, render, messages, tools, settings, specials, choice)
    counts = _count_parts(messages, chosen, flags, first)
    try:
        chat = source.look(len(messages), text)
    except InexactTemplate as error:
        lost = [
            part
            for at, message in enumerate(messages)
            if message["role"] == "assistant"
            for part in find_lost_parts(message, at, text)
            if part.kind != "thought" or at in chosen or not choice.answers_only
        ]
        if choice.answers_only and choice.is_marked:
            return RenderedChat([_read_marks(source, chosen)], "", lost, counts)
        return RenderedChat([ChatText(text, [(0, len(text), TARGET)])], str(error), lost, counts)
    if not choice.answers_only:
        classes = [*chat.classify(()), (0, len(chat.text), TARGET)]
        lost = chat.find_lost(chat.answers)
        return RenderedChat([ChatText(chat.text, classes, chat.turn_ends)], "", lost, counts)
    text = chat.text
    # where a turn is no target a thought may be missing, since templates leave it out when the model is asked
    lost = [part for part in chat.find_lost(chat.answers) if part.kind != "thought" or part.turn in chosen]
    rewritten = chosen - chat.faithful
    lost_turns = {part.turn for part in lost}
    names = MASKED if choice.on_rewritten_turns == "mask" else SHOWN
    counts |= dict(zip(names, (len(rewritten & lost_turns), len(rewritten - lost_turns)), strict=True))
    if choice.on_rewritten_turns == "mask":  # they become context, of which nothing is learned
        chosen, lost = chosen & chat.faithful, [part for part in lost if part.turn not in rewritten]
    counts["endless"] = len(chosen & chat.endless)
    texts, unsplit = None, list[tuple[int, str]]()
    if choice.on_rewritten_turns == "split" and chosen - chat.whole:
        # what a text lacks that is no target in it is context as the model gets it
        texts, lost = _split(chat, chosen)
    elif choice.on_rewritten_turns == "raise" and rewritten and lost:
        unsplit = _list_unsplit(chat, chosen)
        if not unsplit:
            counts["never shown"] = 1
    elif choice.on_rewritten_turns == "raise" and chosen - chat.whole:
        counts["would split"] = 1  # without loss: what it would cost is not worth its time
    texts = texts or [ChatText(text, chat.classify(chosen), chat.turn_ends)]
    counts |= {"chats": 1, "trained": len(chosen), "texts": len(texts)}
    return RenderedChat(texts, "", lost, counts, text if len(texts) > 1 else "", unsplit)


def _list_unsplit(chat: _Chat, chosen: Collection[int]) -> list[tuple[int, str]]:
    """What a chat would become if it were split; nothing where that does not show all that is lost."""
    try:
        texts, lost = _split(chat, chosen)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - a template may raise any exception for the first messages alone
        return []
    return [] if lost else [_leave_out_shared(each.text, chat.text, chat.source.specials) for each in texts]


def count_ends(texts: Sequence[ChatText], ends: tuple[str, ...]) -> dict[str, int]:
    """The special tokens with which trained turns end, and those that stand inside of them."""
    found, pattern = Counter[str](), _compile_ends(ends)
    for text in texts:
        trained = [(start, stop) for start, stop, bits in text.classes if bits & TARGET]
        for first, last, bits in text.classes:
            if bits == SAID and any(start < last <= stop for start, stop in trained):
                said = text.text[first:last]
                marks = pattern.findall(said)
                if marks and said.endswith(marks[-1]):
                    found[ENDS + marks.pop()] += 1
                found.update(HOLDS + mark for mark in marks)
    return dict(found)


def list_turn_ends(counts: Iterable[Mapping[str, int]]) -> list[str]:
    """The tokens with which turns end and that mean nothing else: at these the model may be stopped. `counts`: of
    sources. gpt-oss ends a thought and an earlier turn with the same token."""
    names = sorted({name for each in counts for name in each})
    held = {name.removeprefix(HOLDS) for name in names if name.startswith(HOLDS)}
    return [end for name in names if name.startswith(ENDS) and (end := name.removeprefix(ENDS)) not in held]


@cache
def _compile_ends(ends: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(filter(None, ends), key=len, reverse=True))) or r"(?!)")


def _leave_out_shared(part: str, whole: str, specials: Sequence[str]) -> tuple[int, str]:
    """Where both texts have the last special token of what they begin with, and the part from there on: no token
    crosses that place, so tokens before it are counted once."""
    low, high = 0, min(len(part), len(whole))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if part[low:middle] == whole[low:middle] else (low, middle - 1)
    cut = max((part.rfind(special, 0, low) for special in specials if special), default=0)
    return max(cut, 0), part[max(cut, 0) :]


def _render_whole(render: Render, messages: Messages) -> tuple[Messages, str]:
    """The text, and the messages in the form that the template takes: DeepSeek V3's joins arguments as text."""
    try:
        return messages, render(messages)
    except TypeError:
        as_text = [_write_arguments(message) for message in messages]
        if as_text == list(messages):
            raise
        return as_text, render(as_text)


def _write_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else dict(message)


def _split(chat: _Chat, chosen: Collection[int]) -> tuple[list[ChatText], list[LostPart]]:
    """Texts in which each chosen turn is a target once, where it is faithful: from the last turn back, a text trains
    all turns that are faithful in it and are not trained yet."""
    source, left = chat.source, set(chosen)
    texts, lost = list[ChatText](), list[LostPart]()
    while left:
        last = max(left)
        trained = left & chat.whole
        if last in trained or last != max(chat.answers):
            text, missing = ChatText(chat.text, chat.classify(trained), chat.turn_ends), chat.find_lost(trained)
        else:  # the chat ends with a turn that does not follow the prompt for it
            text, trained, missing = _answer_prompt(chat, last, left)
        if trained:
            texts.append(text)
            lost += missing
            left -= trained
        if left:
            chat = source.look(max(left) + 1)
    return texts[::-1], lost


def _answer_prompt(chat: _Chat, turn: int, left: Collection[int]) -> tuple[ChatText, set[int], list[LostPart]]:
    """The answer behind the prompt that the model gets, if the turn begins as that ends; else the chat as it is. Trains
    turns in the prompt, too."""
    source = chat.source
    before = source.render(source.messages[:turn])
    prompt = source.render(source.messages[:turn], prompt=True)
    start, lost = chat.answers[turn][0], chat.find_lost({turn})
    added = prompt[len(before) :] if prompt.startswith(before) else ""
    if not added or not chat.text[:start].endswith(added):
        return ChatText(chat.text, chat.classify({turn}), chat.turn_ends), {turn}, lost
    text = prompt + chat.text[start:]
    shift = len(prompt) - start
    classes = [(a + shift, b + shift, bits) for a, b, bits in chat.classify({turn}) if a >= start]
    ends = [len(text)]
    trained = {turn}
    if any(message["role"] == "assistant" for message in source.messages[:turn]):
        try:
            earlier = source.look(turn, before)
        except InexactTemplate:
            return ChatText(text, classes, ends), trained, lost
        also = set(left) & earlier.whole
        trained |= also
        classes = [*earlier.classify(also), *classes]
        ends = [*earlier.turn_ends, *ends]
        lost = [*earlier.find_lost(also), *lost]
    return ChatText(text, classes, ends), trained, lost


def _read_marks(source: _Source, chosen: Collection[int]) -> ChatText:
    """A chat of which the template's own marks alone show what the assistant says."""
    text, spans = read_marked_spans(source.tokenizer, source.messages, source.tools, source.settings)
    turns = [at for at, message in enumerate(source.messages) if message["role"] == "assistant"]
    trained = spans
    if not set(turns) <= set(chosen):
        if len(turns) != len(spans):
            raise InexactTemplate(f"the chat template marks {len(spans)} answers where there are {len(turns)}")
        trained = [span for turn, span in zip(turns, spans, strict=True) if turn in chosen]
    return ChatText(text, [(*span, SAID) for span in spans] + [(*span, TARGET) for span in trained])


def _describe_answer(message: Mapping[str, Any], text: str, span: Span) -> list[tuple[int, int, int]]:
    """What of an answer is said, thought, and a call."""
    start, stop = span
    shown = text[start:stop]
    thoughts, words = find_words(message, shown)
    classes = [(start, stop, SAID), *((start + a, start + b, THOUGHT) for a, b in thoughts)]
    if list_calls(message):
        taken = [(start + a, start + b) for a, b in [*thoughts, words] if b > a]
        last = max((b for _, b in taken), default=start)
        rest = [(last, stop)] if text[last:stop].strip() else _leave_out([span], taken)
        classes += [(a, b, CALL) for a, b in rest]
    return classes


def _leave_out(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    for hole in holes:
        spans = [
            part
            for start, stop in spans
            for part in ((start, min(stop, hole[0])), (max(start, hole[1]), stop))
            if part[0] < part[1]
        ]
    return list(spans)


def _intersect(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    found = [(max(a, c), min(b, d)) for a, b in spans for c, d in others]
    return [(start, stop) for start, stop in found if start < stop]


def _count_parts(
    messages: Messages, chosen: Collection[int], flags: Sequence[bool | None], first: int
) -> dict[str, int]:
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant" and at >= first]
    denied = [at for at in turns if at < len(flags) and flags[at] is False]
    counts = Counter(turns=len(turns))
    counts["masked by a field"] = len(denied)
    counts["masked by choice"] = len(set(turns) - set(chosen) - set(denied))
    counts["thoughts"] = sum(_has_thought(messages[at]) for at in turns)
    counts["calls"] = sum(bool(list_calls(messages[at])) for at in turns)
    return dict(counts)
