"""A model folder's weight files, looked at before anything is started: by their headers, which are plain JSON, without
reading weights. The format: 8 bytes of the header's length, the header, and the tensors side by side to the end.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
FLOATS = {"F64", "F32", "F16", "BF16"}
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the format's own bound


def find_weight_problem(folder: Path) -> str:
    """What keeps the weights from being loaded, or ''. Files of other formats are transformers' to judge."""
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
        if not file.exists():
            return f"{file} is missing, {INDEX} names it"
        try:
            kinds = {name: str(entry.get("dtype")) for name, entry in read_header(file).items()}
        except (OSError, ValueError) as error:
            return f"{file} is damaged: {error}"
        odd = sorted(name for name, kind in kinds.items() if kind not in FLOATS)
        if odd:
            return f"{file} holds {odd[0]} as {kinds[odd[0]]}: quantized weights cannot be trained"
    return ""


def list_weight_files(folder: Path) -> list[Path]:
    """Those that the index names; without one, all that are there. ValueError: the index cannot be read."""
    index = folder / INDEX
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / str(name) for name in sorted(names)]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} cannot be read: {error}") from None


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Name -> dtype, shape and place of each tensor. ValueError: not a whole file of this format."""
    size = os.path.getsize(file)
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
        if not 0 < length <= min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
            raise ValueError(f"its {size} bytes do not hold the header that they announce")
        found = json.loads(opened.read(length))
    if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
        raise ValueError("its header is no table of tensors")
    found.pop("__metadata__", None)
    try:
        end = max((int(entry["data_offsets"][1]) for entry in found.values()), default=0)
    except (KeyError, IndexError, TypeError, ValueError):
        raise ValueError("its header does not say where tensors lie") from None
    if LENGTH_BYTES + length + end != size:
        raise ValueError(f"it has {size} bytes, its header describes {LENGTH_BYTES + length + end}")
    return found


def list_weight_names(folder: Path) -> list[str]:
    """Of every tensor in a folder that was found to be in order."""
    return sorted(name for file in list_weight_files(folder) for name in read_header(file))
