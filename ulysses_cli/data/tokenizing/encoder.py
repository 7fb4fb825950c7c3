"""Samples -> token ids and flags, by the tokenizer's own backend. Works the same in every process.

Long texts go in pieces where that is proven to change nothing; otherwise whole, and the reason is kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulysses_cli.data.problems import BadRow, NoTemplate
from ulysses_cli.data.sources.columns import Chat, Completion, PlainText, Sample, Tokens
from ulysses_cli.data.store import TARGET, TURN, Flags, Ids, choose_dtype
from ulysses_cli.data.tokenizing.chat import InexactTemplate
from ulysses_cli.data.tokenizing.pieces import NEIGHBOURHOOD, PIECE_CHARS, CutRule, find_cut_rule
from ulysses_cli.data.tokenizing.renderer import EndlessTemplate, Question, Renderer, TemplateRefusal

Bounds = NDArray[np.int64]  # [tokens, 2]: first character and one past the last


@dataclass(frozen=True)
class EncoderSettings:
    assistant_only_loss: bool = False
    completion_only_loss: bool = True


@dataclass
class Encoder:
    """A tokenizer and what was learned about it."""

    tokenizer: Any
    settings: EncoderSettings = field(default_factory=EncoderSettings)
    num_in_pieces: int = 0
    num_whole: int = 0

    def __post_init__(self) -> None:
        self.dtype = choose_dtype(len(self.tokenizer))
        self.eos: int | None = self.tokenizer.eos_token_id
        self._announced: dict[int, tuple[Chat, Question]] = {}
        self.backend: Any = None
        self.rule = CutRule(reason="it has no fast backend")
        self.prefix: list[int] = []
        self.suffix: list[int] = []
        if getattr(self.tokenizer, "is_fast", False):
            self._read_backend()
        self.specials = sorted(str(token) for token in self.tokenizer.all_special_tokens)
        self.specials += sorted(str(token) for token in getattr(self.tokenizer, "added_tokens_encoder", {}))
        self.renderer = Renderer(self.tokenizer, self.specials)
        template = self.tokenizer.chat_template
        self.has_template = bool(template)
        self.marks_itself = "generation %}" in str(template) or "generation -%}" in str(template)

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
        dressed = self.backend.encode(probe, add_special_tokens=True).ids
        at = next((at for at in range(len(dressed)) if dressed[at : at + len(bare)] == bare), 0)
        self.prefix, self.suffix = dressed[:at], dressed[at + len(bare) :]
        own = list(self.tokenizer(probe)["input_ids"])
        if [*self.prefix, *bare, *self.suffix] != own:
            self.backend = None  # its class does more than its backend
            self.rule = CutRule(reason="its class adds to what its backend does")

    def encode_texts(self, texts: Sequence[str]) -> list[Ids]:
        """Whole documents: what the tokenizer adds at their ends, and an end of text."""
        if self.backend is None:
            found = [np.asarray(self.tokenizer(text)["input_ids"], self.dtype) for text in texts]
            self.num_whole += sum(len(text) > 2 * PIECE_CHARS for text in texts)
            return [self._end(ids) for ids in found]
        short = [text for text in texts if len(text) <= 2 * PIECE_CHARS]
        encodings = iter(self.backend.encode_batch_fast(short, add_special_tokens=False))
        found = []
        for text in texts:
            if len(text) <= 2 * PIECE_CHARS:
                ids = np.asarray(next(encodings).ids, self.dtype)
            else:
                ids = self.encode_long(text)[0]
            found.append(self._dress(ids))
        return found

    def encode_long(self, text: str, *, with_bounds: bool = False) -> tuple[Ids, Bounds]:
        """One text without special tokens, in pieces where that is proven to be the same."""
        cuts = self._find_cuts(text) if len(text) > 2 * PIECE_CHARS else []
        places = [0, *cuts, len(text)]
        parts = [text[first:last] for first, last in pairwise(places)]
        encode = "encode_batch" if with_bounds else "encode_batch_fast"
        encodings = getattr(self.backend, encode)(parts[:1], add_special_tokens=False)
        if cuts:
            encodings += getattr(self.continuation, encode)(parts[1:], add_special_tokens=False)
        ids = np.concatenate([np.asarray(found.ids, self.dtype) for found in encodings])
        if not with_bounds:
            return ids, np.empty((0, 2), np.int64)
        shifted = [
            np.asarray(found.offsets, np.int64).reshape(-1, 2) + place
            for found, place in zip(encodings, places, strict=False)
        ]
        return ids, np.concatenate(shifted)

    def _find_cuts(self, text: str) -> list[int]:
        """Cuts by the rule, each of which also holds in its neighbourhood."""
        cuts = [at for at in self.rule.find_cuts(text) if self._holds(text, at)]
        self.num_in_pieces += bool(cuts)
        self.num_whole += not cuts
        return cuts

    def _holds(self, text: str, at: int) -> bool:
        left, right = text[max(0, at - NEIGHBOURHOOD) : at], text[at : at + NEIGHBOURHOOD]
        parts = self.continuation.encode_batch_fast([left + right, left, right], add_special_tokens=False)
        whole, *halves = (found.ids for found in parts)
        return bool(whole == halves[0] + halves[1])

    def encode(self, sample: Sample) -> tuple[Ids, Flags | None]:
        """Ids and flags; None: every token is a target."""
        if isinstance(sample, PlainText):
            return self.encode_texts([sample.text])[0], None
        if isinstance(sample, Tokens):
            return self._encode_tokens(sample)
        if isinstance(sample, Completion):
            return self._encode_completion(sample)
        return self._encode_chat(sample)

    def _encode_tokens(self, sample: Tokens) -> tuple[Ids, Flags | None]:
        top = max(sample.ids)
        if top >= len(self.tokenizer) or min(sample.ids) < 0:
            wrong = top if top >= len(self.tokenizer) else min(sample.ids)
            raise BadRow(f"input_ids holds {wrong}, but the tokenizer has ids 0 to {len(self.tokenizer) - 1:,}")
        flags = None if sample.targets is None else np.asarray(sample.targets, np.uint8) * np.uint8(TARGET)
        return np.asarray(sample.ids, self.dtype), flags

    def _encode_completion(self, sample: Completion) -> tuple[Ids, Flags | None]:
        text = sample.prompt + sample.completion
        if not self.settings.completion_only_loss:
            return self.encode_texts([text])[0], None
        ids, bounds = self._encode_bounds(text)
        flags = _mark(bounds, [(len(sample.prompt), len(text))])
        ids = self._dress(ids)
        ends = np.full(len(ids) - len(self.prefix) - len(flags), TARGET, np.uint8)
        return ids, np.concatenate([np.zeros(len(self.prefix), np.uint8), flags, ends])

    def announce(self, samples: Sequence[Sample]) -> None:
        """What `encode` will be asked next, in this order: chats among it are shown ahead."""
        chats = [sample for sample in samples if isinstance(sample, Chat) and self.has_template]
        self._announced = {id(chat): (chat, self._make_question(chat)) for chat in chats}  # chats live: ids are theirs
        self.renderer.announce([question for _, question in self._announced.values()])

    def _make_question(self, chat: Chat) -> Question:
        return Question(list(chat.messages), chat.tools, self.marks_itself and self._wants_said_only(chat))

    def _wants_said_only(self, chat: Chat) -> bool:
        return self.settings.completion_only_loss if chat.is_completion else self.settings.assistant_only_loss

    def _encode_chat(self, sample: Chat) -> tuple[Ids, Flags | None]:
        if not self.has_template:
            raise NoTemplate
        only_said = self._wants_said_only(sample)
        try:
            _, question = self._announced.get(id(sample)) or (sample, self._make_question(sample))
            shown = self.renderer.show(question)
        except EndlessTemplate:
            raise
        except TemplateRefusal as error:
            raise BadRow(f"the chat template refuses this chat: {error}") from None
        text, said, ends = shown.text, shown.said, shown.ends
        if not text:
            raise BadRow("the chat template shows nothing of this chat")
        if shown.odd and only_said and not self.marks_itself:
            raise InexactTemplate(shown.odd)
        if not only_said and self.backend is None:
            return np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], self.dtype), None
        if only_said and self.marks_itself:
            text, said = shown.marked
        if only_said and sample.first_target:
            answers = [at for at, message in enumerate(sample.messages) if message["role"] == "assistant"]
            if len(answers) != len(said):
                raise InexactTemplate(f"the chat template marks {len(said)} answers where there are {len(answers)}")
            said = said[sum(at < sample.first_target for at in answers) :]
        ids, bounds = self._encode_bounds(text)
        flags = _mark(bounds, said) if only_said else np.full(len(ids), TARGET, np.uint8)
        for end in ends:
            at = int(np.searchsorted(bounds[:, 0], end))
            if at < len(ids) and bounds[at, 0] == end:
                flags[at] |= TURN
        return ids, flags

    def _encode_bounds(self, text: str) -> tuple[Ids, Bounds]:
        if self.backend is None:
            raise BadRow(f"a loss mask needs a tokenizer that tells where tokens stand; {self.rule.reason}")
        return self.encode_long(text, with_bounds=True)

    def _dress(self, ids: Ids) -> Ids:
        if self.prefix or self.suffix:
            ids = np.concatenate([np.asarray(self.prefix, self.dtype), ids, np.asarray(self.suffix, self.dtype)])
        return self._end(ids)

    def _end(self, ids: Ids) -> Ids:
        if self.eos is None or (len(ids) and ids[-1] == self.eos):
            return ids
        return np.append(ids, np.asarray([self.eos], self.dtype))


def _mark(bounds: Bounds, spans: Sequence[tuple[int, int]]) -> Flags:
    """A token is a target when it holds at least one character of a span."""
    flags = np.zeros(len(bounds), np.uint8)
    starts, stops = bounds[:, 0], bounds[:, 1]
    shown = np.maximum(stops, starts + 1)
    if (np.diff(starts) >= 0).all() and (np.diff(shown) >= 0).all():
        for first, last in spans:
            flags[np.searchsorted(shown, first, "right") : np.searchsorted(starts, last, "left")] = TARGET
        return flags
    for first, last in spans:
        inside = (starts < last) & (shown > first)
        flags[inside] = TARGET
    return flags


def _keep_offsets(part: Any) -> None:
    """White space belongs to the token that holds it."""
    if isinstance(part, dict):
        if "trim_offsets" in part:
            part["trim_offsets"] = False
        for value in part.values():
            _keep_offsets(value)
    elif isinstance(part, list):
        for value in part:
            _keep_offsets(value)
