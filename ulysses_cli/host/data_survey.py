"""A quick look at a source of documents before it is tokenized: how many bytes it has, and how long its longest
document may be. Reads names and sizes, and of files of lines only the first megabytes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ulysses_cli.plan.files.addresses import get_scheme
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.rules.files import HUB_NAME
from ulysses_cli.readers.compressed_files import PACKED
from ulysses_cli.readers.files import LINES, ROWS, TEXTS, get_format

SAMPLE_BYTES = 64 << 20


@dataclass(frozen=True)
class Survey:
    """What a look at a source shows. Sizes are None where only reading it would tell. `is_tree`: a tree of files of all
    kinds, such as a code repository, which is one document."""

    path: str
    summary: str
    num_bytes: int | None = None
    longest_bytes: int | None = None
    num_documents: int | None = None
    is_tree: bool = False


def survey_data(path: str) -> Survey:
    """Raises RecipeError if there is no such source."""
    place = Path(os.path.expanduser(path))
    if get_scheme(path):
        return Survey(path, "on a remote disk: train and prepare download it")
    if place.is_file():
        return _survey_files(path, [place])
    if place.is_dir():
        files = [file for file in place.rglob("*") if _is_visible(file, place) and file.is_file()]
        rows = [file for file in files if get_format(file) in ROWS]
        chosen = rows or [file for file in files if get_format(file) in TEXTS]
        if len(chosen) * 2 >= len(files) > 0:
            return _survey_files(path, chosen)
        if not files:
            raise RecipeError([Problem("--data", f"{path} holds no file", "name a folder with documents")])
        num_bytes = sum(file.stat().st_size for file in files)
        return Survey(
            path, f"{format_count(len(files), 'file')} of all kinds as one document", num_bytes, num_bytes, 1, True
        )
    if HUB_NAME.fullmatch(path) and "/" in path:
        return Survey(path, "a data set of the hub, which is read when it is downloaded")
    hint = "name a file, a folder or a data set of the hub (owner/name)"
    raise RecipeError([Problem("--data", f"{path} does not exist", hint)])


def _survey_files(path: str, files: Sequence[Path]) -> Survey:
    num_bytes, longest, is_known = 0, 0, True
    for file in files:
        size = file.stat().st_size
        num_bytes += size
        if file.suffix in PACKED or get_format(file) not in (*LINES, *TEXTS):
            is_known = False
        elif get_format(file) in LINES:
            longest = max(longest, _measure_lines(file))
        else:
            longest = max(longest, size)
    summary = f"{format_count(len(files), 'file')}, {num_bytes:,} bytes"
    are_texts = all(get_format(file) in TEXTS for file in files)
    return Survey(path, summary, num_bytes, longest if is_known else None, len(files) if are_texts else None)


def _measure_lines(file: Path) -> int:
    """Returns the bytes of the longest of the first lines."""
    longest = num_read = 0
    with open(file, "rb") as stream:
        for line in stream:
            longest, num_read = max(longest, len(line)), num_read + len(line)
            if num_read >= SAMPLE_BYTES:
                break
    return longest


def _is_visible(file: Path, folder: Path) -> bool:
    return not any(part.startswith(".") for part in file.relative_to(folder).parts)
