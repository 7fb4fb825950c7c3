"""Blocks of raw documents, with their places: what one worker decodes and tokenizes at a time. Opens plain and
compressed files, bounds how far they expand, and says which byte of a text is not UTF-8.

A block is sent to a worker process undecoded; the worker decodes it. A file beyond the bound raises DataError."""

from __future__ import annotations

import gzip
import io
import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from ulysses_cli.plan.files import open_regular
from ulysses_cli.plan.problem import Problem, Where
from ulysses_cli.readers.problems import NOT_UTF8, BadRow, DataError

MAX_EXPANSION = 200  # very repetitive texts reach about 50
FREE_BYTES = 256 << 20  # up to this size any expansion is allowed
LIBRARY_BYTES = 1 << 30  # for a library that reads a file: metadata, and two copies of what it decodes


class Expansion:
    """Counts the bytes that one file has expanded to."""

    def __init__(self, file: Path) -> None:
        self.file, self.num_bytes = file, 0
        self.limit = max(FREE_BYTES, MAX_EXPANSION * file.stat().st_size)

    def add(self, num_bytes: int) -> None:
        """Counts bytes that were read from the file."""
        self.num_bytes += num_bytes
        self.check(self.num_bytes)

    def check(self, num_bytes: int) -> None:
        """Raises if so many bytes in all are too many."""
        if num_bytes > self.limit:
            raise self.refuse(f"expands to more than {self.describe_limit()}")

    def describe_limit(self) -> str:
        return f"{self.limit / 2**20:,.0f} MiB, {MAX_EXPANSION} times what it takes on disk"

    def refuse(self, message: str) -> DataError:
        hint = "leave it out, or unpack it yourself if its content is intended"
        return DataError([Problem("", message, hint, Where(str(self.file)))])

    @contextmanager
    def limit_memory(self) -> Iterator[None]:
        """Limits the address space of this process while a library decodes, so that it fails with MemoryError instead
        of taking all memory. The limit is what the process has now, plus the file's bound, plus LIBRARY_BYTES."""
        with open("/proc/self/statm", encoding="ascii") as stream:
            current = int(stream.read().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = current + LIBRARY_BYTES + self.limit
        resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
        try:
            yield
        except MemoryError:
            message = f"cannot be read: it is damaged, or expands to more than {self.describe_limit()}"
            raise self.refuse(message) from None
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


PACKED = (".gz", ".zst")


def open_file(file: Path) -> BinaryIO:
    """Opens a plain file, or the content of a .gz or .zst file."""
    openers: dict[str, Callable[[Path], BinaryIO]] = {".gz": _open_gzip, ".zst": _open_zstd}
    opener = openers.get(file.suffix.lower())
    return open_regular(file) if opener is None else io.BufferedReader(_Bounded(file, opener(file)))


def _open_gzip(file: Path) -> BinaryIO:
    return gzip.open(open_regular(file), "rb")  # type: ignore[return-value]


def _open_zstd(file: Path) -> BinaryIO:
    import pyarrow

    stream: BinaryIO = pyarrow.CompressedInputStream(open_regular(file), "zstd")
    return stream


class _Bounded(io.RawIOBase):
    """A stream that raises when a file expands too far."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self.stream, self.expansion = stream, Expansion(file)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.stream.read(len(buffer))
        self.expansion.add(len(data))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self.stream.close()
        super().close()


def decode_line(line: bytes) -> str:
    """Raises BadRow."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow(_describe(line[error.start], error.start, "line")) from None


def find_damaged_line(content: bytes) -> tuple[int, BadRow]:
    """The number of the first line that is not UTF-8, in a file that is not. No character of several bytes holds the
    byte that ends a line."""
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            decode_line(line)
        except BadRow as bad:
            return number, bad
    raise ValueError("all lines are UTF-8")


def describe_damage(text: str, unit: str) -> str:
    """The first byte that is not UTF-8 in a text that was decoded with `surrogateescape`; '' if there is none.
    `unit` is what the text is called."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        before = text[: error.start].encode("utf-8", "surrogateescape")
        return _describe(ord(text[error.start]) & 0xFF, len(before), unit)
    return ""


def _describe(value: int, at: int, unit: str) -> str:
    return f"byte {at + 1:,} of the {unit}, 0x{value:02x}, {NOT_UTF8}"


BLOCK_BYTES = 4 << 20
NumberedRow = tuple[int, dict[str, Any] | BadRow]  # a line or row number with the row


@dataclass(frozen=True)
class Block:
    """`content` by kind: lines: list of bytes; rows: list of (line, row); table: a pyarrow table; tree: list of (path,
    bytes); text: the bytes of a file; bad: a message. `first` is the number of the first line or row."""

    file: str
    kind: Literal["lines", "rows", "table", "text", "tree", "bad"]
    content: Any
    num_bytes: int
    first: int = 1
    num_blank: int = 0


def walk_rows(block: Block) -> Iterator[NumberedRow]:
    """Each row of a block with its number, or a BadRow. Blank lines are not rows."""
    if block.kind == "lines":
        for number, line in enumerate(block.content, block.first):
            if line.strip():
                yield number, parse_line(line)
    elif block.kind == "rows":
        yield from block.content
    elif block.kind == "table":
        rows = block.content.to_pylist()
        yield from ((number, drop_nulls(row)) for number, row in enumerate(rows, block.first))
    elif block.kind == "tree":
        yield from _join_files(block)
    elif block.kind == "text":
        yield _decode_text(block.content)
    else:
        yield block.first, BadRow(block.content)


def drop_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the nulls that Arrow adds: it gives all mappings of a column the same keys."""
    return {name: _drop_nulls(value) if _holds_mappings(value) else value for name, value in row.items()}


def _holds_mappings(value: Any) -> bool:
    first = next((inner for inner in value if inner is not None), None) if isinstance(value, list) else value
    return isinstance(first, dict)


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_drop_nulls(inner) for inner in value] if isinstance(value, list) else value


def clean_message(error: json.JSONDecodeError) -> str:
    """Without the words that a place would follow."""
    return error.msg.removesuffix(" at").rstrip(": ")


def keep_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Of a key that stands twice all values but the last would be lost."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice in one object"
        )
    return row


def parse_line(line: bytes) -> dict[str, Any] | BadRow:
    """Parses one line of JSONL."""
    try:
        row = json.loads(decode_line(line).rstrip("\r\n"), object_pairs_hook=keep_each)
    except BadRow as bad:
        return bad
    except json.JSONDecodeError as error:
        return BadRow(f"malformed JSON: {clean_message(error)} at character {error.pos + 1:,} of the line")
    except (ValueError, RecursionError) as error:
        return BadRow(f"malformed JSON: {str(error).partition(';')[0]}")
    return row if isinstance(row, dict) else BadRow("a JSON value that is not an object; each line holds one row")


def count_blank(block: Block) -> int:
    return sum(not line.strip() for line in block.content) if block.kind == "lines" else block.num_blank


def _decode_text(content: bytes) -> NumberedRow:
    """A file as one document, without a byte order mark. A NUL is in no text: UTF-16 without a mark is full of them,
    and so is what a crash leaves of a file."""
    if (at := content.find(0)) >= 0:
        start = content.rfind(b"\n", 0, at) + 1
        return content.count(b"\n", 0, at) + 1, BadRow(
            f"byte {at - start + 1:,} of the line is NUL, which no text holds"
        )
    try:
        return 0, {"text": content.decode("utf-8-sig")}
    except UnicodeDecodeError:
        return find_damaged_line(content)


def _join_files(block: Block) -> Iterator[NumberedRow]:
    """All files of a tree as one document, each under a header with its path."""
    parts = []
    for path, content in block.content:
        line, row = _decode_text(content)
        if isinstance(row, BadRow):
            yield line, BadRow(f"{path}: {row}")
        else:
            parts.append(f"{make_header(path)}{row['text']}")
    if parts:
        yield 0, {"text": "".join(part if part.endswith("\n") else part + "\n" for part in parts)}


def make_header(path: str) -> str:
    """The line above each file of a tree."""
    return f"=== {path} ===\n"
