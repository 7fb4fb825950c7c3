"""What the text of a recipe may say: parses YAML into nodes that know their place, inspects which values each setting
accepts, and words the messages and hints for keys and values that are wrong. loader.py detects the mistakes. Only
this file reads pydantic's field objects. No YAML tag is constructed, so no text runs code. No setting is here."""

from __future__ import annotations

import difflib
import math
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from ulysses_cli.plan.problem import Problem, RecipeError, Where
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.recipe.sections import LINES, Section
from ulysses_cli.plan.units import format_count, format_plain

COMMAND_LINE = "command line"
TEXT_TAG, MAP_TAG, SEQ_TAG = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "map", "seq"))
NUMBER = re.compile(r"(?P<number>[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?)(?P<suffix>[KMGT]i?)?", re.ASCII)
SUFFIXES = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
MAX_NUMBER_DIGITS = 40
MAX_DEPTH = 100  # of brackets
YAML_HINTS = {
    "'\\t'": "indent with spaces; YAML takes no tabs",
    "expected ':'": "a setting is written key: value",
    "mapping values are not allowed": "quote a value that holds a colon, or fix the indentation",
    "end of stream": "close the quote or bracket",
    "expected the node content": "close the bracket, or write what is missing here",
    "found another document": "a recipe is one document: remove the line --- and what is below it, or save it apart",
    "cannot start any token": "quote a value that begins with @, % or a backquote",
}
NULLS = ("", "~", "null", "Null", "NULL")
BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


class Loader(yaml.SafeLoader):
    """Refuses deep brackets: its base looks at every open one for each token, which takes minutes for 100,000."""

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        if self.flow_level >= MAX_DEPTH:
            raise RecursionError
        super().fetch_flow_collection_start(token)


def compose(text: str, file: str) -> yaml.Node | None:
    """The node of the text's single document; None for empty text. Its marks name the file."""
    hint = ""
    try:
        loader = Loader(text)
        loader.name = file
        node: yaml.Node | None = loader.get_single_node()
        return node
    except yaml.MarkedYAMLError as error:
        reason = (error.problem or error.context or "cannot be parsed").removeprefix("but ")
        begins_earlier = "expected ':'" in reason or "end of stream" in reason
        mark = (error.context_mark if begins_earlier else None) or error.problem_mark or error.context_mark
        where = Where(file, mark.line + 1, mark.column + 1) if mark else Where(file, 1, 1)
        hint = next((hint for words, hint in YAML_HINTS.items() if words in reason), "")
    except yaml.reader.ReaderError as error:
        before = text[: int(error.position)]
        letter = error.character if isinstance(error.character, str) else chr(error.character)
        where = Where(file, before.count("\n") + 1, len(before) - before.rfind("\n"))
        reason, hint = f"character {letter!r} is not allowed", "remove it; an editor may not show it"
    except RecursionError:
        where, reason = Where(file, 1, 1), "nested too deeply"
    except (yaml.YAMLError, ValueError) as error:
        where, reason = Where(file, 1, 1), str(error)
    raise RecipeError([Problem("", f"not valid YAML: {reason}", hint, where)])


def read_place(node: yaml.Node) -> Where:
    mark = node.start_mark
    if mark is None or mark.name == COMMAND_LINE:
        return Where(COMMAND_LINE)
    return Where(mark.name, mark.line + 1, mark.column + 1)


def parse_plain(node: yaml.Node) -> Any:
    """A scalar node's value by YAML 1.2's rules, with underscores and size suffixes. Quoted scalars are text."""
    if not isinstance(node, yaml.ScalarNode) or node.style is not None:
        return node.value
    if node.value in NULLS:
        return None
    return BOOLEANS[node.value] if node.value in BOOLEANS else parse_number(node.value)


def parse_number(text: str) -> int | float | str:
    """`500_000`, `1e-5`, `500K` (decimal), `512Ki` (binary); anything else stays text."""
    match = NUMBER.fullmatch(text)
    if not match or len(text) > MAX_NUMBER_DIGITS:
        return text
    number, suffix = match["number"].replace("_", ""), match["suffix"]
    if number.lstrip("+-").isdigit():
        return int(number) * SUFFIXES.get(suffix, 1)
    scaled = float(number) * SUFFIXES.get(suffix, 1)
    return int(scaled) if suffix and abs(scaled) < 2**62 and scaled.is_integer() else scaled


SCALAR_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True)
class Accepts:
    """What one place of a recipe accepts. `item`, `value`: annotations of list elements and of mapping values."""

    section: type[Section] | None = None
    item: Any = None
    value: Any = None
    scalars: tuple[type, ...] = ()
    literals: tuple[Any, ...] = ()
    is_optional: bool = False
    takes_lines: bool = False  # a text of several lines
    bounds: dict[str, float] = field(default_factory=dict)

    @property
    def inner(self) -> type[Section] | None:
        """The section at this place, or the section of a list's elements."""
        return self.section or (inspect_annotation(self.item).section if self.item is not None else None)

    @property
    def is_text(self) -> bool:
        return str in self.scalars and not self.section and self.item is None and self.value is None

    def describe(self) -> str:
        """In words, for an error message: `a whole number from 1 to 4096`."""
        words = [f"`{format_value(value)}`" for value in self.literals]
        for kind in self.scalars:
            words += ["true", "false"] if kind is bool else [SCALAR_WORDS[kind] + self.describe_bounds(kind)]
        if self.section:
            words.append("a section")
        if self.item is not None:
            words.append(f"a list{self.describe_bounds(list)}, each {inspect_annotation(self.item).describe()}")
        if self.value is not None:
            words.append("a mapping")
        if self.is_optional:
            words.append("null")
        return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]

    def describe_bounds(self, kind: type) -> str:
        low, high = self.bounds.get("ge", self.bounds.get("gt")), self.bounds.get("le", self.bounds.get("lt"))
        if kind in (int, float) and low is not None and high is not None:
            above = "above " if "gt" in self.bounds else "from "
            below = " to below " if "lt" in self.bounds else " to "
            return f" {above}{format_plain(low)}{below}{format_plain(high)}"
        if kind is list and "max_length" in self.bounds:
            return f" of {self.bounds.get('min_length', 0):,} to {self.bounds['max_length']:,}"
        return ""


@dataclass(frozen=True)
class Setting:
    """One field, as the loader and `config-schema` see it."""

    key: str
    doc: str
    unit: str
    default: Any
    is_required: bool
    accepts: Accepts
    aliases: tuple[str, ...]
    spellings: dict[Any, Any]
    spellings_by_alias: dict[str, dict[Any, Any]]
    refused: dict[str, str]


@cache
def list_settings(section: type[Section]) -> dict[str, Setting]:
    """The settings of a section by name."""
    return {name: _read_field(name, info) for name, info in section.model_fields.items()}


@cache
def list_names(section: type[Section]) -> dict[str, str]:
    """By every name that a section accepts, aliases included, the setting's own name."""
    names = {name: name for name in list_settings(section)}
    for name, setting in list_settings(section).items():
        names.update(dict.fromkeys(setting.aliases, name))
    return names


def find_short(section: type[Section]) -> Setting | None:
    """The setting that a plain value in place of the section stands for; None where a section has none."""
    return list_settings(section)[section.SHORT] if section.SHORT else None


def descend(accepts: Accepts | None, part: str) -> Accepts | None:
    """What is accepted one name or one index below; None where the schema does not say."""
    if accepts is None:
        return None
    if accepts.section:
        setting = list_settings(accepts.section).get(list_names(accepts.section).get(part, ""))
        return setting.accepts if setting else None
    if accepts.item is not None and accepts.value is None:
        return inspect_annotation(accepts.item)
    return inspect_annotation(accepts.value) if accepts.value is not None else None


def walk_settings(section: type[Section] = Recipe, prefix: str = "") -> Iterator[Setting]:
    """Every setting with its full dotted key, sections before their content, list elements as `[]`."""
    for name, setting in list_settings(section).items():
        yield replace(setting, key=prefix + name)
        if setting.accepts.inner:
            below = f"{prefix}{name}." if setting.accepts.section else f"{prefix}{name}[]."
            yield from walk_settings(setting.accepts.inner, below)


def make_json_schema(key: str = "") -> dict[str, Any]:
    """The JSON schema for editors. Sizes such as 64Ki are text there, and a setting may be written by any of its names.
    What is required may stand in the recipe that a file extends. `key`: only that section or setting."""
    schema = Recipe.model_json_schema()
    schema["anyOf"] = [{"required": schema.pop("required")}, {"required": ["extends"]}]
    for setting in walk_settings():
        if setting.accepts.section and "[]" not in setting.key:  # elements of a list are never merged
            schema["$defs"][setting.accepts.section.__name__].pop("required", None)
    for part in (schema, *schema["$defs"].values()):
        for name, setting in list(part.get("properties", {}).items()):
            for place in (setting, *setting.get("anyOf", [])):
                if place.get("type") == "integer":
                    bounds = {key: place.pop(key) for key in list(place) if key in ("minimum", "maximum", "type")}
                    size = {"type": "string", "pattern": "^[0-9][0-9_.]*([eE][0-9]+|[KMGT]i?)?$"}
                    place["anyOf"] = [bounds, size]
            items = setting.get("items", {})
            alone = [items] if setting.get("type") == "array" else []  # an element may stand for a list of one
            alone += [{"type": "string"}] if "$ref" in items else []  # and a path for a source of data
            spellings = setting.get("spellings_by_alias", {})
            for alias in setting.get("aliases", ()):
                other = {**setting, "description": f"see {name}", "aliases": []}
                part["properties"][alias] = _widen(other, alone, [*setting["spellings"], *spellings.get(alias, ())])
            part["properties"][name] = _widen(setting, alone, list(setting.get("spellings", ())))
    part = schema
    for name in key.split(".") if key else ():
        part = _follow_references(part, schema["$defs"])["properties"][name.removesuffix("[]")]
    return part if not key else {**_follow_references(part, schema["$defs"]), "$defs": schema["$defs"]}


def _widen(setting: dict[str, Any], others: list[dict[str, Any]], spellings: list[str]) -> dict[str, Any]:
    """The schema of a property that may also be one of the others, or be written by a spelling."""
    plain = {"true": True, "false": False, "None": None}  # pydantic makes text of keys
    others = [*others, *([{"enum": [plain.get(each, each) for each in spellings]}] if spellings else [])]
    if not others:
        return setting
    about = ("title", "description", "default", "unit", "aliases", "spellings", "spellings_by_alias", "refused")
    shape = {key: value for key, value in setting.items() if key not in about}
    return {**{key: setting[key] for key in setting if key in about}, "anyOf": [shape, *others]}


def _follow_references(part: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a property's section, of its elements' section, or the property itself."""
    for branch in (part, part.get("items", {}), *part.get("anyOf", [])):
        if "$ref" in branch:
            section: dict[str, Any] = definitions[branch["$ref"].rpartition("/")[2]]
            return section
    return part


def _read_field(name: str, info: FieldInfo) -> Setting:
    extra: dict[str, Any] = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    accepts = inspect_annotation(info.annotation)
    bounds = {**accepts.bounds, **_read_bounds(info.metadata)}
    accepts = replace(accepts, bounds=bounds, takes_lines=accepts.takes_lines or LINES in info.metadata)
    return Setting(
        key=name,
        doc=info.description or "",
        unit=extra["unit"],
        default=None if info.is_required() else info.default,
        is_required=info.is_required(),
        accepts=accepts,
        aliases=tuple(extra["aliases"]),
        spellings=extra["spellings"],
        spellings_by_alias=extra["spellings_by_alias"],
        refused=extra["refused"],
    )


def inspect_annotation(annotation: Any) -> Accepts:
    """What a Python annotation accepts. The schema uses few forms; any other is a mistake in the schema."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return replace(inspect_annotation(args[0]), bounds=_read_bounds(args[1:]), takes_lines=LINES in args)
    if origin in (Union, types.UnionType):
        return _merge([inspect_annotation(arg) for arg in args])
    if origin is Literal:
        return Accepts(literals=args)
    if origin is tuple:
        return Accepts(item=args[0])
    if origin is dict:
        return Accepts(value=args[1])
    if annotation is type(None):
        return Accepts(is_optional=True)
    if annotation is Any:
        return Accepts(item=Any, value=Any, scalars=(bool, int, float, str), is_optional=True)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return Accepts(section=annotation)
    if annotation in SCALAR_WORDS:
        return Accepts(scalars=(annotation,))
    raise TypeError(f"the recipe's schema does not use {annotation}")


def _merge(parts: list[Accepts]) -> Accepts:
    return Accepts(
        section=next((part.section for part in parts if part.section), None),
        item=next((part.item for part in parts if part.item is not None), None),
        value=next((part.value for part in parts if part.value is not None), None),
        scalars=tuple(kind for part in parts for kind in part.scalars),
        literals=tuple(value for part in parts for value in part.literals),
        is_optional=any(part.is_optional for part in parts),
        takes_lines=any(part.takes_lines for part in parts),
        bounds={name: bound for part in parts for name, bound in part.bounds.items()},
    )


def _read_bounds(metadata: Any) -> dict[str, float]:
    """Bounds by pydantic's names. A FieldInfo inside Annotated holds its own list of them."""
    bounds: dict[str, float] = {}
    for item in metadata:
        if isinstance(item, FieldInfo):
            bounds.update(_read_bounds(item.metadata))
        for name in ("ge", "gt", "le", "lt", "min_length", "max_length"):
            value = getattr(item, name, None)
            if isinstance(value, int | float):
                bounds[name] = value
    return bounds


def format_value(value: object) -> str:
    """A setting's value as it would be written in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    return str(value)


FOREIGN_KEYS = {
    "train_on_inputs": "write data.completion_only_loss or data.assistant_only_loss: true trains on answers alone",
    "load_in_4bit": "write lora.quantize_base: nf4, with parallel.zero_stage: 2",
    "load_in_8bit": "write lora.quantize_base: int8, with parallel.zero_stage: 2",
    "flash_attention": "write model.attn_implementation: auto",
    "fp16": "write model.dtype: bfloat16",
    "fsdp": "sharding is DeepSpeed's: see parallel.zero_stage",
    "tensor_parallel_size": "tensor parallelism is not offered; parallel.sp_size splits rows and heads",
    "pipeline_parallel_size": "pipeline parallelism is not offered; parallel.sp_size splits rows and heads",
    "val_set_size": "write data.eval_split, a share such as 0.01",
    "lr": "write train.learning_rate",
    "rank": "write lora.r",
    "lora_rank": "write lora.r",
    "lora_target": "write lora.target_modules",
    "lora_target_linear": "write lora.target_modules: all-linear",
    "adapter": "write a lora section; quantize_base: nf4 in it makes it QLoRA",
    "finetuning_type": "leave it out: a lora section trains adapters, and without one all weights are trained",
    "dataset": "write data.datasets, a list of {path: ...}",
    "preprocessing_num_workers": "write data.num_workers",
    "dataset_num_proc": "write data.num_workers",
    "sequence_parallel_degree": "write parallel.sp_size",
    "overwrite_output_dir": "leave it out: ulysses train --overwrite starts a new run in the same folder",
    "do_train": "leave it out: ulysses train trains",
    "do_eval": "write run.eval_steps, and data.eval_split or data.eval_datasets",
    "evals_per_epoch": "write run.eval_steps, a number of steps",
    "saves_per_epoch": "write run.save_steps, a number of steps",
}
WHOLE_NUMBERS = "write a whole number, such as 10"
LARGE_NUMBERS, LARGE = f"{WHOLE_NUMBERS}, 65_536, 500K or 64Ki", 500_000  # where as many may stand
PLAIN_NUMBERS = "write a plain number, such as 10, 0.01 or 1e-5"
SHOWN_LETTERS = 80


def explain_unknown(name: str, section: type[Section], prefix: str, value: Any = None) -> str:
    """A hint for an unknown key: another tool's name, a key of another section, or a misspelled key of this one.
    `value`: what was written, which may mean another value under the key's own name."""
    if name in FOREIGN_KEYS:
        return FOREIGN_KEYS[name]
    if homes := list_homes(name):
        (home,) = find_settings(homes[0])[:1]
        if isinstance(value, bool) and value in (meant := home.spellings_by_alias.get(name, {})):
            return f"write {home.key}: {format_value(meant[value])}"
        return f"write it as {' or '.join(homes)}"
    names, before = list_names(section), f"{prefix}." if prefix else ""
    close = difflib.get_close_matches(name, list_settings(section), n=1) or difflib.get_close_matches(
        name, names, n=1, cutoff=0.8
    )
    if not close:  # `epochs` for num_train_epochs
        close = [full for full in list_settings(section) if name in full.split("_")]
    if len(close) == 1:
        return f"did you mean {before}{names[close[0]]}?"
    return f"{prefix or 'a recipe'} takes {', '.join(list_settings(section))}"


def list_homes(name: str) -> list[str]:
    """Full keys of the settings that have this name in their section."""
    return [
        f"{home}.{list_names(setting.accepts.section)[name]}"
        for home, setting in list_settings(Recipe).items()
        if setting.accepts.section and name in list_names(setting.accepts.section)
    ]


def find_settings(key: str) -> list[Setting]:
    """A section with its settings, or one setting, by any of its names; all for ''. Raises RecipeError."""
    parts = [part.removesuffix("[]") for part in key.split(".") if part and not part.isdigit()]
    if len(parts) == 1 and parts[0] not in list_settings(Recipe) and (homes := list_homes(parts[0])):
        parts = homes[0].split(".")
    section: type[Section] | None = Recipe
    own: list[str] = []
    for part in parts:
        if section is None or part not in list_names(section):
            hint = explain_unknown(part, section, ".".join(own)) if section else f"{'.'.join(own)} is one value"
            raise RecipeError([Problem("SECTION", f"no section or setting is called {key}", hint)])
        own.append(list_names(section)[part])
        section = list_settings(section)[own[-1]].accepts.inner
    return [setting for setting in walk_settings() if setting.key.replace("[]", "").split(".")[: len(own)] == own]


def is_key(word: str) -> bool:
    """Whether a word that is neither a file nor an override names a setting, perhaps misspelled."""
    section, dot, _ = word.partition(".")
    if not dot or "/" in word or word.endswith((".yaml", ".yml", ".json")):
        return bool(list_homes(word))
    return bool(difflib.get_close_matches(section, list_settings(Recipe), n=1, cutoff=0.75))


def explain_control(letter: str) -> tuple[str, str]:
    """The message and hint for a character that no name or path may hold."""
    if letter == "\n":
        return "has several lines", "write one line; a value after `|` or `>` ends with a line's end, and `>-` has none"
    return f"character {letter!r} is not allowed", "remove it; an editor may not show it"


def explain_missing(setting: Setting, accepts: Accepts) -> tuple[str, str]:
    """(message, hint) for a required key that is missing."""
    if accepts.inner:
        what = "a list, each element" if accepts.item is not None else "a section"
        hint = f"write {setting.key}, {what} with {', '.join(list_settings(accepts.inner))}"
    else:
        hint = f"write {setting.key}: {accepts.describe()}" + (f" ({setting.unit})" if setting.unit else "")
    return "required and not written", hint


def explain_value(setting: Setting, accepts: Accepts, value: Any, typed: str) -> tuple[str, str]:
    """(message, hint) for a value that its setting does not accept. `typed` is a plain scalar as it was written, and ''
    for quoted values, lists and mappings."""
    if str(value) in setting.refused:
        return f"{value} is refused", setting.refused[str(value)]
    if value == () and accepts.inner:
        return "is an empty list", _suggest_section(setting, accepts, value)
    if value in ("", (), {}):
        hint = _suggest_default(setting)
        kind = "text" if isinstance(value, str) else "list" if isinstance(value, tuple) else "mapping"
        return f"is an empty {kind}", f"write something{', or ' if hint else ''}{hint}"
    is_list = accepts.item is not None and isinstance(value, tuple)
    if (is_list or (str in accepts.scalars and isinstance(value, str))) and "max_length" in accepts.bounds:
        most = int(accepts.bounds["max_length"])
        return f"has {format_count(len(value), 'element' if is_list else 'letter')}", f"write {most:,} at most"
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else parse_number(typed)
    is_text = isinstance(number, str) and typed not in BOOLEANS and isinstance(value, str)
    shown = {dict: "a mapping", tuple: "a list", type(None): "null"}.get(type(value), repr(value) if is_text else typed)
    unit = f" ({setting.unit})" if setting.unit and accepts is setting.accepts else ""
    message = f"{shown[:SHOWN_LETTERS]} is not {accepts.describe()}{unit}"
    if accepts.inner:
        return message, _suggest_section(setting, accepts, value)
    if accepts.value is not None and not accepts.scalars:
        return message, f"write {setting.key}: {{KEY: VALUE}}"
    if not isinstance(number, str):
        return message, _suggest_number(accepts, number) or _suggest_default(setting)
    if isinstance(value, str) and is_text:
        return message, _suggest_word(accepts, value, is_quoted=not typed) or _suggest_default(setting)
    if isinstance(value, tuple) and len(value) == 1:
        return message, "write one value without brackets"
    return message, _suggest_default(setting)


def _suggest_section(setting: Setting, accepts: Accepts, value: Any) -> str:
    """Suggests the value as the first setting of the section, if that setting accepts it."""
    name, first = next(iter(list_settings(accepts.inner).items())) if accepts.inner else ("", setting)
    word, _, rest = value.partition(" ") if isinstance(value, str) else ("", "", "")
    if rest and accepts.inner and word in list_names(accepts.inner):  # `name_or_path x`: the colon is forgotten
        return f"write {word}: {rest.strip()}, with a colon"
    fits = type(value) in first.accepts.scalars or value in first.accepts.literals
    inner = list_settings(accepts.inner).values() if accepts.inner else ()
    is_plain = accepts.is_optional and not any(inner_setting.is_required for inner_setting in inner)
    section = f"{{{name}: {format_value(value)}}}" if fits else "{}" if is_plain else f"{{{name}: ...}}"
    if accepts.item is not None:
        return f"write {setting.key}: [{section}]"
    return f"write {setting.key}: {section}" if accepts is setting.accepts else f"write {section}"


def _suggest_number(accepts: Accepts, number: float) -> str:
    low, high = accepts.bounds.get("ge", accepts.bounds.get("gt")), accepts.bounds.get("le", accepts.bounds.get("lt"))
    if not {int, float} & set(accepts.scalars):
        return ""
    if low is not None and number <= low:
        return f"use {format_plain(low)} or more" if "ge" in accepts.bounds else f"use more than {format_plain(low)}"
    if high is not None and number >= high:
        return f"use {format_plain(high)} or less" if "le" in accepts.bounds else f"use less than {format_plain(high)}"
    if float not in accepts.scalars and math.isfinite(number) and number != int(number):
        return f"use {math.floor(number):,} or {math.ceil(number):,}"
    return ""


def _suggest_word(accepts: Accepts, value: str, *, is_quoted: bool) -> str:
    takes_numbers = bool({int, float} & {*accepts.scalars, *map(type, accepts.literals)})
    if is_quoted and (not isinstance(parse_number(value), str) if takes_numbers else value in BOOLEANS):
        return "take the quotes away"
    parts = [part.strip() for part in value.split(",")]
    if len(parts) > 1 and {*parts} <= {*accepts.literals}:
        return f"write a list: [{', '.join(parts)}]"
    close = difflib.get_close_matches(value.lower(), [str(literal) for literal in accepts.literals], n=1)
    close = close or [each for each in map(str, accepts.literals) if each.startswith(value.lower())]  # `flash`
    if close:
        return f"did you mean `{close[0]}`?"
    if bool in accepts.scalars and value.lower() in ("yes", "no", "on", "off"):
        return "write true or false"
    if float in accepts.scalars:
        return PLAIN_NUMBERS
    takes_large = accepts.bounds.get("le", LARGE) >= LARGE
    return "" if int not in accepts.scalars else LARGE_NUMBERS if takes_large else WHOLE_NUMBERS


def _suggest_default(setting: Setting) -> str:
    if setting.is_required:
        return ""
    default = format_value(setting.default)
    return "leave it out" if setting.default in (None, (), {}) else f"leave it out for {default}, its default"
