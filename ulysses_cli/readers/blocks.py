"""Blocks of raw documents, with their places: what one worker decodes and tokenizes at a time.

A block is sent to a worker process undecoded; the worker decodes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ulysses_cli.readers.decoding import decode_line, find_damaged_line
from ulysses_cli.readers.problems import BadRow

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
