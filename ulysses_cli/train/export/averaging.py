"""`ulysses merge`: writes the weighted sum of models, one tensor after another. Host memory holds one shard of the
result; each sum is float32 and is rounded once, to the dtype of the models' files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ulysses_cli.plan.files.weight_files import list_weight_files
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.rules.merged_models import (
    MergedModel,
    find_differences,
    list_config_differences,
    read_entries,
)
from ulysses_cli.plan.rules.public_names import LOCAL_FOLDER, find_public_name
from ulysses_cli.run_folder.archive import CheckpointError
from ulysses_cli.train.export.base_files import find_base_files
from ulysses_cli.train.export.check import PROBE_TEXT
from ulysses_cli.train.export.job import ExportError
from ulysses_cli.train.export.weights import ShardWriter, add_weighted, convert, temporary_folder
from ulysses_cli.train.export.wrapper import COMPANIONS
from ulysses_cli.train.telemetry.run_file import get_own_version

COPIED = ("config.json", "generation_config.json", *COMPANIONS)
CARD = """---
library_name: transformers
base_model: {bases}
tags: [merge]
---

# {name}

The weighted sum of these models, computed in float32 and rounded once by ulysses {version}:

| model | weight |
| --- | --- |
{rows}
{notes}"""


def merge_models(parts: Sequence[MergedModel], to: Path, report: Callable[[str], None]) -> dict[str, Any]:
    """Returns the folder and what was done. The first model gives config, tokenizer and the layout of the files."""
    if to.exists():
        raise ExportError(f"{to} is there already: name a folder that is not")
    folders = _find_folders(parts)
    for other in folders[1:]:  # those of the hub could not be compared before
        if problem := next(find_differences(folders[0], other), None):
            raise ExportError(str(problem).strip())
    report("comparing tokenizers")
    tokenizer = _load_shared_tokenizer(parts)
    with temporary_folder(to) as folder:
        num_tensors = _write_sums(parts, folders, folder, report)
        for name in (*COPIED, *(path.name for path in folders[0].glob("*.py"))):
            if (folders[0] / name).is_file():
                shutil.copyfile(folders[0] / name, folder / name)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        differing = list_config_differences(folders[0], folders[1:])
        note = f"config.json differs in {', '.join(differing)}: that of {parts[0].name} is taken" if differing else ""
        (folder / "README.md").write_text(_write_card(parts, to.name, differing), encoding="utf-8")
    checked = f"{format_count(num_tensors, 'tensor')} of {len(parts)} models are summed in float32 and rounded once"
    return {"folder": str(to), "checked": checked, **({"note": note} if note else {})}


def _find_folders(parts: Sequence[MergedModel]) -> list[Path]:
    try:
        return [find_base_files(part.name, None)[0].parent for part in parts]
    except (OSError, ValueError) as error:
        raise ExportError(str(error)) from error


def _load_shared_tokenizer(parts: Sequence[MergedModel]) -> Any:
    """The first model's tokenizer, which gives every token the same number as the others do; None if no model has
    one."""
    from transformers import AutoTokenizer

    loaded = []
    for part in parts:
        try:
            loaded.append(AutoTokenizer.from_pretrained(part.folder if part.folder.is_dir() else part.name))
        except (OSError, ValueError, KeyError):  # what transformers raises where a folder holds none
            loaded.append(None)
    known = [tokenizer and (tokenizer.get_vocab(), tokenizer(PROBE_TEXT)["input_ids"]) for tokenizer in loaded]
    for part, facts in zip(parts, known, strict=True):
        if facts != known[0]:
            what = "its rows of embeddings stand for other tokens" if facts and known[0] else "one of them has none"
            raise ExportError(f"the tokenizers of {parts[0].name} and {part.name} differ: {what}")
    return loaded[0]


def _write_sums(parts: Sequence[MergedModel], folders: Sequence[Path], to: Path, report: Callable[[str], None]) -> int:
    entries, weights = [read_entries(folder) for folder in folders], [part.weight for part in parts]
    writer, files = ShardWriter(to, "model", torch.float32), list_weight_files(folders[0])
    for number, file in enumerate(files, 1):
        report(f"merging {file.name}, {number} of {len(files)}")
        own = [name for name, entry in entries[0].items() if entry["file"] == file]
        opened: dict[Path, Any] = {}
        for name in own:
            sources = [each[name]["file"] for each in entries]
            opened |= {source: safe_open(source, "pt") for source in sources if source not in opened}
            tensors = [opened[source].get_tensor(name) for source in sources]
            if all(tensor.is_floating_point() for tensor in tensors):
                writer.add_unchanged(name, convert(name, add_weighted(tensors, weights), tensors[0].dtype))
            elif all(tensor.equal(tensors[0]) for tensor in tensors):
                writer.add_unchanged(name, tensors[0])
            else:
                raise CheckpointError(f"{name} holds whole numbers, which differ between the models")
    return len(writer.finish())


def _write_card(parts: Sequence[MergedModel], name: str, differing: Sequence[str]) -> str:
    """Names no folder of this machine."""
    names = [find_public_name(part.name) or LOCAL_FOLDER for part in parts]
    rows = "\n".join(f"| {name} | {part.weight:.6g} |" for name, part in zip(names, parts, strict=True))
    notes = f"\nconfig.json is the first model's. Others differ in {', '.join(differing)}.\n" if differing else ""
    bases = json.dumps([name for name in names if name != LOCAL_FOLDER])
    return CARD.format(bases=bases, name=name, version=get_own_version(), rows=rows, notes=notes)
