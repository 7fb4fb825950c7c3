"""A model folder's weight files, looked at before any rank meets another: by their headers, without reading weights."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
FLOATS = {"F64", "F32", "F16", "BF16"}


def find_weight_problem(folder: Path) -> str:
    """What keeps the weights from being loaded, or ''. Files of other formats are transformers' to judge."""
    index = folder / INDEX
    try:
        files = list_weight_files(folder)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{index} cannot be read: {error}"
    if not files:
        is_other = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        return "" if is_other else f"{folder} holds no weights: no *.safetensors"
    for file in files:
        if file.parent != folder:
            return f"{index} names {file}, which is outside the folder"
        if not file.exists():
            return f"{file} is missing, {INDEX} names it"
        try:
            with safe_open(file, "pt") as opened:
                kinds = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            return f"{file} is damaged: {error}"
        odd = sorted(name for name, kind in kinds.items() if kind not in FLOATS)
        if odd:
            return f"{file} holds {odd[0]} as {kinds[odd[0]]}: quantized weights cannot be trained"
    return ""


def list_weight_files(folder: Path) -> list[Path]:
    """Those that the index names, or all safetensors where there is none."""
    index = folder / INDEX
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.exists() else set()
    return [folder / name for name in sorted(names)] or sorted(folder.glob("*.safetensors"))
