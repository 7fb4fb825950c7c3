"""Which models `ulysses merge` takes, with which weights, and why some cannot be merged: by their names, config.json
and the headers of their files. No tensor is read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulysses_cli.plan.files import read_regular
from ulysses_cli.plan.models.model_files import find_weight_problem, list_weight_files, read_header
from ulysses_cli.plan.problem import Problem
from ulysses_cli.plan.rules.files import CHECKPOINT_MANIFEST, HUB_NAME
from ulysses_cli.plan.units import format_count

KEY = "MODEL"
MAX_CONFIG_BYTES = 16 << 20
TOLERANCE = 1e-6  # of the sum of the weights: 1/3 is written with a few digits
SHOWN_NAMES = 3
UNCOMPARED = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}


@dataclass(frozen=True)
class MergedModel:
    """A model's folder or name on the hub, and its share of the sum."""

    name: str
    weight: float

    @property
    def folder(self) -> Path:
        return Path(os.path.expanduser(self.name))


def parse_parts(words: Sequence[str]) -> list[MergedModel]:
    """`A:0.9 B:0.1`, or `A B` for equal shares. A folder whose own name ends in a number is taken as it is."""
    pairs = [_split(word) for word in words]
    if all(weight is None for _, weight in pairs):
        return [MergedModel(name, 1 / len(pairs)) for name, _ in pairs]
    return [MergedModel(name, math.nan if weight is None else weight) for name, weight in pairs]


def _split(word: str) -> tuple[str, float | None]:
    name, _, last = word.rpartition(":")
    try:
        weight = float(last)
    except ValueError:
        return word, None
    return (word, None) if not name or os.path.isdir(os.path.expanduser(word)) else (name, weight)


def find_problems(parts: Sequence[MergedModel]) -> Iterator[Problem]:
    """What can be seen on this machine; models of the hub that are not here pass."""
    if len(parts) < 2:
        hint = "name two or more, such as A:0.9 B:0.1, or a run with --last 3"
        yield Problem(KEY, f"{parts[0].name} alone: there is nothing to merge it with", hint)
        return
    names = [part.name for part in parts]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem(KEY, f"{name} is named twice", "name it once, with the sum of its weights")
    for part in parts:
        if math.isnan(part.weight):
            yield Problem(KEY, f"{part.name} has no weight, others have", f"write {part.name}:0.5, or leave all out")
        elif part.weight == 0 or math.isinf(part.weight):
            yield Problem(KEY, f"{part.name} has the weight {part.weight:g}", "leave the model out")
    total = math.fsum(part.weight for part in parts)
    if math.isfinite(total) and abs(total - 1) > TOLERANCE:
        hint = "write weights such as 0.9 and 0.1: any other sum scales every weight of the model"
        yield Problem(KEY, f"the weights add up to {total:g}, not to 1", hint)
    folders = [part.folder for part in parts]
    odd = [(folder, _find_odd(folder)) for folder in folders]
    yield from (problem for _, problem in odd if problem is not None)
    sound = [folder for folder, problem in odd if problem is None and folder.is_dir()]
    for folder in sound[1:]:
        yield from find_differences(sound[0], folder)


def _find_odd(folder: Path) -> Problem | None:
    """Why one folder holds no whole model; None also for a name on the hub."""
    if not folder.exists():
        is_name = HUB_NAME.fullmatch(str(folder)) and "/" in str(folder)
        hint = "name a model's folder, or owner/name"
        return None if is_name else Problem(KEY, f"{folder} does not exist", hint)
    if (folder / "checkpoints").is_dir() or (folder / CHECKPOINT_MANIFEST).exists():
        hint = (
            f"run `ulysses export {folder} --to MODEL` first; `ulysses merge --last 3` takes a run's last checkpoints"
        )
        return Problem(KEY, f"{folder} is a run or a checkpoint, not a model", hint)
    if (folder / "adapter_config.json").exists():
        hint = "run `ulysses export CHECKPOINT --to MODEL --merge-lora`; sums of adapters are not sums of what they add"
        return Problem(KEY, f"{folder} holds adapters, not a model", hint)
    if not (folder / "config.json").is_file():
        return Problem(KEY, f"{folder} holds no config.json", "name the folder of a model that transformers loads")
    if damage := find_weight_problem(folder):
        return Problem(KEY, damage, "merge models that are whole")
    if not list_weight_files(folder):
        return Problem(KEY, f"{folder} holds no safetensors files", "save the model with safetensors")
    return None


def find_differences(first: Path, other: Path) -> Iterator[Problem]:
    """Why two whole models are not of one kind. Both folders have passed `_find_odd`."""
    hint = "merge models of one architecture that began from the same weights"
    kinds = [read_config(folder).get("model_type") for folder in (first, other)]
    if kinds[0] != kinds[1]:
        yield Problem(KEY, f"{other} is of the type {kinds[1]}, {first} of the type {kinds[0]}", hint)
        return
    ours, theirs = read_entries(first), read_entries(other)
    if alone := sorted(ours.keys() ^ theirs.keys()):
        more = f" and {len(alone) - SHOWN_NAMES} more" if len(alone) > SHOWN_NAMES else ""
        names = f"{', '.join(alone[:SHOWN_NAMES])}{more}"
        yield Problem(KEY, f"{first} or {other} alone holds {names}", hint)
        return
    for what, key in (("shape", "shape"), ("dtype", "dtype")):
        differing = [name for name in ours if ours[name][key] != theirs[name][key]]
        if differing:
            name, count = (
                differing[0],
                f"{format_count(len(differing), 'tensor')} {'differs' if len(differing) == 1 else 'differ'}",
            )
            pair = f"{theirs[name][key]} in {other} and {ours[name][key]} in {first}"
            fix = hint if key == "shape" else "save both with one dtype: `ulysses export --dtype` does for a checkpoint"
            yield Problem(KEY, f"{count} in {what}: {name} is {pair}", fix)


def read_config(folder: Path) -> Mapping[str, Any]:
    """{} where config.json is no mapping."""
    try:
        content = json.loads(read_regular(folder / "config.json", MAX_CONFIG_BYTES))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def list_config_differences(first: Path, others: Sequence[Path]) -> list[str]:
    """Keys in which config.json differs."""
    ours = read_config(first)
    names = {
        name
        for theirs in map(read_config, others)
        for name in ours.keys() | theirs.keys()
        if ours.get(name) != theirs.get(name)
    }
    return sorted(names - UNCOMPARED)


def read_entries(folder: Path) -> dict[str, dict[str, Any]]:
    """Dtype, shape and file of each tensor. A head that is the embedding may be in the files or not."""
    is_tied = read_config(folder).get("tie_word_embeddings")
    entries = {
        name: {**entry, "file": file} for file in list_weight_files(folder) for name, entry in read_header(file).items()
    }
    return {name: entry for name, entry in entries.items() if not (is_tied and name == "lm_head.weight")}
