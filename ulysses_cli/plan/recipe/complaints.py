"""Messages and hints for wrong keys and values of a recipe. loader.py detects the mistakes."""

from __future__ import annotations

import difflib
import math
from typing import Any

from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.recipe.schema import (
    Accepts,
    Setting,
    format_value,
    list_names,
    list_settings,
    walk_settings,
)
from ulysses_cli.plan.recipe.setting import Section
from ulysses_cli.plan.recipe.yaml_tree import BOOLEANS, parse_number
from ulysses_cli.plan.units import format_plain

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
