"""Decodes the text of data files, and says which byte of a text is not UTF-8."""

from __future__ import annotations

from ulysses_cli.readers.problems import NOT_UTF8, BadRow


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
