"""Encodes samples as token ids and flags, with the tokenizer's own backend. Gives the same result in every process.

Tokenizes a long text in pieces where that is proven to give the same tokens; otherwise whole, and keeps the reason.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulysses_cli.data.store import TARGET, TURN, Flags, Ids, choose_dtype
from ulysses_cli.data.tokenizing.chat import InexactTemplate
from ulysses_cli.data.tokenizing.lost_parts import THOUGHT, LostPart
from ulysses_cli.data.tokenizing.pieces import NEIGHBOURHOOD, PIECE_CHARS, CutRule, find_cut_rule
from ulysses_cli.data.tokenizing.renderer import Renderer, RenderRequest, TemplateRefusal
from ulysses_cli.readers.columns import Chat, Completion, PlainText, Sample, Tokens
from ulysses_cli.readers.problems import BadRow, NoTemplate

PIECES_AT_ONCE = 8  # what the library returns of a piece takes about 150 bytes per token
Bounds = NDArray[np.signedinteger[Any]]  # [tokens, 2]: first character and one past the last


@dataclass(frozen=True)
class EncoderSettings:
    assistant_only_loss: bool = False
    completion_only_loss: bool = True


@dataclass
class Encoder:
    """A tokenizer with the facts derived from it. Counts the long texts encoded in pieces and whole. `lost`: what the
    assistant said in the last chat and the template does not show."""

    tokenizer: Any
    settings: EncoderSettings = field(default_factory=EncoderSettings)
    num_in_pieces: int = 0
    num_whole: int = 0

    def __post_init__(self) -> None:
        self.dtype = choose_dtype(len(self.tokenizer))
        self.eos: int | None = self.tokenizer.eos_token_id
        self.lost: list[LostPart] = []
        self._announced: dict[int, tuple[Chat, RenderRequest]] = {}  # by id()
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
            self.num_whole += sum(len(text) > 2 * PIECE_CHARS for text in texts)
            return [self._append_eos(np.asarray(self.tokenizer(text)["input_ids"], self.dtype)) for text in texts]
        short = [text for text in texts if len(text) <= 2 * PIECE_CHARS]
        encodings = iter(self.backend.encode_batch_fast(short, add_special_tokens=False))
        documents = []
        for text in texts:
            if len(text) <= 2 * PIECE_CHARS:
                ids = np.asarray(next(encodings).ids, self.dtype)
            else:
                ids = self.encode_long(text)[0]
            documents.append(self._add_specials(ids))
        return documents

    def encode_long(self, text: str, *, with_bounds: bool = False) -> tuple[Ids, Bounds]:
        """Encodes one text without special tokens, in pieces where the cut rule allows that."""
        cuts = self._find_cuts(text) if len(text) > 2 * PIECE_CHARS else []
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
        cuts = [at for at in self.rule.find_cuts(text) if self._is_exact(text, at)]
        self.num_in_pieces += bool(cuts)
        self.num_whole += not cuts
        return cuts

    def _is_exact(self, text: str, at: int) -> bool:
        left, right = text[max(0, at - NEIGHBOURHOOD) : at], text[at : at + NEIGHBOURHOOD]
        parts = self.continuation.encode_batch_fast([left + right, left, right], add_special_tokens=False)
        whole, *halves = (encoding.ids for encoding in parts)
        return bool(whole == halves[0] + halves[1])

    def encode(self, sample: Sample) -> tuple[Ids, Flags | None]:
        """Token ids and flags. Flags None: every token is a target."""
        self.lost = []
        if isinstance(sample, PlainText):
            return self.encode_texts([sample.text])[0], None
        if isinstance(sample, Tokens):
            return self._encode_tokens(sample)
        if isinstance(sample, Completion):
            return self._encode_completion(sample)
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
        flags = _mark(bounds, [(len(sample.prompt), len(text))])
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
        return RenderRequest(list(chat.messages), chat.tools, self.marks_answers and self._trains_answers_only(chat))

    def _trains_answers_only(self, chat: Chat) -> bool:
        return self.settings.completion_only_loss if chat.is_completion else self.settings.assistant_only_loss

    def _encode_chat(self, sample: Chat) -> tuple[Ids, Flags | None]:
        if not self.has_template:
            raise NoTemplate
        answers_only = self._trains_answers_only(sample)
        try:
            _, request = self._announced.get(id(sample)) or (sample, self._make_request(sample))
            rendered = self.renderer.render(request)
        except TemplateRefusal as error:
            raise BadRow(f"the chat template refuses this chat: {error}") from None
        text, answers = rendered.text, rendered.answers
        if not text:
            raise BadRow("the chat template renders this chat as an empty text")
        if rendered.inexact_reason and answers_only and not self.marks_answers:
            raise InexactTemplate(rendered.inexact_reason)
        # the prompt of a completion is no target: a template leaves out its thoughts when it asks the model, too
        first = sample.first_target if answers_only else 0
        self.lost = [part for part in rendered.lost if part.kind != THOUGHT or part.turn >= first]
        if not answers_only and self.backend is None:
            return np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], self.dtype), None
        if answers_only and self.marks_answers:
            text, answers = rendered.marked
        if answers_only and (first or self.lost):
            answers = self._choose_answers(sample, text, answers, first)
        ids, bounds = self._encode_bounds(text)
        flags = _mark(bounds, answers) if answers_only else np.full(len(ids), TARGET, np.uint8)
        for end in rendered.turn_ends:
            at = int(np.searchsorted(bounds[:, 0], end))
            if at < len(ids) and bounds[at, 0] == end:
                flags[at] |= TURN
        return ids, flags

    def _choose_answers(
        self, sample: Chat, text: str, answers: list[tuple[int, int]], first: int
    ) -> list[tuple[int, int]]:
        """Those from message `first` on. An answer of which the template shows the end mark alone is no target: the
        model would learn to say nothing."""
        turns = [at for at, message in enumerate(sample.messages) if message["role"] == "assistant"]
        if len(turns) != len(answers):
            if not first:
                return answers
            raise InexactTemplate(f"the chat template marks {len(answers)} answers where there are {len(turns)}")
        lost = {part.turn for part in self.lost}
        return [
            (start, stop)
            for turn, (start, stop) in zip(turns, answers, strict=True)
            if turn >= first and not (turn in lost and self._is_bare(text[start:stop]))
        ]

    def _is_bare(self, text: str) -> bool:
        for special in self.specials:
            text = text.replace(special, "")
        return not text.strip()

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


def _mark(bounds: Bounds, spans: Sequence[tuple[int, int]]) -> Flags:
    """A token is a target when it holds at least one character of a span."""
    flags = np.zeros(len(bounds), np.uint8)
    starts, stops = bounds[:, 0], bounds[:, 1]
    stops = np.maximum(stops, starts + 1)  # a token without characters counts as one
    if (np.diff(starts) >= 0).all() and (np.diff(stops) >= 0).all():
        for first, last in spans:
            flags[np.searchsorted(stops, first, "right") : np.searchsorted(starts, last, "left")] = TARGET
        return flags
    for first, last in spans:
        flags[(starts < last) & (stops > first)] = TARGET
    return flags


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
