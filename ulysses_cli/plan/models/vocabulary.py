"""Reads a tokenizer's files without transformers, and decides how many rows the embedding needs for added tokens.

Only compute_vocab_size decides that number, before a run and on its ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulysses_cli.plan.files.regular_files import read_regular
from ulysses_cli.plan.models.shape import TEXT_PARTS

MAX_FILE_BYTES = 256 << 20
BYTE_SPECIALS = ("<|begin|>", "<|end|>", "<|padding|>")  # of the embedded tokenizer, after its 256 bytes


@dataclass(frozen=True)
class Vocabulary:
    """Tokens with their ids. `next_id`: the id of the first token that is added."""

    ids: Mapping[str, int]
    next_id: int

    def list_ids(self, added: Sequence[str]) -> list[int]:
        """The id of each added token: its own if the vocabulary has it, else the next free one."""
        ids = dict(self.ids)
        next_id = self.next_id
        for token in added:
            if token not in ids:
                ids[token] = next_id
                next_id += 1
        return [ids[token] for token in added]


@dataclass(frozen=True)
class TokenizerFacts:
    """`vocabulary`: None if no file has it."""

    name: str
    has_template: bool
    vocabulary: Vocabulary | None


def compute_vocab_size(config_size: int, added_ids: Iterable[int]) -> int:
    """Rows of the embedding: the model's own, and more only where an added token's id is beyond them."""
    return max([config_size, *(token + 1 for token in added_ids)])


def predict_vocab_size(config_size: int, added: Sequence[str], tokenizer: TokenizerFacts | None) -> int:
    """The same from files alone. With an unknown vocabulary each token counts as new and no row as free."""
    vocabulary = tokenizer.vocabulary if tokenizer else None
    ids = vocabulary.list_ids(added) if vocabulary else range(config_size, config_size + len(added))
    return compute_vocab_size(config_size, ids)


def grow_config(config: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """config.json's content with another vocab_size, in the part that holds it."""
    for part in TEXT_PARTS:
        if isinstance(config.get(part), Mapping):
            return {**config, part: {**config[part], "vocab_size": vocab_size}}
    return {**config, "vocab_size": vocab_size}


def list_letters() -> list[str]:
    """By byte, the visible letter that byte-level tokenizers write for it: itself, or the next unused one from 256."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]


def describe_bytes() -> TokenizerFacts:
    """The embedded tokenizer."""
    tokens = [*list_letters(), *BYTE_SPECIALS]
    return TokenizerFacts("bytes", True, Vocabulary({token: at for at, token in enumerate(tokens)}, len(tokens)))


def read_tokenizer(folder: Path, name: str) -> TokenizerFacts | None:
    """None where the folder holds no tokenizer."""
    settings, backend = _read_json(folder / "tokenizer_config.json"), _read_json(folder / "tokenizer.json")
    if settings is None and backend is None:
        return None
    settings = settings or {}
    files = ("chat_template.jinja", "chat_template.json")
    has_template = bool(settings.get("chat_template")) or any((folder / file).is_file() for file in files)
    return TokenizerFacts(name, has_template, _read_vocabulary(backend or {}, settings))


def _read_vocabulary(backend: Mapping[str, Any], settings: Mapping[str, Any]) -> Vocabulary | None:
    """Numbers tokens as the tokenizers library does: those of the model, then those that were added."""
    try:
        words = backend["model"]["vocab"]
        if isinstance(words, list):  # Unigram: pieces in the order of their ids
            words = {piece: at for at, (piece, _) in enumerate(words)}
        added = {token["content"]: int(token["id"]) for token in backend.get("added_tokens") or ()}
        for number, token in (settings.get("added_tokens_decoder") or {}).items():
            added.setdefault(token["content"], int(number))
        ids = {**words, **added}
        return Vocabulary(ids, max([len(words), *(number + 1 for number in added.values())]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _read_json(file: Path) -> dict[str, Any] | None:
    """None if the file is missing or cannot be read; loading the tokenizer later reports the reason."""
    try:
        content = json.loads(read_regular(file, MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
