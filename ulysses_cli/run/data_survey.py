"""A quick look at a source of documents before it is tokenized: how many bytes it has, and how long its longest
document may be. Reads names and sizes, and of files of rows only the first ones, with the reader that `prepare`
uses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ulysses_cli.plan.files import get_scheme
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.recipe.sections import RowType
from ulysses_cli.plan.rules.files import HUB_NAME
from ulysses_cli.plan.units import format_count
from ulysses_cli.readers.blocks import PACKED
from ulysses_cli.readers.files import LINES, ROWS, TEXTS, get_format, has_lines, list_files, walk_blocks
from ulysses_cli.readers.pairs import Origin, find_kind, read_first_rows
from ulysses_cli.readers.problems import DataError

SAMPLE_BYTES = 64 << 20
FIRST = "data.datasets.0"  # the source's key in the recipe that is written
JUDGED: tuple[RowType, ...] = ("preference", "unpaired")
ROW_NOUNS: dict[RowType, str] = {
    "chat": "chats",
    "conversations": "chats",
    "completion": "prompts with completions",
    "answers": "prompts with several completions",
    "instruction": "instructions",
    "tokens": "rows of tokens",
    "text": "texts",
    "preference": "pairs of answers",
    "unpaired": "answers with labels",
}


@dataclass(frozen=True)
class Survey:
    """What a look at a source shows. Sizes are None where only reading it would tell. `is_tree`: a tree of files of all
    kinds, such as a code repository, which is one document. `kind`: what the rows hold, None where they were not looked
    at. `refusal`: why the first rows cannot be used."""

    path: str
    summary: str
    num_bytes: int | None = None
    longest_bytes: int | None = None
    num_documents: int | None = None
    is_tree: bool = False
    kind: RowType | None = None
    refusal: tuple[Problem, ...] = ()


def survey_data(path: str) -> Survey:
    """Raises RecipeError if there is no such source."""
    place = Path(os.path.expanduser(path))
    if get_scheme(path):
        return Survey(path, "on a remote disk: train and prepare download it")
    if place.is_file():
        return _look_at_rows(_survey_files(path, [place]))
    if any((place / name).is_file() for name in ("state.json", "dataset_dict.json")):
        num_bytes = sum(file.stat().st_size for file in place.rglob("*.arrow"))
        return Survey(path, f"a data set that was saved to disk, {num_bytes:,} bytes", num_bytes)
    if place.is_dir():
        files = [file for file in place.rglob("*") if _is_visible(file, place) and file.is_file()]
        rows = [file for file in files if get_format(file) in ROWS]
        chosen = rows or [file for file in files if get_format(file) in TEXTS]
        if len(chosen) * 2 >= len(files) > 0:
            return _look_at_rows(_survey_files(path, chosen))
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


def _look_at_rows(survey: Survey) -> Survey:
    """Adds what the first rows hold, as the reader that `prepare` uses finds it."""
    paths = list_files(survey.path, None).files
    if all(get_format(file) not in ROWS for file in paths):
        return replace(survey, kind="text")
    if get_format(paths[0]) == ".json" and paths[0].stat().st_size > SAMPLE_BYTES:
        return survey  # a list of rows is read whole
    origin = Origin(FIRST, survey.path, has_lines(paths))
    for kind in JUDGED:  # a chat may have a rejected answer beside it, a completion a label
        with suppress(DataError):
            return _describe_rows(survey, kind, *read_first_rows(walk_blocks(paths), kind, origin))
    try:
        kind = find_kind(walk_blocks(paths), origin)
        return _describe_rows(survey, kind, *read_first_rows(walk_blocks(paths), kind, origin))
    except DataError as error:
        return replace(survey, refusal=error.problems)


def _describe_rows(survey: Survey, kind: RowType, num_rows: int, has_more: bool) -> Survey:
    summary = f"{survey.summary}: {ROW_NOUNS[kind]}"
    return replace(survey, summary=summary, kind=kind, num_documents=None if has_more else num_rows)


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
