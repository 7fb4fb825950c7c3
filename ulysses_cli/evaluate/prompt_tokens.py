"""A tokenizer for prompts of many thousand words, most of which come again: tokens are remembered word by word where
that gives the same tokens as the whole text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

MAX_REMEMBERED = 300_000  # parts of texts
CHARACTERS_PER_NEW = 40  # of a text, for each new part: with fewer, the whole is tokenized as quickly


class PromptTokenizer:
    """`tokenizer`: one of transformers'. `letters`: those between which and a space it always parts the text; without
    any, words are remembered for a count alone, and each prompt's tokens are those of its whole text."""

    def __init__(self, tokenizer: Any, letters: str = "") -> None:
        self.tokenizer = tokenizer
        self._fast: Any = getattr(tokenizer, "_tokenizer", None)  # of the tokenizers library
        # begins with the space, which is found quickly
        self._cut = re.compile(f" (?<=[{letters}] )") if letters else None
        # tokens of a space and these characters: of the text's own parts, and of its words for an estimate
        self._known: dict[str, list[int]] = {}
        self._counted: dict[str, list[int]] = {}
        self._specials: tuple[list[int], list[int]] | None = None
        if self._cut is not None:
            bare, whole = (self.tokenize(["a"], adds)[0] for adds in (False, True))
            at = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), None)
            if at is None:
                self.read_whole()
            else:
                self._specials = whole[:at], whole[at + len(bare) :]

    @property
    def is_exact(self) -> bool:
        """Whether words have the tokens of the whole text."""
        return self._cut is not None

    def read_whole(self) -> None:
        """From now on each prompt's tokens are those of its whole text."""
        self._cut = None
        self._known.clear()

    def tokenize(self, texts: Sequence[str], adds_special: bool) -> list[list[int]]:
        """The tokens of each text, as a whole."""
        if self._fast is None:
            return [list(self.tokenizer(text, add_special_tokens=adds_special)["input_ids"]) for text in texts]
        # without offsets, which take as long as the tokens
        found = self._fast.encode_batch_fast(list(texts), add_special_tokens=adds_special)
        return [each.ids for each in found]

    def encode(self, text: str, adds_special: bool) -> list[int]:
        """The tokens of a long text."""
        words = self._cut_words(text)
        if words is None or self._specials is None:
            return self.tokenize([text], adds_special)[0]
        before, after = self._specials if adds_special else ([], [])
        first = self.tokenize(words[:1], False)[0]
        return [*before, *first, *chain.from_iterable(map(self._known.__getitem__, words[1:])), *after]

    def has_words(self, text: str) -> bool:
        """Whether `encode` joins the text's tokens from those of its words."""
        return self._cut_words(text) is not None

    def count(self, text: str) -> int:
        """Counts a text's tokens, without special ones. An estimate where it counts word by word: not every tokenizer
        parts the text before each space."""
        words, sizes = self._cut_words(text), self._known
        if words is None:
            words, sizes = text.split(" "), self._remember(text.split(" ")[1:], self._counted)
        return len(self.tokenize(words[:1], False)[0]) + sum(map(len, map(sizes.__getitem__, words[1:])))

    def _cut_words(self, text: str) -> list[str] | None:
        """Cuts a text where its tokens part, and remembers the parts' tokens. None where they are not known to part, or
        where so many parts are new that the whole text is read as quickly."""
        if self._cut is None:
            return None
        words = self._cut.split(text)
        num_new = len(set(words[1:]).difference(self._known))
        if num_new * CHARACTERS_PER_NEW > len(text):
            return None
        self._remember(words[1:], self._known)
        return words

    def _remember(self, words: Sequence[str], known: dict[str, list[int]]) -> dict[str, list[int]]:
        """Adds the tokens of each word, with a space before it, to what is known."""
        if len(known) > MAX_REMEMBERED:
            known.clear()
        if new := list(set(words).difference(known)):
            known.update(zip(new, self.tokenize([f" {word}" for word in new], False), strict=True))
        return known
