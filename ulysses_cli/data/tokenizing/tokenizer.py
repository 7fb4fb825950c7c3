"""Loads the tokenizer of a recipe's model, or makes the built-in one whose tokens are bytes. Remembers what a
tokenizer decides, by the content of its files: to load it imports libraries for seconds.

What is remembered was computed from the loaded tokenizer. Where its files cannot be named, it is loaded."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ulysses_cli.data.sources import explain_absence, find_obstacle
from ulysses_cli.data.transaction import FileHashes, hash_parts
from ulysses_cli.plan.files import read_regular, write_whole
from ulysses_cli.plan.models.model_files import (
    BYTE_SPECIALS,
    CLOCK,
    DATE,
    OUR_VARIABLES,
    SHIPPED,
    explain_markers,
    find_missing_markers,
    list_letters,
    read_template,
)
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.recipe import Model
from ulysses_cli.plan.recipe.sections import Data

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "merges.txt", "special_tokens_map.json")
MAX_GROWTH = 100  # Unicode's own longest is 18
SPEC, MAX_SPEC_BYTES = "tokenizer.json", 1 << 28
VARIABLES = "chat_template_kwargs"  # in tokenizer_config.json, as in a recipe
BEGIN, END, PADDING = BYTE_SPECIALS
BYTES_TEMPLATE = (
    "{% for message in messages %}{{ '<|begin|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant\\n' }}{% endif %}"
)


def load_tokenizer(model: Model, data: Data | None = None, *, is_finished: bool = False) -> Any:
    """A transformers tokenizer, with the added tokens and the chat template of `data`. `is_finished`: the model is used
    as it was trained, with the template's variables of that training. Raises RecipeError when it cannot be loaded."""
    tokenizer = _load(model)
    if data is not None:
        _apply_settings(tokenizer, data, name_tokenizer(model))
        if not is_finished:  # the base's own say nothing of this training
            tokenizer.init_kwargs.pop(VARIABLES, None)
        if data.chat_template_kwargs:
            tokenizer.init_kwargs[VARIABLES] = dict(data.chat_template_kwargs)
    return tokenizer


def get_variables(tokenizer: Any) -> dict[str, Any]:
    """The variables with which a model's chats were rendered in training. They are saved with the tokenizer."""
    found = getattr(tokenizer, "init_kwargs", {}).get(VARIABLES)
    return (
        {name: value for name, value in found.items() if name not in OUR_VARIABLES} if isinstance(found, dict) else {}
    )


def _check_growth(normalizer: Any, key: str, name: str) -> None:
    """Refuses a normalizer that makes thousands of characters of one: its replacements multiply, and one short row
    would take all memory. `normalizer`: its part of tokenizer.json."""
    try:
        growth = _count_growth(normalizer or {})
    except (LookupError, TypeError, ValueError, AttributeError):
        return  # the library says what is wrong with it
    if growth > MAX_GROWTH:
        message = f"the tokenizer of {name} makes up to {growth:,} characters of one before it tokenizes"
        hint = "name another tokenizer, or mend the normalizer in its tokenizer.json"
        raise RecipeError([Problem(key, message, hint)])


def _count_growth(step: dict[str, Any]) -> int:
    if step.get("type") == "Sequence":
        return math.prod(map(_count_growth, step.get("normalizers", ())))
    if step.get("type") == "Replace":
        pattern = step["pattern"].get("String", "")  # a regular expression may match a single character, or none
        return max(1, -(-len(step["content"]) // max(1, len(pattern)))) + (0 if pattern else 1)
    if step.get("type") == "Precompiled":  # the size of a trie, the trie, and what its entries become
        table = base64.b64decode(step["precompiled_charsmap"])
        texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
        return max(1, *(len(text.decode(errors="replace")) for text in texts))
    return 1


def list_stop_tokens(tokenizer: Any, model: Any) -> set[int]:
    """Tokens at which an answer ends: the one that ends a document, those that end a turn in a known chat template, as
    far as the tokenizer has them, and those of the model's generation config."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = {tokenizer.eos_token_id, *(named if isinstance(named, list | tuple) else [named])}
    turns = {tokenizer.convert_tokens_to_ids(shipped.end) for shipped in SHIPPED.values() if shipped.end}
    found |= turns - {tokenizer.unk_token_id}
    return {token for token in found if isinstance(token, int)}


def read_stop_tokens(name: str | None, revision: str | None, tokenizer: Any) -> tuple[str, ...]:
    """The tokens at which the model stops besides the one that ends a text, by its generation config, or else by its
    config. Of a folder or of the hub's cache; asks the hub for what is not there."""
    for file in ("generation_config.json", "config.json") if name else ():
        try:
            named = json.loads(read_regular(_find_file(str(name), file, revision), MAX_SPEC_BYTES))["eos_token_id"]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            continue
        known = getattr(tokenizer, "added_tokens_decoder", {})
        stops = [str(known[token]) for token in (named if isinstance(named, list) else [named]) if token in known]
        return tuple(sorted({*stops} - {str(tokenizer.eos_token)}))
    return ()


def _find_file(name: str, file: str, revision: str | None) -> str:
    """Raises OSError where there is none."""
    from transformers.utils import cached_file

    local = os.path.expanduser(name)
    if os.path.isdir(local):
        return os.path.join(local, file)
    choice: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    found = cached_file(name, file, local_files_only=True, _raise_exceptions_for_connection_errors=False, **choice)
    if found is None and not find_obstacle():
        found = cached_file(name, file, **choice)
    if found is None:
        raise FileNotFoundError(file)
    return str(found)


def get_template(tokenizer: Any) -> str:
    """The chat template's text; '' without one. Of several, the one for chats with tools."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return str(template.get("tool_use") or template.get("default") or "") if isinstance(template, dict) else template


def name_tokenizer(model: Model) -> str:
    return str(model.tokenizer or model.name_or_path)


def _apply_settings(tokenizer: Any, data: Data, name: str) -> None:
    from transformers import AddedToken

    added = [AddedToken(token, special=True, normalized=False) for token in data.added_tokens]
    tokenizer.add_tokens(added, special_tokens=True)
    if data.chat_template is None:
        return
    template = read_template(data.chat_template)
    missing = find_missing_markers(template, tokenizer.get_vocab())
    if missing:
        raise RecipeError([explain_markers(template, missing, data.added_tokens, name)])
    tokenizer.chat_template = template.text


def _load(model: Model) -> Any:
    name = model.tokenizer or model.name_or_path
    if name == "bytes":
        return make_bytes_tokenizer()
    if name is None:
        raise RecipeError([Problem("model.tokenizer", "no tokenizer is named", "write tokenizer: bytes")])
    from transformers import AutoTokenizer

    key = "model.tokenizer" if model.tokenizer else "model.name_or_path"
    local = os.path.expanduser(name)
    source = local if os.path.isdir(local) else name
    revision = None if model.tokenizer else model.revision
    choice: dict[str, Any] = {
        "revision": revision,
        "trust_remote_code": model.trust_remote_code,
    }
    _check_growth(_read_normalizer(source, revision), key, name)  # adding tokens at loading uses it already
    try:
        try:  # the cache first: the model's shape comes from it too, so both are of one revision; and no network
            return AutoTokenizer.from_pretrained(source, local_files_only=True, **choice)
        except (OSError, ValueError):
            obstacle = "" if _is_here(source) else find_obstacle()
            if obstacle:
                absence = explain_absence(key, f"the tokenizer of {name}", obstacle, name)
                raise RecipeError([absence]) from None
            tokenizer = AutoTokenizer.from_pretrained(source, **choice)
            _check_growth(_read_normalizer(source, revision), key, name)
            return tokenizer
    except RecipeError:
        raise
    except Exception as error:  # noqa: BLE001 - the library raises many kinds; the user needs a place and a remedy
        raise RecipeError([_explain(error, key, name, Path(source))]) from None


def _read_normalizer(source: str, revision: str | None) -> Any:
    """Of the tokenizer.json in a folder or in the hub's cache; None where there is none that can be read."""
    from huggingface_hub import try_to_load_from_cache

    is_folder = os.path.isdir(source)
    file = Path(source, SPEC) if is_folder else try_to_load_from_cache(source, SPEC, revision=revision)
    try:
        return json.loads(read_regular(file, MAX_SPEC_BYTES))["normalizer"] if isinstance(file, str | Path) else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _explain(error: Exception, key: str, name: str, folder: Path) -> Problem:
    if folder.is_dir():
        files = [file for pattern in TOKENIZER_FILES for file in sorted(folder.glob(pattern))]
        if not files:
            return Problem(key, f"{name} holds no tokenizer.json", "name a folder with the files of a tokenizer")
        for file in files:
            if file.suffix == ".json" and (damage := _find_damage(file)):
                return Problem(key, f"{file} is not valid JSON: {damage}", "copy the tokenizer's files again")
        if damage := _find_config_damage(folder):  # the library reads it to choose the tokenizer's class
            message = f"{folder / 'config.json'} cannot be used: {damage}"
            return Problem(key, message, "mend that value, or copy the model's folder again")
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    hint = "name a folder with tokenizer.json, or set HF_TOKEN for a private model"
    return Problem(key, f"the tokenizer of {name} cannot be loaded: {reason.rstrip(':')}", hint)


def _find_damage(file: Path) -> str:
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return str(error)
    return ""


def _find_config_damage(folder: Path) -> str:
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        return ""
    try:
        AutoConfig.from_pretrained(folder)
    except Exception as error:  # noqa: BLE001 - the library raises many kinds
        return " ".join(line.strip() for line in str(error).splitlines() if line.strip())[:200] or type(error).__name__
    return ""


def _is_here(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return os.path.isdir(name) or isinstance(try_to_load_from_cache(name, "tokenizer_config.json"), str)


def make_bytes_tokenizer() -> Any:
    """Ids 0-255 are bytes, then begin, end and padding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = list_letters()
    backend = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BEGIN, END, PADDING])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PADDING,
        chat_template=BYTES_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


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
    try:
        if model.tokenizer and model.name_or_path:  # its stop tokens count, too
            own = _find_folder(model.name_or_path, model.revision)
            configs = [own / name for name in CONFIGS if (own / name).is_file()] if own else []
            parts = (*parts, [hashes.hash_file(file) for file in configs])
        if name == "bytes":
            return hash_parts(*parts, BYTES_TEMPLATE)
        folder = None if name is None else _find_folder(name, None if model.tokenizer else model.revision)
        if folder is None:
            return None
        files = sorted({file for pattern in PATTERNS for file in folder.glob(pattern) if file.is_file()})
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
