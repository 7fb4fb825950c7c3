"""Remembers what a tokenizer decides, by the content of its files: to load it imports libraries for seconds.

What is remembered was computed from the loaded tokenizer. Where its files cannot be named, it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ulysses_cli.data.sources.fingerprint import FileHashes, hash_parts
from ulysses_cli.data.tokenizing.tokenizer import BYTES_TEMPLATE, load_tokenizer, read_stop_tokens
from ulysses_cli.plan.files.whole_files import write_whole
from ulysses_cli.plan.models.chat_template import CLOCK, DATE, read_template
from ulysses_cli.plan.recipe.data_section import Data
from ulysses_cli.plan.recipe.recipe import Model

FORMAT = 3
PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "additional_chat_templates/*")
CONFIGS = ("generation_config.json", "config.json")
LIBRARIES = ("transformers", "tokenizers")
MAX_KNOWN = 100  # tokenizers in the file


class KnownTokenizer:
    """A tokenizer that is loaded when something is asked of it that is not known yet. `file` remembers."""

    def __init__(self, model: Model, data: Data, hashes: FileHashes, file: Path) -> None:
        self.model, self.data, self.file = model, data, file
        self.key = _compute_key(model, data, hashes)
        self._all = _read(file)
        known = self._all.get(self.key, {}) if self.key else {}
        self._facts: dict[str, Any] = dict(known.get("facts", {}))
        self._texts: dict[str, str] = dict(known.get("texts", {}))
        self._used: dict[str, str] = {}

    @cached_property
    def loaded(self) -> Any:
        return load_tokenizer(self.model, self.data)

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """Tokens at which the model stops besides the one that ends a text."""
        return read_stop_tokens(self.model.name_or_path, self.model.revision, self.loaded)

    @property
    def hash(self) -> str:
        """A hash of everything in the tokenizer that decides tokens, and of the model's stop tokens."""
        return str(self._get("hash"))

    @property
    def pad_id(self) -> int:
        return int(self._get("pad_id"))

    def _get(self, name: str) -> Any:
        if name not in self._facts:
            ids = (self.loaded.pad_token_id, self.loaded.eos_token_id)
            pad_id = next((token for token in ids if token is not None), 0)
            self._facts = {"hash": hash_parts(hash_tokenizer(self.loaded), self.stops), "pad_id": pad_id}
        return self._facts[name]

    def decode(self, ids: NDArray[Any]) -> str:
        name = hashlib.sha256(ids.astype("int64").tobytes()).hexdigest()
        if name not in self._texts:
            self._texts[name] = self.loaded.decode(ids.tolist())
        self._used[name] = self._texts[name]
        return self._texts[name]

    def save(self) -> None:
        """Remembers what was asked of it this time. Ignores errors: that only saves time."""
        if self.key is None or self._all.get(self.key) == {"facts": self._facts, "texts": self._used}:
            return
        others = {key: known for key, known in self._all.items() if key != self.key}
        kept = dict(list(others.items())[-MAX_KNOWN:])
        with suppress(OSError):
            write_whole(self.file, json.dumps({**kept, self.key: {"facts": self._facts, "texts": self._used}}))


def hash_tokenizer(tokenizer: Any) -> str:
    """Of vocabulary, rules, special tokens and chat template."""
    backend = ""
    if getattr(tokenizer, "is_fast", False):
        spec = json.loads(tokenizer.backend_tokenizer.to_str())
        backend = json.dumps({**spec, "truncation": None, "padding": None}, sort_keys=True)
    else:
        backend = json.dumps([type(tokenizer).__name__, tokenizer.get_vocab()], sort_keys=True)
    dates = [DATE] if CLOCK in str(tokenizer.chat_template) else []
    return hash_parts(backend, tokenizer.chat_template, tokenizer.special_tokens_map, len(tokenizer), *dates)


def _compute_key(model: Model, data: Data, hashes: FileHashes) -> str | None:
    """Of all that makes the tokenizer: its files, the recipe's settings, the libraries. None where code of the model
    may decide, or where its files are not here."""
    if model.trust_remote_code:
        return None
    name = model.tokenizer or model.name_or_path
    template = None if data.chat_template is None else read_template(data.chat_template).text
    parts: tuple[Any, ...] = (FORMAT, template, data.added_tokens, [version(library) for library in LIBRARIES])
    if name == "bytes":
        return hash_parts(*parts, BYTES_TEMPLATE)
    folder = None if name is None else _find_folder(name, None if model.tokenizer else model.revision)
    if folder is None:
        return None
    try:
        files = sorted({file for pattern in PATTERNS for file in folder.glob(pattern) if file.is_file()})
        if model.tokenizer and model.name_or_path:  # its stop tokens count, too
            own = _find_folder(model.name_or_path, model.revision)
            configs = [own / name for name in CONFIGS if (own / name).is_file()] if own else []
            parts = (*parts, [hashes.hash_file(file) for file in configs])
        return hash_parts(*parts, [(file.relative_to(folder).as_posix(), hashes.hash_file(file)) for file in files])
    except OSError:
        return None


def _find_folder(name: str, revision: str | None) -> Path | None:
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError):  # no name that the hub could have
        for file in ("tokenizer_config.json", "tokenizer.json", *CONFIGS):
            found = try_to_load_from_cache(name, file, revision=revision)
            if isinstance(found, str):
                return Path(found).parent
    return None


def _read(file: Path) -> dict[str, Any]:
    """What the file remembers, without what is damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return dict(_walk_sound(content)) if isinstance(content, dict) else {}


def _walk_sound(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, known in content.items():
        facts, texts = (known.get(name) if isinstance(known, dict) else None for name in ("facts", "texts"))
        is_sound = isinstance(facts, dict) and isinstance(facts.get("hash"), str) and type(facts.get("pad_id")) is int
        if is_sound and isinstance(texts, dict) and all(isinstance(text, str) for text in texts.values()):
            yield key, known
