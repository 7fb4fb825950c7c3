"""Reads the files of a model folder without transformers: the headers of its weights (safetensors: 8 bytes with the
header's length, the header, the tensors one after another), its tokenizer and its chat template; and decides how
many rows the embedding needs for added tokens. Only compute_vocab_size decides that number, before a run and on its
ranks. Neither compiles nor renders a template: Jinja computes its constants when it compiles, without any bound."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json
from typing_extensions import TypedDict

from ulysses_cli.plan.files import open_regular, read_regular
from ulysses_cli.plan.models.shape import TEXT_PARTS
from ulysses_cli.plan.problem import Problem, RecipeError

if TYPE_CHECKING:
    from jinja2 import Environment, nodes


INDEX = "model.safetensors.index.json"
FLOATS = {"F64", "F32", "F16", "BF16"}
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 32 << 20  # a hundred thousand tensors have ten million
SHOWN_CHARS = 120
Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Tensor(TypedDict):
    """Other keys are allowed and ignored."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]
    dtype: str
    shape: list[Count]
    data_offsets: Annotated[list[Count], Field(min_length=2, max_length=2)]


class _Index(BaseModel):
    weight_map: dict[str, str]


_ENTRIES = TypeAdapter(dict[str, _Tensor])
_METADATA = TypeAdapter(dict[str, str])


def find_weight_problem(folder: Path) -> str:
    """Why the weights cannot be loaded, or ''. Files of other formats are left to transformers."""
    try:
        files = list_weight_files(folder)
    except ValueError as error:
        return str(error)
    if not files:
        is_other = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        return "" if is_other else f"{folder} holds no weights: no *.safetensors"
    for file in files:
        if file.parent != folder:
            return f"{INDEX} names {file}, which is outside the folder"
        if not os.path.lexists(file):
            return f"{file} is missing, {INDEX} names it"
        try:
            kinds = {name: str(entry["dtype"]) for name, entry in read_header(file).items()}
        except OSError as error:
            return f"{file} cannot be read: {error.strerror}"
        except ValueError as error:
            return f"{file} is damaged: {error}"
        odd = sorted(name for name, kind in kinds.items() if kind not in FLOATS)
        if odd:
            return f"{file} holds {odd[0]} as {kinds[odd[0]]}: quantized weights cannot be trained"
    return ""


def find_damaged_weights(folder: Path) -> str:
    """Which file of weights or adapters in a folder is missing or not whole, by its header; '' if none is."""
    try:
        named = list_weight_files(folder)
    except ValueError as error:
        return str(error)
    for file in sorted({*named, *folder.glob("*.safetensors")}):
        try:
            read_header(file)
        except OSError as error:
            return f"{file} cannot be read: {error.strerror}"
        except ValueError as error:
            return f"{file} is damaged: {error}"
    return ""


def list_weight_files(folder: Path) -> list[Path]:
    """The files that the index names; without an index, all in the folder. ValueError: the index cannot be read."""
    index = folder / INDEX
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        content = _Index.model_validate_json(read_regular(index, MAX_HEADER_BYTES))
    except OSError as error:
        raise ValueError(f"{index} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise ValueError(f"{index} cannot be read: {_explain(error)}") from None
    return [folder / name for name in sorted(set(content.weight_map.values()))]


def fingerprint_weights(folder: Path) -> str:
    """Differs after other weights were written into the folder. '' for a model of the hub."""
    if not folder.is_dir():
        return ""
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in list_weight_files(folder)]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Name -> dtype, shape and offsets of each tensor. ValueError: not a complete file of this format."""
    return _read_header(file)[0]


def read_metadata(file: Path) -> dict[str, str]:
    """The header's metadata. ValueError as above."""
    return _read_header(file)[1]


def _read_header(file: Path) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
        if not 0 < length <= min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
            raise ValueError(f"its {size} bytes do not hold the header that they announce")
        try:
            header = from_json(opened.read(length))
            metadata = _METADATA.validate_python(header.pop("__metadata__", {}) if isinstance(header, dict) else {})
            entries: dict[str, Any] = dict(_ENTRIES.validate_python(header))
        except ValidationError as error:
            raise ValueError(f"its header is not a table of tensors: {_explain(error)}") from None
        except ValueError as error:
            raise ValueError(f"its header is not JSON: {error}") from None
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if LENGTH_BYTES + length + end != size:
        raise ValueError(f"it has {size} bytes, its header describes {LENGTH_BYTES + length + end}")
    return entries, metadata


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return ": ".join(part for part in (".".join(map(str, first["loc"]))[:SHOWN_CHARS], first["msg"]) if part)


def list_weight_names(folder: Path) -> list[str]:
    """Names of all tensors, for a folder that passed find_weight_problem."""
    return sorted(name for file in list_weight_files(folder) for name in read_header(file))


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


FOLDER = Path(__file__).parent / "templates"
KEY = "data.chat_template"
MAX_BYTES = 1 << 20
# Around a thought in what the assistant says.
THOUGHT_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
# Variables by which templates leave thinking out, or ask for it. A template that reads neither ignores both.
THINKING_SWITCHES = ("enable_thinking", "thinking")
# Variables by which templates keep the thoughts of earlier turns, and the values that do so.
KEEPING_THOUGHTS = {"preserve_thinking": "true", "clear_thinking": "false", "truncate_history_thinking": "false"}
# What this tool, transformers or the row itself gives to a template.
OUR_VARIABLES = ("messages", "tools", "tokenize", "add_generation_prompt", "chat_template", "continue_final_message")
# With this templates write the date of the day, which would give a chat other tokens tomorrow. The recipe's variable of
# this name says which date stands there; without it, the one that Llama's templates write where they have no clock.
CLOCK, DATE = "strftime_now", "2024-07-26"
IM = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Shipped:
    """`markers`: tokens that the template itself writes. `end`: the token that ends a turn; '' if that is the
    tokenizer's end of text."""

    markers: tuple[str, ...]
    end: str = ""


SHIPPED = {
    "chatml": Shipped(IM, "<|im_end|>"),
    "llama-3": Shipped(("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"),
    "mistral": Shipped(("[INST]", "[/INST]")),
    "gemma": Shipped(("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
    "phi": Shipped(("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|end|>"),
    "qwen": Shipped(IM, "<|im_end|>"),
}
NAMES = ", ".join(SHIPPED)
NAME_ONE = f"name a file that holds one, or one of {NAMES}"


@dataclass(frozen=True)
class Template:
    """`name`: of the shipped set, or ''."""

    text: str
    name: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        return SHIPPED[self.name].markers if self.name else ()


def read_template(value: str) -> Template:
    """Takes the value of `data.chat_template`, returns a template that parses. Raises RecipeError."""
    if "{{" in value or "{%" in value:
        return Template(_check_syntax(value, "the template, line "))
    if value in SHIPPED:
        return Template(_read_file(FOLDER / f"{value}.jinja"), value)
    file = Path(os.path.expanduser(value))
    if os.path.isfile(file):
        return Template(_check_syntax(_read_file(file), f"{value}:"))
    looks_like_path = "/" in value or value.endswith((".jinja", ".jinja2", ".j2", ".txt"))
    close = difflib.get_close_matches(value.lower(), SHIPPED, n=1)
    if looks_like_path:
        raise RecipeError([Problem(KEY, f"{value} is not a file", f"name a file, or one of {NAMES}")])
    hint = f"did you mean `{close[0]}`?" if close else f"write {NAMES}, a file, or a template with {{{{ }}}}"
    raise RecipeError([Problem(KEY, f"{value} is neither a shipped template nor a file", hint)])


def _read_file(file: Path) -> str:
    try:
        with open(file, "rb") as stream:
            return stream.read(MAX_BYTES).decode("utf-8-sig").rstrip("\n")
    except OSError as error:
        raise RecipeError([Problem(KEY, f"{file} cannot be read: {error.strerror}", "make it readable")]) from None
    except UnicodeDecodeError:
        raise RecipeError([Problem(KEY, f"{file} is not UTF-8 text", "save it as UTF-8")]) from None


def read_date(variables: Mapping[str, Any]) -> datetime:
    """The date that a template with these variables writes. Raises ValueError for what is none."""
    return datetime.fromisoformat(str(variables.get(CLOCK) or DATE))


def find_switch(template: str) -> tuple[str, str] | None:
    """The variable with which this template keeps the thoughts of earlier turns, and its value, if it reads one."""
    names = list_variables(template)
    return next(((name, value) for name, value in KEEPING_THOUGHTS.items() if name in names), None)


def list_variables(template: str) -> frozenset[str]:
    """The variables that a template reads; none where it cannot be parsed."""
    from jinja2 import TemplateError

    try:
        return frozenset(_list_names(_make_environment().parse(template)))
    except (TemplateError, ValueError, RecursionError, MemoryError):
        return frozenset()


def _check_syntax(text: str, where: str) -> str:
    """Parses the template as transformers would."""
    from jinja2 import TemplateSyntaxError

    hint = "fix it: a chat template is Jinja, as transformers reads it"
    environment = _make_environment()
    try:
        tree = environment.parse(text)
        unknown = next(_walk_unknown(tree, environment), None)
    except TemplateSyntaxError as error:
        raise RecipeError([Problem(KEY, f"{where}{error.lineno}: {error.message}", hint)]) from None
    except (ValueError, RecursionError, MemoryError) as error:  # a number of 5,000 digits, 1,000 brackets in brackets
        place = where.rpartition(", line")[0] or where.removesuffix(":")
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RecipeError([Problem(KEY, f"{place} cannot be parsed: {reason}", hint)]) from None
    if unknown is not None:
        raise RecipeError([Problem(KEY, f"{where}{unknown[0]}: {unknown[1]}", hint)])
    if "messages" not in _list_names(tree):
        place = where.rpartition(", line")[0] or where.removesuffix(":")
        raise RecipeError([Problem(KEY, f"{place} never reads `messages`, so it is no chat template", NAME_ONE)])
    return text


def _make_environment() -> Environment:
    """The syntax that transformers gives to templates: loop controls and `generation` blocks."""
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )


def _list_names(tree: nodes.Template) -> set[str]:
    """Variables that are read. jinja2.meta would compute the constants."""
    from jinja2 import nodes

    return {node.name for node in tree.find_all(nodes.Name) if node.ctx == "load"}


def _walk_unknown(tree: nodes.Node, environment: Environment) -> Iterator[tuple[int, str]]:
    """Line and message of filters and tests that do not exist. Jinja allows them in a branch that is never taken."""
    from jinja2 import nodes

    if isinstance(tree, nodes.Filter) and tree.name not in environment.filters:
        yield tree.lineno, f"No filter named '{tree.name}'."
    if isinstance(tree, nodes.Test) and tree.name not in environment.tests:
        yield tree.lineno, f"No test named '{tree.name}'."
    if not isinstance(tree, nodes.If | nodes.CondExpr):
        for child in tree.iter_child_nodes():
            yield from _walk_unknown(child, environment)


def explain_no_template(tokenizer: str, source: str) -> Problem:
    """`source`: the key of the data that holds chats."""
    message = f"required: {source} holds chats, and the tokenizer of {tokenizer} has no chat template"
    return Problem(KEY, message, f"write data.chat_template: {NAMES}, a file, or a template; or name a chat model")


def find_missing_markers(template: Template, tokens: Collection[str]) -> list[str]:
    return [marker for marker in template.markers if marker not in tokens]


def explain_markers(template: Template, missing: Sequence[str], added: Sequence[str], tokenizer: str) -> Problem:
    """The hint is the whole line, with the tokens that are added already."""
    line = ", ".join(f'"{token}"' for token in (*added, *missing))
    message = f"{template.name} marks turns with {', '.join(missing)}, which the tokenizer of {tokenizer} does not have"
    return Problem(KEY, message, f"write data.added_tokens: [{line}]")
