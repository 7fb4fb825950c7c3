"""Plain files -> blocks: JSONL, JSON, Parquet, Arrow, CSV, text; .gz and .zst around any of them.

A file that cannot be read is an error with its name; what a row holds is not looked at here.
"""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ulysses_cli.data.problems import BadRow, DataError
from ulysses_cli.data.sources.blocks import BLOCK_BYTES, Block, Found
from ulysses_cli.data.sources.compressed_files import PACKED, open_file
from ulysses_cli.data.sources.tables import ROWS_PER_BLOCK, walk_arrow, walk_parquet
from ulysses_cli.plan.files.patterns import expand_pattern
from ulysses_cli.plan.files.regular_files import describe_special
from ulysses_cli.plan.problem import Problem, Where

LINES, TABLES = (".jsonl", ".ndjson"), (".parquet", ".arrow")
ROWS = (*LINES, *TABLES, ".json", ".csv", ".tsv")
TEXTS = (".txt", ".md")
BOM = b"\xef\xbb\xbf"


def get_format(path: Path) -> str:
    """The suffix that tells what is inside, without that of a compression."""
    name = path.name.lower()
    for packed in PACKED:
        name = name.removesuffix(packed)
    return os.path.splitext(name)[1]


@dataclass
class Listing:
    """The files of a source, each once, and what is not read and why: how many, and one of them."""

    files: list[Path] = field(default_factory=list)
    left_out: dict[str, dict[str, Any]] = field(default_factory=dict)

    def leave_out(self, why: str, found: Sequence[Path]) -> None:
        if found:
            entry = self.left_out.setdefault(why, {"count": 0, "example": str(found[0])})
            entry["count"] += len(found)


def list_files(path: str | None, data_files: Sequence[str] | None, own: Sequence[Path] = ()) -> Listing:
    """What a source names, in a stable order: files, patterns, or all data files of a folder but those in `own`, which
    runs write to."""
    base = Path(os.path.expanduser(path or "."))
    listing, seen = Listing(), set[str]()
    for name in data_files or [""]:
        for file in _expand(base / os.path.expanduser(name), listing, own):
            real = os.path.realpath(file)
            if real in seen:
                listing.leave_out("file named twice, read once", [file])
            else:
                seen.add(real)
                listing.files.append(file)
    return listing


def _expand(path: Path, listing: Listing, own: Sequence[Path]) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file, path))
        written = [folder.resolve() for folder in own]
        inside = [file for file in inside if not any(folder in file.resolve().parents for folder in written)]
        rows = [file for file in inside if get_format(file) in ROWS]
        texts = [file for file in inside if get_format(file) in TEXTS]
        listing.leave_out("file of another format", [file for file in inside if file not in {*rows, *texts}])
        listing.leave_out("text file beside files of rows, not read", texts if rows else [])
        return rows or texts
    found = [Path(name) for name in expand_pattern(str(path))]
    listing.leave_out("special file", [file for file in found if describe_special(file) not in ("", "a folder")])
    return [file for file in found if file.is_file()]


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def has_lines(files: Sequence[Path]) -> bool:
    """Whether a number beside a file's name is a line that an editor shows."""
    return not any(get_format(file) in TABLES for file in files)


def walk_blocks(files: Sequence[Path]) -> Iterator[Block]:
    """All files, one after another."""
    for file in files:
        walk = _choose_reader(file)
        try:
            yield from walk(file)
        except DataError:
            raise
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - each format's library has errors of its own
            reason = getattr(error, "strerror", None) or str(error).split("\n")[0] or type(error).__name__
            hint = "check that the file is whole and that its suffix tells its format"
            raise DataError([Problem("", f"cannot be read: {reason}", hint, Where(str(file)))]) from None


def _choose_reader(file: Path) -> Callable[[Path], Iterator[Block]]:
    kind = get_format(file)
    if kind in LINES:
        return _walk_lines
    readers = {".parquet": walk_parquet, ".arrow": walk_arrow, ".json": _walk_json, ".csv": _walk_csv}
    return readers.get(kind) or (_walk_csv if kind == ".tsv" else _walk_text)


def is_blank(file: Path) -> bool:
    """A text of white space alone, or of nothing."""
    if get_format(file) in ROWS:
        return False
    with open_file(file) as stream:
        return all(not part.removeprefix(BOM).strip() for part in iter(lambda: stream.read(BLOCK_BYTES), b""))


def _walk_lines(file: Path) -> Iterator[Block]:
    with open_file(file) as stream:
        number = 1
        while lines := stream.readlines(BLOCK_BYTES):
            size = sum(map(len, lines))
            if number == 1:
                lines[0] = lines[0].removeprefix(BOM)
            yield Block(str(file), "lines", lines, size, number)
            number += len(lines)


def _walk_text(file: Path) -> Iterator[Block]:
    with open_file(file) as stream:
        content = stream.read()
    yield Block(str(file), "text", content, len(content))


def _walk_json(file: Path) -> Iterator[Block]:
    """A list of rows, one row, or lines under the wrong suffix."""
    with open_file(file) as stream:
        start = stream.read(4096).removeprefix(BOM).lstrip()
    if start.startswith(b"{") and _is_object(start.split(b"\n")[0] if b"\n" in start else b""):
        yield from _walk_lines(file)
        return
    with open_file(file) as stream:
        content = stream.read()
    try:
        rows = _parse_json(content.decode("utf-8-sig"), str(file))
    except UnicodeDecodeError:
        rows = _find_damaged(content.decode("utf-8-sig", "surrogateescape"), str(file))
    yield from _group(str(file), rows, len(content))


def _find_damaged(text: str, file: str) -> Iterator[Found]:
    """Rows of a text in which some bytes are no UTF-8; those are lone surrogates now."""
    lines = text.split("\n")
    damaged = [number for number, line in enumerate(lines, 1) if not _is_text(line)]
    rows = list(_parse_json(text, file))
    ends = [line for line, _ in rows[1:]] + [len(lines) + 1]
    for (line, row), end in zip(rows, ends, strict=True):
        inside = [number for number in damaged if line <= number < max(end, line + 1)]
        is_damaged = bool(inside) and not _is_text(json.dumps(row, ensure_ascii=False) if isinstance(row, dict) else "")
        yield (inside[0], BadRow("not valid UTF-8; save the file as UTF-8")) if is_damaged else (line, row)


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _parse_json(text: str, file: str) -> Iterator[Found]:
    """The elements of a list, each with its line; or the one row that the text is."""
    decoder, at, line, counted = json.JSONDecoder(), 0, 1, 0

    def skip(at: int, letters: str) -> int:
        while at < len(text) and text[at] in letters:
            at += 1
        return at

    try:
        at = skip(at, " \t\r\n")
        is_list = text[at : at + 1] == "["
        at = skip(at + is_list, " \t\r\n")
        is_open = is_list and text[at : at + 1] != "]"
        while is_open or (not is_list and at < len(text)):
            line, counted = line + text.count("\n", counted, at), at
            row, at = decoder.raw_decode(text, at)
            yield line, row if isinstance(row, dict) else BadRow("a JSON value that is not an object")
            at = skip(at, " \t\r\n")
            if is_list and text[at : at + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
            is_open = is_list and text[at] == ","
            at = skip(at + is_open, " \t\r\n")
        if is_list and skip(at + 1, " \t\r\n") < len(text):
            raise json.JSONDecodeError("Extra data behind the list", text, skip(at + 1, " \t\r\n"))
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", line)
        hint = "one object per line with the suffix .jsonl is easier to mend"
        message = f"malformed JSON: {getattr(error, 'msg', error)}"
        raise DataError([Problem("", message, hint, Where(file, line, 1))]) from None


def _walk_csv(file: Path) -> Iterator[Block]:
    csv.field_size_limit(sys.maxsize)
    with open_file(file) as raw, io.TextIOWrapper(raw, "utf-8-sig", "surrogateescape", newline="") as stream:
        rows = csv.reader(stream, delimiter="\t" if get_format(file) == ".tsv" else ",", strict=True)
        yield from _group(str(file), _read_csv(rows, str(file)), None)


def _read_csv(rows: Any, file: str) -> Iterator[tuple[int, dict[str, Any] | BadRow | None]]:
    """Rows behind the header, with their lines; None for a blank line."""
    names: list[str] = next((row for row in rows if row), [])
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not _is_text("".join(names)):
        message = f"the header names column `{twice[0]}` more than once" if twice else "the header is not valid UTF-8"
        raise DataError([Problem("", message, "mend the header", Where(file, rows.line_num, 1))])
    while True:
        line = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            if "unexpected end" in str(error):  # all that follows the quote would be lost as one row
                message = "a quote that opens in this row is not closed before the end of the file"
                raise DataError([Problem("", message, "mend the row", Where(file, line, 1))]) from None
            yield line, BadRow(f"malformed CSV: {error}")
            continue
        if row is None:
            return
        if row and len(row) != len(names):
            yield line, BadRow(f"{len(row)} fields where the header has {len(names)}")
        elif not _is_text("".join(row)):
            yield line, BadRow("not valid UTF-8; save the file as UTF-8")
        else:
            yield line, dict(zip(names, row, strict=True)) if row else None


def _group(
    file: str, rows: Iterator[tuple[int, dict[str, Any] | BadRow | None]], num_bytes: int | None
) -> Iterator[Block]:
    """Rows in blocks of about the same size."""
    part: list[Found] = []
    size = num_blank = 0
    for line, row in rows:
        if row is None:
            num_blank += 1
            continue
        part.append((line, row))
        size += sum(len(value) for value in row.values() if isinstance(value, str)) if isinstance(row, dict) else 0
        if len(part) >= ROWS_PER_BLOCK or size >= BLOCK_BYTES:
            yield Block(file, "rows", part, size if num_bytes is None else 0, num_blank=num_blank)
            part, size, num_blank = [], 0, 0
    yield Block(file, "rows", part, size if num_bytes is None else num_bytes, num_blank=num_blank)
