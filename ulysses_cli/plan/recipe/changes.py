"""Compares recipes as plain data: the one that wrote a checkpoint with the one that resumes, and those of machines.

Layout, levers and bookkeeping may change; so may the length of the run, which changes no finished step. Rows per step
are compared elsewhere, as a product.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from ulysses_cli.plan.secrets import MASK

DECIDING = ("model", "data", "train", "lora", "preference")
FREE = {
    "model.attn_implementation",
    "model.experts_implementation",
    "model.trust_remote_code",
    "data.store_dir",
    "data.num_workers",
    "data.pad_to_multiple_of",
    "train.gradient_accumulation_steps",
    "train.per_device_train_batch_size",
}
# what may differ between two stages of a training: values that the weights do not depend on
STAGES = {
    *("model.attn_implementation", "model.experts_implementation", "model.trust_remote_code", "model.dtype"),
    "model.fused_kernels",
    *("model.rope_scaling", "model.rope_theta", "lora.dropout", "lora.adapter_name_or_path"),
}
STARTS = {"run.resume_from_checkpoint"}
MAX_DIFFERENCES = 12
UNSET: tuple[Any, ...] = (None, {}, [])
PLACES = {"run.output_dir", "data.store_dir", "data.num_workers", "memory.nvme_path"}
LENGTHS = ("train.max_steps", "train.num_train_epochs")  # a run may become longer, or shorter by steps not yet done


def list_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`key: was X, is Y` for each setting that decides values."""
    free = FREE | set(LENGTHS)
    changes = [change for name in DECIDING for change in _compare(old.get(name), new.get(name), name, 0, free)]
    return [*changes, *_compare(old["run"]["seed"], new["run"]["seed"], "run.seed", 0, free)]


def list_start_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`key: was X, is Y` for each setting by which weights of one recipe are not those of the other."""
    changes = [each for name in ("model", "lora") for each in _compare(old.get(name), new.get(name), name, 0, STAGES)]
    key = "data.added_tokens"
    before, now = (list(recipe["data"].get("added_tokens") or ()) for recipe in (old, new))
    return [*changes, *_compare(before, now, key)]


def list_length_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`key: was X, is Y` for each setting of the run's length, on which the learning rate's schedule depends."""
    pairs = [(key, *(recipe["train"].get(key.removeprefix("train.")) for recipe in (old, new))) for key in LENGTHS]
    return [f"{key}: was {_show(before)}, is {_show(now)}" for key, before, now in pairs if before != now]


def add_new_settings(old: Mapping[str, Any], recipe: BaseModel) -> dict[str, Any]:
    """An earlier version's recipe with the settings that it lacks, each at its default."""
    complete = dict(old)
    for name, content in old.items():
        section = getattr(recipe, name, None)
        if isinstance(content, Mapping) and isinstance(section, BaseModel):
            fields = {key: field for key, field in type(section).model_fields.items() if not field.is_required()}
            new = {key: field.get_default(call_default_factory=True) for key, field in fields.items()}
            complete[name] = {**json.loads(json.dumps(new, default=str)), **content}
    return complete


def list_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`key: was X, is Y` for every setting of two recipes that differs. How a run starts is left out."""
    names = sorted(old.keys() | new.keys())
    return [change for name in names for change in _compare(old.get(name), new.get(name), name, free=STARTS)]


def shorten_list(lines: Sequence[str]) -> tuple[str, ...]:
    """Returns the first lines, and how many more there are."""
    more = len(lines) - MAX_DIFFERENCES
    return (*lines[:MAX_DIFFERENCES], f"and {more} more") if more > 0 else tuple(lines)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of nested mappings; an empty mapping is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def list_shared_settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings, by key, that all machines of a run must share: all but places on their own disks."""
    return {key: value for key, value in flatten(recipe) if key not in PLACES}


def _compare(old: Any, new: Any, key: str, depth: int = 1, free: Collection[str] = frozenset()) -> Iterator[str]:
    is_unset = old in UNSET and new in UNSET  # an earlier version's data sets lack settings that stand at nothing
    if key in free or old == new or is_unset or _may_be(old, new):
        return
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        # a setting that only one version of this tool has is not the user's change
        names = old.keys() & new.keys() if depth == 0 else old.keys() | new.keys()
        for name in sorted(names):
            yield from _compare(old.get(name), new.get(name), f"{key}.{name}", depth + 1, free)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for at, (before, now) in enumerate(zip(old, new, strict=True)):
            yield from _compare(before, now, f"{key}.{at}", depth + 1, free)
    else:
        yield f"{key}: was {_show(old)}, is {_show(new)}"


def _may_be(old: Any, new: Any) -> bool:
    """Whether a masked old value may be equal to the new one. A checkpoint holds no secrets, so masked parts match
    anything, also a new password."""
    if not isinstance(old, str) or MASK not in old or new is None:
        return False
    first, *middle, last = old.split(MASK)
    text, at = str(new), len(first)
    if not text.startswith(first) or not text.endswith(last) or len(first) + len(last) > len(text):
        return False
    for part in middle:  # each at its first occurrence: time is linear in the text, for any content of a checkpoint
        at = text.find(part, at, len(text) - len(last)) + len(part)
        if at < len(part):
            return False
    return True


def _show(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    text = " ".join(text.splitlines())
    return text if len(text) <= 80 else f"{text[:77]}..."
