"""Encodes samples as token ids and flags, with the tokenizer's own backend. Gives the same result in every process.

Tokenizes a long text in pieces where that is proven to give the same tokens; otherwise whole, and keeps the reason.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ulysses_cli.data.store import TARGET, TURN, Flags, Ids, choose_dtype, join_branches
from ulysses_cli.data.tokenizing.chat import InexactTemplate
from ulysses_cli.data.tokenizing.lost_parts import THOUGHT_KEYS, TOOLS, LostPart
from ulysses_cli.data.tokenizing.pieces import NEIGHBOURHOOD, PIECE_CHARS, CutRule, find_cut_rule
from ulysses_cli.data.tokenizing.renderer import Renderer, RenderRequest, TemplateRefusal
from ulysses_cli.data.tokenizing.targets import ChatText, TargetChoice, count_thoughts
from ulysses_cli.data.tokenizing.tokenizer import get_template
from ulysses_cli.plan.models.model_files import THINKING_SWITCHES, list_variables
from ulysses_cli.readers.columns import Chat, Completion, PlainText, Sample, Tokens
from ulysses_cli.readers.problems import SOURCE, BadRow, NoTemplate

PIECES_AT_ONCE = 8  # what the library returns of a piece takes about 150 bytes per token
READ_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "id", "type", *THOUGHT_KEYS}
END_CHARS = 256  # before the end of a turn, in which its end mark stands; the longest has 30
# What of a message templates show, and how it is called.
SAID_KEYS = {"content": "text", "name": "name", "tool_calls": "calls", **dict.fromkeys(THOUGHT_KEYS, "thought")}
Bounds = NDArray[np.signedinteger[Any]]  # [tokens, 2]: first character and one past the last


@dataclass(frozen=True)
class EncoderSettings:
    """The fields of a recipe's data section that decide the targets."""

    assistant_only_loss: bool = False
    completion_only_loss: bool = True
    train_on_turns: str = "all"
    thoughts: str = "train"
    on_rewritten_turns: str = "raise"


@dataclass
class Encoder:
    """A tokenizer with the facts derived from it. `stops`: tokens at which the model stops besides the tokenizer's own
    that ends a text. Counts the long texts encoded in pieces and whole. Of the last chat,
    `lost` is what the assistant said and the template does not show, and `counts` its turns of each kind."""

    piece_chars: ClassVar[int] = PIECE_CHARS
    tokenizer: Any
    settings: EncoderSettings = field(default_factory=EncoderSettings)
    stops: tuple[str, ...] = ()
    num_in_pieces: int = 0
    num_whole: int = 0

    def __post_init__(self) -> None:
        self.dtype = choose_dtype(len(self.tokenizer))
        self.eos: int | None = self.tokenizer.eos_token_id
        self.lost: list[LostPart] = []
        self.counts: dict[str, int] = {}
        self._unread: dict[str, bool] = {}  # by the name of a field of messages
        self._announced: dict[int, tuple[Chat, RenderRequest]] = {}  # by id()
        self.backend: Any = None
        self.rule = CutRule(reason="it has no fast backend")
        self.prefix: list[int] = []
        self.suffix: list[int] = []
        if getattr(self.tokenizer, "is_fast", False):
            self._read_backend()
        self.specials = sorted(str(token) for token in self.tokenizer.all_special_tokens)
        self.specials += sorted(str(token) for token in getattr(self.tokenizer, "added_tokens_encoder", {}))
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        special = {*map(str, self.tokenizer.all_special_tokens), *(str(token) for token in added if token.special)}
        self.ends = tuple(sorted({*special, *self.stops}))
        self.renderer = Renderer(self.tokenizer, self.specials)
        template = self.tokenizer.chat_template
        self.has_template = bool(template)
        shown = get_template(self.tokenizer)
        self.variables = list_variables(shown) if template else frozenset[str]()
        read = (rf"""\.{key}\b|['"]{key}['"]""" for key in THOUGHT_KEYS)
        self.thought_keys = [key for key, form in zip(THOUGHT_KEYS, read, strict=True) if re.search(form, shown)]
        self.marks_answers = "generation %}" in str(template) or "generation -%}" in str(template)

    def _read_backend(self) -> None:
        from tokenizers import Tokenizer

        spec = json.loads(self.tokenizer.backend_tokenizer.to_str())
        spec["truncation"] = spec["padding"] = None
        _keep_offsets(spec.get("post_processor"))
        plain = json.dumps(spec)
        self.backend = Tokenizer.from_str(plain)
        self.rule = find_cut_rule(plain)
        self.continuation = Tokenizer.from_str(self.rule.continuation) if self.rule.continuation else self.backend
        probe = "a"
        bare = self.backend.encode(probe, add_special_tokens=False).ids
        full = self.backend.encode(probe, add_special_tokens=True).ids
        at = next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)
        self.prefix, self.suffix = full[:at], full[at + len(bare) :]
        expected = list(self.tokenizer(probe)["input_ids"])
        if [*self.prefix, *bare, *self.suffix] != expected:
            self.backend = None  # the Python class does more than the backend
            self.rule = CutRule(reason="its class adds to what its backend does")

    def encode_texts(self, texts: Sequence[str]) -> list[Ids]:
        """Encodes whole documents, with the tokenizer's special tokens at their ends and an end-of-sequence token."""
        if self.backend is None:
            self.num_whole += sum(len(text) > 2 * self.piece_chars for text in texts)
            return [self._append_eos(np.asarray(self.tokenizer(text)["input_ids"], self.dtype)) for text in texts]
        short = [text for text in texts if len(text) <= 2 * self.piece_chars]
        encodings = iter(self.backend.encode_batch_fast(short, add_special_tokens=False))
        documents = []
        for text in texts:
            if len(text) <= 2 * self.piece_chars:
                ids = np.asarray(next(encodings).ids, self.dtype)
            else:
                ids = self.encode_long(text)[0]
            documents.append(self._add_specials(ids))
        return documents

    def encode_long(self, text: str, *, with_bounds: bool = False) -> tuple[Ids, Bounds]:
        """Encodes one text without special tokens, in pieces where the cut rule allows that."""
        cuts = self._find_cuts(text) if len(text) > 2 * self.piece_chars else []
        spans = list(pairwise([0, *cuts, len(text)]))
        encode = "encode_batch" if with_bounds else "encode_batch_fast"
        place_type = np.dtype(np.int32 if len(text) <= np.iinfo(np.int32).max else np.int64)
        ids, bounds = list[Ids](), list[Bounds]([np.empty((0, 2), place_type)])
        for first in range(0, len(spans), PIECES_AT_ONCE):
            here = spans[first : first + PIECES_AT_ONCE]
            parts, num_first = [text[start:stop] for start, stop in here], int(first == 0)
            encodings = getattr(self.backend, encode)(parts[:num_first], add_special_tokens=False)
            encodings += getattr(self.continuation, encode)(parts[num_first:], add_special_tokens=False)
            ids += [np.asarray(encoding.ids, self.dtype) for encoding in encodings]
            if with_bounds:
                bounds += [
                    np.asarray(encoding.offsets, place_type).reshape(-1, 2) + place_type.type(start)
                    for encoding, (start, _) in zip(encodings, here, strict=True)
                ]
        return np.concatenate(ids), np.concatenate(bounds)

    def _find_cuts(self, text: str) -> list[int]:
        """The rule's cuts, without those that change the tokens of the text around them."""
        cuts = [at for at in self.rule.find_cuts(text, self.piece_chars) if self._is_exact(text, at)]
        self.num_in_pieces += bool(cuts)
        self.num_whole += not cuts
        return cuts

    def _is_exact(self, text: str, at: int) -> bool:
        left, right = text[max(0, at - NEIGHBOURHOOD) : at], text[at : at + NEIGHBOURHOOD]
        parts = self.continuation.encode_batch_fast([left + right, left, right], add_special_tokens=False)
        whole, *halves = (encoding.ids for encoding in parts)
        return bool(whole == halves[0] + halves[1])

    def encode(self, sample: Sample) -> tuple[Ids, Flags | None]:
        """Token ids and flags of a sample that is one document. Flags None: every token is a target."""
        (document,) = self.encode_documents(sample)
        return document

    def encode_documents(self, sample: Sample) -> list[tuple[Ids, Flags | None]]:
        """A chat may become several documents."""
        self.lost, self.counts = [], {}
        if isinstance(sample, PlainText):
            return [(self.encode_texts([sample.text])[0], None)]
        if isinstance(sample, Tokens):
            return [self._encode_tokens(sample)]
        if isinstance(sample, Completion):
            return [self._encode_completion(sample)]
        return self._encode_chat(sample)

    def _encode_tokens(self, sample: Tokens) -> tuple[Ids, Flags | None]:
        top = max(sample.ids)  # columns.py has refused an empty list
        if top >= len(self.tokenizer) or min(sample.ids) < 0:
            outside = top if top >= len(self.tokenizer) else min(sample.ids)
            raise BadRow(f"input_ids holds {outside}, but the tokenizer has ids 0 to {len(self.tokenizer) - 1:,}")
        flags = None if sample.targets is None else np.asarray(sample.targets, np.uint8) * np.uint8(TARGET)
        return np.asarray(sample.ids, self.dtype), flags

    def _encode_completion(self, sample: Completion) -> tuple[Ids, Flags | None]:
        text = sample.prompt + sample.completion
        if not self.settings.completion_only_loss:
            return self.encode_texts([text])[0], None
        ids, bounds = self._encode_bounds(text)
        flags = _mark(bounds, [(len(sample.prompt), len(text), TARGET)])
        ids = self._add_specials(ids)
        ends = np.full(len(ids) - len(self.prefix) - len(flags), TARGET, np.uint8)
        return ids, np.concatenate([np.zeros(len(self.prefix), np.uint8), flags, ends])

    def announce(self, samples: Sequence[Sample]) -> None:
        """The next samples for `encode`, in this order. The chats among them are rendered ahead."""
        chats = [sample for sample in samples if isinstance(sample, Chat) and self.has_template]
        # The value holds the chat, so that its id() stays its own.
        self._announced = {id(chat): (chat, self._make_request(chat)) for chat in chats}
        self.renderer.announce([request for _, request in self._announced.values()])

    def _make_request(self, chat: Chat) -> RenderRequest:
        settings = self.settings
        answers_only = settings.completion_only_loss if chat.is_completion else settings.assistant_only_loss
        choice = TargetChoice(
            answers_only,
            self.marks_answers and answers_only,
            # what `keep` accepts `raise` refuses, with counts: one store serves both
            on_rewritten_turns=settings.on_rewritten_turns.replace("keep", "raise"),
            ends=self.ends,
            stops=self.stops,
            text_end=str(self.tokenizer.eos_token or ""),
        )
        if answers_only:
            choice = replace(choice, train_on_turns=settings.train_on_turns, thoughts=settings.thoughts)
        first = chat.first_target if answers_only else 0
        messages = [self._name_thought(message) for message in chat.messages]
        return RenderRequest(messages, chat.tools, choice, chat.flags, first, chat.settings or None)

    def _name_thought(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its thought under a name that the template reads."""
        given = [key for key in THOUGHT_KEYS if key in message]
        if message["role"] != "assistant" or not given or not self.thought_keys or set(given) & set(self.thought_keys):
            return message
        return {
            **{key: value for key, value in message.items() if key != given[0]},
            self.thought_keys[0]: message[given[0]],
        }

    def _encode_chat(self, sample: Chat) -> list[tuple[Ids, Flags | None]]:
        if not self.has_template:
            raise NoTemplate
        _, request = self._announced.get(id(sample)) or (sample, self._make_request(sample))
        choice = request.choice or TargetChoice()
        self._check_chat(sample, choice)
        try:
            rendered = self.renderer.render(request)
        except TemplateRefusal as error:
            raise BadRow(f"the chat template refuses this chat: {error}") from None
        if not rendered.texts:
            raise BadRow("the chat template renders this chat as an empty text")
        if rendered.inexact_reason and choice.answers_only:
            raise InexactTemplate(rendered.inexact_reason)
        self._check_end_marks(sample, rendered.texts)
        self.lost, self.counts = rendered.lost, rendered.counts
        if sample.tools and "tools" not in self.variables:
            self.lost = [*self.lost, LostPart(0, TOOLS, ", ".join(map(_name_tool, sample.tools)))]
        if any(name not in self.variables for name in sample.settings):
            self.counts = {**self.counts, "unread variables": 1}
        fields = Counter(name for message in sample.messages for name in message if self._is_unread(name))
        self.counts |= {f"unread field {name}": number for name, number in fields.items()}
        encoded = [self._encode_text(text, has_mask=choice.answers_only) for text in rendered.texts]
        documents = [(ids, flags) for ids, flags, _ in encoded]
        shown = sum(len(ids) for ids, _ in documents)
        if rendered.unsplit:
            ends = encoded[0][2][:, 1]
            begins = [int((ends <= cut).sum()) for cut, _ in rendered.unsplit]
            split = [
                begin + len(self.encode_long(rest)[0])
                for begin, (_, rest) in zip(begins, rendered.unsplit, strict=True)
            ]
            _, repeated = join_branches(split, lambda stem, other: min(begins[stem], begins[other]), sum(split))
            more = {"split tokens": sum(split), "split from": shown, "repeated tokens": sum(repeated)}
            self.counts = {**self.counts, **more}
        whole = len(self.encode_long(rendered.whole)[0]) if rendered.whole else shown
        self.counts = {**self.counts, "shown tokens": shown, "whole tokens": whole}
        return documents

    def _is_unread(self, name: str) -> bool:
        """Whether neither this tool nor the template reads a field of messages."""
        if name not in self._unread:
            is_named = re.search(rf"\b{re.escape(name)}\b", get_template(self.tokenizer))
            self._unread[name] = name not in READ_KEYS and not is_named
        return self._unread[name]

    def _encode_text(self, chat: ChatText, *, has_mask: bool) -> tuple[Ids, Flags | None, Bounds]:
        if not has_mask and self.backend is None:
            ids = np.asarray(self.tokenizer(chat.text, add_special_tokens=False)["input_ids"], self.dtype)
            return ids, None, np.empty((0, 2), np.int64)
        ids, bounds = self._encode_bounds(chat.text)
        flags = _mark(bounds, chat.classes)
        for end in chat.turn_ends:
            at = int(np.searchsorted(bounds[:, 0], end))
            if at < len(ids) and bounds[at, 0] == end:
                flags[at] |= TURN
        return ids, flags, bounds

    def _check_chat(self, chat: Chat, choice: TargetChoice) -> None:
        if any(flag is not None for flag in chat.flags) and not choice.answers_only:
            turn = next(at for at, flag in enumerate(chat.flags, 1) if flag is not None)
            remedy = f"set data.assistant_only_loss: true, or write {SOURCE}.train_field: none to ignore that"
            raise BadRow(f"turn {turn} says whether it is a target, but every token of a chat is learned", remedy)
        off = next((name for name in THINKING_SWITCHES if chat.settings.get(name) is False), None)
        if off and choice.thoughts == "train" and count_thoughts(chat.messages[chat.first_target :]):
            remedy = "set data.thoughts: drop to leave that out"
            raise BadRow(f"the assistant thinks, but {off} is false for this chat", remedy)

    def _check_end_marks(self, chat: Chat, texts: Sequence[ChatText]) -> None:
        """A special token that ends turns is read as one wherever it stands: in what a user says, in a call, too."""
        shown = {text.text[max(0, end - END_CHARS) : end].rstrip() for text in texts for end in text.turn_ends}
        marks = {end for end in self.ends for text in shown if end and text.endswith(end)}
        marks |= {*self.stops, *([str(self.tokenizer.eos_token)] if self.tokenizer.eos_token else ())}
        places = [
            (f"turn {turn} holds {{}} in its {name}", message.get(key))
            for turn, message in enumerate(chat.messages, 1)
            for key, name in SAID_KEYS.items()
        ]
        places += [("the column `tools` holds {}", chat.tools), ("a variable of its template holds {}", chat.settings)]
        for place, value in places:
            held = next((mark for words in _walk_words(value) for mark in marks if mark in words), None)
            if held is not None:
                raise BadRow(f"{place.format(held)}, which the tokenizer reads as the end of a turn")

    def _encode_bounds(self, text: str) -> tuple[Ids, Bounds]:
        if self.backend is None:
            raise BadRow(f"a loss mask needs token offsets, which the tokenizer does not give: {self.rule.reason}")
        return self.encode_long(text, with_bounds=True)

    def _add_specials(self, ids: Ids) -> Ids:
        if self.prefix or self.suffix:
            ids = np.concatenate([np.asarray(self.prefix, self.dtype), ids, np.asarray(self.suffix, self.dtype)])
        return self._append_eos(ids)

    def _append_eos(self, ids: Ids) -> Ids:
        if self.eos is None or (len(ids) and ids[-1] == self.eos):
            return ids
        return np.append(ids, np.asarray([self.eos], self.dtype))


def _mark(bounds: Bounds, classes: Sequence[tuple[int, int, int]]) -> Flags:
    """A token has the flags of each span of which it holds a character."""
    flags = np.zeros(len(bounds), np.uint8)
    starts, stops = bounds[:, 0], bounds[:, 1]
    stops = np.maximum(stops, starts + 1)  # a token without characters counts as one
    is_ordered = bool((np.diff(starts) >= 0).all() and (np.diff(stops) >= 0).all())
    for first, last, bits in classes:
        if is_ordered:
            flags[np.searchsorted(stops, first, "right") : np.searchsorted(starts, last, "left")] |= np.uint8(bits)
        else:
            flags[(starts < last) & (stops > first)] |= np.uint8(bits)
    return flags


def _walk_words(value: Any) -> Iterator[str]:
    """All texts within a value, names of mappings too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _walk_words(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _walk_words(item)


def _name_tool(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    return str(function.get("name") if isinstance(function, dict) else function)


def _keep_offsets(part: Any) -> None:
    """Turns off trim_offsets: white space counts to the token that holds it."""
    if isinstance(part, dict):
        if "trim_offsets" in part:
            part["trim_offsets"] = False
        for value in part.values():
            _keep_offsets(value)
    elif isinstance(part, list):
        for value in part:
            _keep_offsets(value)
