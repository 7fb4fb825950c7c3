"""Lists data files and reads them as blocks: JSONL, JSON, Parquet, Arrow, CSV and text, also as .gz or .zst.

A file that cannot be read raises DataError with its name. Does not look at the content of rows. Does not trust a
file's metadata: batches of tables are decoded in bounded memory and are small enough for Python lists."""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from ulysses_cli.plan.files import describe_special, expand_pattern
from ulysses_cli.plan.problem import Problem, Where
from ulysses_cli.plan.units import format_count
from ulysses_cli.readers.blocks import (
    BLOCK_BYTES,
    PACKED,
    Block,
    Expansion,
    NumberedRow,
    clean_message,
    describe_damage,
    keep_each,
    open_file,
)
from ulysses_cli.readers.problems import BadRow, DataError, explain_bad_rows

ROWS_PER_BLOCK = 1000
VALUE_BYTES = 8  # of any value in a Python list


def walk_parquet(file: Path) -> Iterator[Block]:
    from pyarrow import parquet

    def open_batches() -> Iterator[Any]:
        with parquet.ParquetFile(_open(file)) as opened:
            expansion.check(VALUE_BYTES * opened.metadata.num_rows)
            yield from opened.iter_batches(batch_size=ROWS_PER_BLOCK, use_threads=False)

    expansion = Expansion(file)
    yield from _walk_batches(expansion, open_batches)


def walk_arrow(file: Path) -> Iterator[Block]:
    import pyarrow

    def open_batches() -> Iterator[Any]:
        options = pyarrow.ipc.IpcReadOptions(use_threads=False)
        source = _open(file)
        try:
            opened = pyarrow.ipc.open_file(source, options=options)
            batches: Iterator[Any] = (opened.get_batch(index) for index in range(opened.num_record_batches))
        except pyarrow.ArrowInvalid:
            source.seek(0)
            batches = iter(pyarrow.ipc.open_stream(source, options=options))
        for batch in batches:
            # the offsets of texts come from the file: a wrong one would read memory outside of the batch
            batch.validate(full=True)
            yield batch

    yield from _walk_batches(Expansion(file), open_batches)


def _open(file: Path) -> Any:
    """Opens a file without a memory map: a map of a file that is truncated meanwhile would kill this process."""
    import pyarrow

    with open_file(file) as raw:
        if file.name.lower().endswith(PACKED):
            return io.BytesIO(raw.read())
    return pyarrow.OSFile(str(file))


def _walk_batches(expansion: Expansion, open_batches: Callable[[], Iterator[Any]]) -> Iterator[Block]:
    import pyarrow

    # Other pools reserve address space in advance, which limit_memory would count.
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    batches, number = open_batches(), 1
    while True:
        with expansion.limit_memory():
            batch = next(batches, None)
            if batch is None:
                return
            size = measure(pyarrow.StructArray.from_arrays(batch.columns, fields=list(batch.schema)))
        expansion.add(size)
        rows = max(1, min(ROWS_PER_BLOCK, BLOCK_BYTES * batch.num_rows // max(1, size)))
        for first in range(0, batch.num_rows, rows):
            part = batch.slice(first, rows)
            table = pyarrow.Table.from_batches([part])
            yield Block(str(expansion.file), "table", table, part.nbytes, number + first)
        number += batch.num_rows


def measure(array: Any) -> int:
    """The bytes of an array's values as Python objects. A dictionary entry counts each time it is used."""
    import pyarrow
    from pyarrow import compute, types

    kind, value_bytes = array.type, VALUE_BYTES * len(array)
    if types.is_struct(kind):
        return value_bytes + sum(measure(part) for part in array.flatten())
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) or types.is_map(kind):
        return value_bytes + measure(array.flatten())
    if types.is_dictionary(kind):
        whole = measure(array.dictionary)
        if not (types.is_string(kind.value_type) or types.is_large_string(kind.value_type)):
            return value_bytes + whole * len(array)
        lengths = compute.take(compute.binary_length(array.dictionary), array.indices)
        return value_bytes + int(compute.sum(lengths).as_py() or 0)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        views = memoryview(array.buffers()[1]).cast("i")[::4][array.offset : array.offset + len(array)]
        return value_bytes + sum(max(0, length) for length in views)  # 16 bytes each, of which the first 4 are a length
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return value_bytes + int(compute.sum(compute.binary_length(array)).as_py() or 0)
    if types.is_run_end_encoded(kind) or types.is_list_view(kind) or types.is_large_list_view(kind):
        raise pyarrow.ArrowNotImplementedError(f"columns of type {str(kind)[:40]} are not read")
    return value_bytes


LINES, TABLES = (".jsonl", ".ndjson"), (".parquet", ".arrow")
ROWS = (*LINES, *TABLES, ".json", ".csv", ".tsv")
TEXTS = (".txt", ".md")
BOM = b"\xef\xbb\xbf"
OTHER_SIGNS = ";\t|"  # that part fields, in files of other programs
MAX_ROW_BYTES = 64 << 20  # of one row: sixteen million tokens of English


def get_format(path: Path) -> str:
    """The suffix that names the file's format, without the suffix of a compression."""
    name = path.name.lower()
    for packed in PACKED:
        name = name.removesuffix(packed)
    return os.path.splitext(name)[1]


@dataclass
class Listing:
    """The files of a source, each once. `left_out` counts the files that are not read by reason, with one example."""

    files: list[Path] = field(default_factory=list)
    left_out: dict[str, dict[str, Any]] = field(default_factory=dict)

    def leave_out(self, reason: str, files: Sequence[Path]) -> None:
        if files:
            entry = self.left_out.setdefault(reason, {"count": 0, "example": str(files[0])})
            entry["count"] += len(files)


def list_files(path: str | None, data_files: Sequence[str] | None, output_folders: Sequence[Path] = ()) -> Listing:
    """The files that a source names, in a stable order: files, patterns, or all data files of a folder. Files below
    `output_folders`, which runs write to, are no data."""
    base = Path(os.path.expanduser(path or "."))
    listing, seen = Listing(), set[str]()
    for name in data_files or [""]:
        for file in _expand(base / os.path.expanduser(name), listing, output_folders):
            real = os.path.realpath(file)
            if real in seen:
                listing.leave_out("file named twice, read once", [file])
            else:
                seen.add(real)
                listing.files.append(file)
    return listing


def _expand(path: Path, listing: Listing, output_folders: Sequence[Path]) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file, path))
        outputs = [folder.resolve() for folder in output_folders]
        inside = [file for file in inside if not any(folder in file.resolve().parents for folder in outputs)]
        rows = [file for file in inside if get_format(file) in ROWS]
        texts = [file for file in inside if get_format(file) in TEXTS]
        listing.leave_out("file of another format", [file for file in inside if file not in {*rows, *texts}])
        listing.leave_out("text file beside files of rows, not read", texts if rows else [])
        return rows or texts
    matches = [Path(name) for name in expand_pattern(str(path))]
    listing.leave_out("special file", [file for file in matches if describe_special(file) not in ("", "a folder")])
    return [file for file in matches if file.is_file()]


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def has_lines(files: Sequence[Path]) -> bool:
    """Whether rows are numbered by lines of text, as an editor shows them."""
    return not any(get_format(file) in TABLES for file in files)


def walk_blocks(files: Sequence[Path]) -> Iterator[Block]:
    """The blocks of all files, one file after another. Raises DataError for a file that cannot be read."""
    for file in files:
        walk = _choose_reader(file)
        try:
            yield from walk(file)
        except (DataError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - each format's library has errors of its own
            reason = getattr(error, "strerror", None) or str(error).split("\n")[0] or type(error).__name__
            hint = "check that the file is complete and that its suffix matches its format"
            raise DataError([Problem("", f"cannot be read: {reason}", hint, Where(str(file)))]) from None


def _choose_reader(file: Path) -> Callable[[Path], Iterator[Block]]:
    kind = get_format(file)
    if kind in LINES:
        return _walk_lines
    readers = {".parquet": walk_parquet, ".arrow": walk_arrow, ".json": _walk_json, ".csv": _walk_csv}
    return readers.get(kind) or (_walk_csv if kind == ".tsv" else _walk_text)


def is_blank(file: Path) -> bool:
    """Whether a text file is empty or holds white space alone."""
    if get_format(file) in ROWS:
        return False
    with open_file(file) as stream:
        return all(not part.removeprefix(BOM).strip() for part in iter(lambda: stream.read(BLOCK_BYTES), b""))


def _walk_lines(file: Path) -> Iterator[Block]:
    with open_file(file) as stream:
        number = 1
        while lines := _read_lines(stream, Where(str(file), number, 1)):
            size = sum(map(len, lines))
            if number == 1:
                lines[0] = lines[0].removeprefix(BOM)
            yield Block(str(file), "lines", lines, size, number)
            number += len(lines)


def _read_lines(stream: BinaryIO, first: Where) -> list[bytes]:
    """The next lines, of about a block's size. `first`: the place of the first of them."""
    lines, size = list[bytes](), 0
    while size < BLOCK_BYTES and (line := stream.readline(MAX_ROW_BYTES + 1)):
        if len(line) > MAX_ROW_BYTES:
            message = f"this line is longer than {MAX_ROW_BYTES >> 20} MiB"
            hint = "a line holds one row: end each with a line break, or split the document"
            raise DataError([Problem("", message, hint, replace(first, line=first.line + len(lines)))])
        lines.append(line)
        size += len(line)
    return lines


def _walk_text(file: Path) -> Iterator[Block]:
    with open_file(file) as stream:
        content = stream.read()
    yield Block(str(file), "text", content, len(content))


def _walk_json(file: Path) -> Iterator[Block]:
    """Reads a list of rows, a single row, or JSONL with the suffix .json."""
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


def _find_damaged(text: str, file: str) -> Iterator[NumberedRow]:
    """The rows of a text that is not valid UTF-8. The caller decoded its invalid bytes to lone surrogates; a row that
    holds one is bad."""
    lines = text.split("\n")
    damaged = {number: why for number, line in enumerate(lines, 1) if (why := describe_damage(line, "line"))}
    rows = list(_parse_json(text, file))
    ends = [line for line, _ in rows[1:]] + [len(lines) + 1]
    for (line, row), end in zip(rows, ends, strict=True):
        inside = [number for number in damaged if line <= number < max(end, line + 1)]
        is_damaged = bool(inside) and isinstance(row, dict) and describe_damage(json.dumps(row, ensure_ascii=False), "")
        yield (inside[0], BadRow(damaged[inside[0]])) if is_damaged else (line, row)


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _parse_json(text: str, file: str) -> Iterator[NumberedRow]:
    """The elements of a list, each with its line, or the single row that the text holds."""
    decoder = json.JSONDecoder(object_pairs_hook=keep_each)
    at = 0
    line = 1
    counted = 0

    def skip(at: int, letters: str) -> int:
        while at < len(text) and text[at] in letters:
            at += 1
        return at

    try:
        at = skip(at, " \t\r\n")
        is_list = text[at : at + 1] == "["
        at = skip(at + 1 if is_list else at, " \t\r\n")
        is_open = is_list and text[at : at + 1] != "]"
        while is_open or (not is_list and at < len(text)):
            line, counted = line + text.count("\n", counted, at), at
            row, at = decoder.raw_decode(text, at)
            yield line, row if isinstance(row, dict) else BadRow("a JSON value that is not an object")
            at = skip(at, " \t\r\n")
            if is_list and text[at : at + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
            is_open = is_list and text[at] == ","
            at = skip(at + 1 if is_open else at, " \t\r\n")
        if is_list and skip(at + 1, " \t\r\n") < len(text):
            raise json.JSONDecodeError("Extra data after the list", text, skip(at + 1, " \t\r\n"))
    except json.JSONDecodeError as error:
        raise _refuse(clean_message(error).removesuffix(" starting"), Where(file, error.lineno, error.colno)) from None
    except (ValueError, RecursionError) as error:
        raise _refuse(str(error).partition(";")[0], Where(file, line, 1)) from None


def _refuse(reason: str, where: Where) -> DataError:
    hint = "one object per line, with the suffix .jsonl, is easier to fix"
    return DataError([Problem("", f"malformed JSON: {reason}", hint, where)])


def _walk_csv(file: Path) -> Iterator[Block]:
    csv.field_size_limit(MAX_ROW_BYTES)
    with open_file(file) as raw, io.TextIOWrapper(raw, "utf-8-sig", "surrogateescape", newline="") as stream:
        rows = csv.reader(stream, delimiter="\t" if get_format(file) == ".tsv" else ",", strict=True)
        yield from _group(str(file), _read_csv(rows, str(file)), None)


def _read_csv(rows: Any, file: str) -> Iterator[tuple[int, dict[str, Any] | BadRow | None]]:
    """The rows after the header, with their lines; None for a blank line."""
    names: list[str] = next((row for row in rows if row), [])
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        message = f"the header names column `{repeated[0]}` more than once"
        raise DataError([Problem("", message, "fix the header", Where(file, rows.line_num, 1))])
    if damage := describe_damage("".join(names), "header"):
        raise DataError(explain_bad_rows([(file, rows.line_num, damage)], 1, "name another file"))
    if len(names) == 1 and (other := next((sign for sign in OTHER_SIGNS if sign in names[0]), "")):
        shown = "tabs" if other == "\t" else f"`{other}`"
        message = f"the header is one column, {names[0]!r}: its fields seem to be parted by {shown}"
        raise DataError(
            [Problem("", message, "save it with commas, or with tabs as .tsv", Where(file, rows.line_num, 1))]
        )
    units = [f"column `{name}`" for name in names]
    while True:
        line = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            if "unexpected end" in str(error):  # all rows after the quote would be lost as part of this one
                message = "a quote that opens in this row is not closed before the end of the file"
                raise DataError([Problem("", message, "fix the row", Where(file, line, 1))]) from None
            yield line, BadRow(f"malformed CSV: {error}")
            continue
        if row is None:
            return
        if row and len(row) != len(names):
            yield line, BadRow(f"{format_count(len(row), 'field')} where the header has {len(names)}")
        elif damage := next(filter(None, map(describe_damage, row, units)), ""):
            yield line, BadRow(damage)
        else:
            yield line, dict(zip(names, row, strict=True)) if row else None


def _group(
    file: str, rows: Iterator[tuple[int, dict[str, Any] | BadRow | None]], num_bytes: int | None
) -> Iterator[Block]:
    """Groups rows into blocks of about the same size."""
    part: list[NumberedRow] = []
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
