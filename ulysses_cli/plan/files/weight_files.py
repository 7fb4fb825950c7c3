"""Checks a model folder's weight files before anything is started, by their JSON headers and without reading weights.

The format (safetensors): 8 bytes with the header's length, the header, and the tensors one after another to the end.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json
from typing_extensions import TypedDict

from ulysses_cli.plan.files.regular_files import open_regular, read_regular

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
