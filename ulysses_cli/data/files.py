"""Plain files -> blocks: JSONL, JSON, Parquet, Arrow, CSV, text; .gz and .zst around any of them.

A file that cannot be read is an error with its name; what a row holds is not looked at here.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ulysses_cli.data.blocks import BLOCK_BYTES, Block, Found
from ulysses_cli.data.problems import BadRow, DataError
from ulysses_cli.plan.problem import Problem, Where

LINES, TABLES = (".jsonl", ".ndjson"), (".parquet", ".arrow")
ROWS = (*LINES, *TABLES, ".json", ".csv", ".tsv")
TEXTS = (".txt", ".md")
PACKED = (".gz", ".zst")
BOM = b"\xef\xbb\xbf"
ROWS_PER_BLOCK = 1000


def get_format(path: Path) -> str:
    """The suffix that tells what is inside, without that of a compression."""
    name = path.name.lower()
    for packed in PACKED:
        name = name.removesuffix(packed)
    return os.path.splitext(name)[1]


def list_files(path: str | None, data_files: Sequence[str] | None) -> list[Path]:
    """What a source names, in a stable order: files, patterns, or all data files of a folder."""
    base = Path(os.path.expanduser(path or "."))
    if not data_files:
        return _expand(base)
    return [file for name in data_files for file in _expand(base / os.path.expanduser(name))]


def _expand(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file, path))
        rows = [file for file in inside if get_format(file) in ROWS]
        return rows or [file for file in inside if get_format(file) in TEXTS]
    return sorted(Path(found) for found in glob.glob(str(path), recursive=True) if os.path.isfile(found))


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
    readers = {".parquet": _walk_parquet, ".arrow": _walk_arrow, ".json": _walk_json, ".csv": _walk_csv}
    return readers.get(kind) or (_walk_csv if kind == ".tsv" else _walk_text)


def _open(file: Path) -> BinaryIO:
    name = file.name.lower()
    if name.endswith(".gz"):
        return gzip.open(file, "rb")  # type: ignore[return-value]
    if name.endswith(".zst"):
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))
    return open(file, "rb")


def _walk_lines(file: Path) -> Iterator[Block]:
    with _open(file) as stream:
        number = 1
        while lines := stream.readlines(BLOCK_BYTES):
            size = sum(map(len, lines))
            if number == 1:
                lines[0] = lines[0].removeprefix(BOM)
            yield Block(str(file), "lines", lines, size, number)
            number += len(lines)


def _walk_text(file: Path) -> Iterator[Block]:
    with _open(file) as stream:
        content = stream.read()
    yield Block(str(file), "text", content, len(content))


def _walk_json(file: Path) -> Iterator[Block]:
    """A list of rows, one row, or lines under the wrong suffix."""
    with _open(file) as stream:
        start = stream.read(4096).removeprefix(BOM).lstrip()
    if start.startswith(b"{") and _is_object(start.split(b"\n")[0] if b"\n" in start else b""):
        yield from _walk_lines(file)
        return
    with _open(file) as stream:
        content = stream.read()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        where = Where(str(file), line, 1)
        raise DataError([Problem("", "not valid UTF-8", "save the file as UTF-8", where)]) from None
    yield from _group(str(file), _parse_json(text, str(file)), len(content))


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
    with _open(file) as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream, delimiter="\t" if get_format(file) == ".tsv" else ",", strict=True)
        yield from _group(str(file), _read_csv(reader), None)


def _read_csv(reader: csv.DictReader[str]) -> Iterator[Found]:
    names = reader.fieldnames or ()
    line = reader.line_num + 1
    for row in reader:
        if None in row or None in row.values():
            count = len(names) + len(row.get(None) or ()) - sum(value is None for value in row.values())
            yield line, BadRow(f"{count} fields where the header has {len(names)}")
        else:
            yield line, dict(row)
        line = reader.line_num + 1


def _group(file: str, rows: Iterator[Found], num_bytes: int | None) -> Iterator[Block]:
    """Rows in blocks of about the same size."""
    part: list[Found] = []
    size = 0
    for line, row in rows:
        part.append((line, row))
        size += sum(len(value) for value in row.values() if isinstance(value, str)) if isinstance(row, dict) else 0
        if len(part) >= ROWS_PER_BLOCK or size >= BLOCK_BYTES:
            yield Block(file, "rows", part, size if num_bytes is None else 0)
            part, size = [], 0
    yield Block(file, "rows", part, size if num_bytes is None else num_bytes)


def _walk_parquet(file: Path) -> Iterator[Block]:
    from pyarrow import parquet

    with _open(file) as raw:
        source: Any = file if not file.name.lower().endswith(PACKED) else io.BytesIO(raw.read())
    with parquet.ParquetFile(source) as opened:
        yield from _walk_batches(str(file), opened.iter_batches(batch_size=ROWS_PER_BLOCK))


def _walk_arrow(file: Path) -> Iterator[Block]:
    import pyarrow

    with _open(file) as raw:
        content = pyarrow.py_buffer(raw.read()) if file.name.lower().endswith(PACKED) else None
    source = content if content is not None else pyarrow.memory_map(str(file))
    try:
        opened = pyarrow.ipc.open_file(source)
        batches: Iterator[Any] = (opened.get_batch(index) for index in range(opened.num_record_batches))
    except pyarrow.ArrowInvalid:
        if content is None:
            source.seek(0)
        batches = iter(pyarrow.ipc.open_stream(source))
    yield from _walk_batches(str(file), batches)


def _walk_batches(file: str, batches: Iterator[Any]) -> Iterator[Block]:
    import pyarrow

    number = 1
    for batch in batches:
        rows = max(1, min(ROWS_PER_BLOCK, BLOCK_BYTES * batch.num_rows // max(1, batch.nbytes)))
        for first in range(0, batch.num_rows, rows):
            part = batch.slice(first, rows)
            yield Block(file, "table", pyarrow.Table.from_batches([part]), part.nbytes, number + first)
        number += batch.num_rows
