"""Prints text, JSON and problems: data on stdout, messages on stderr. No code outside of report/ prints.

The text may come from users, files or models, so secrets are masked and control characters are escaped.
"""

from __future__ import annotations

import json
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from ulysses_cli.plan.problem import Problem
from ulysses_cli.plan.secrets import MASK, collect_secrets, mask_text
from ulysses_cli.plan.units import format_count

LINES = "\n\t"
JOINERS = "\u200c\u200d"  # join letters in Persian and Hindi, and parts of emoji
STYLES = {"bold": "1", "red": "31", "green": "32", "yellow": "33"}
CLASSES = {"green": re.compile(r"\[\[.*?\]\]", re.S), "yellow": re.compile(r"\(\(.*?\)\)", re.S)}


def print_data(text: str) -> None:
    """Prints to stdout. A reader that closes the pipe early (`| head`) is not an error."""
    try:
        write_to(sys.stdout, hide_secrets(text))
    except BrokenPipeError:
        discard_stdout()


def open_closed_streams() -> None:
    """Gives a process that was started without stdout or stderr (`>&-`) the null device in their place. Otherwise the
    next file that it opens would be taken for them."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_WRONLY)
            if handle != number:
                os.dup2(handle, number)
                os.close(handle)
            setattr(sys, name, os.fdopen(number, "w"))


def discard_stdout() -> None:
    """Drops what waits in the buffer. Otherwise Python tries to write it again when it exits, and exits with 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def reserve_stdout() -> Iterator[None]:
    """Sends stdout to stderr while libraries and a model's own code run, so that stdout holds only print_data's
    text."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def print_message(text: str) -> None:
    """Prints to stderr. Masks secrets, since clusters keep logs of stderr."""
    write_to(sys.stderr, hide_secrets(text))


def hide_secrets(text: str) -> str:
    """Masks what looks like a secret, and the values of secrets in the environment."""
    return mask_text(text, collect_secrets({}, os.environ))


def hide_known(text: str) -> str:
    """Masks the values of secrets in the environment, and nothing else: a page's own code may look like a secret."""
    for secret in sorted(collect_secrets({}, os.environ), key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text


def clean_text(text: str, keep: str = "") -> str:
    """Escapes, as Python does, every character that moves the cursor, is invisible or reverses the text, except those
    in `keep`. For text from outside, such as names of files and columns, samples and messages."""
    if text.isprintable():
        return text
    return "".join(letter if _is_harmless(letter) or letter in keep else _escape(letter) for letter in text)


def _is_harmless(letter: str) -> bool:
    return letter.isprintable() or unicodedata.category(letter) == "Zs" or letter in JOINERS


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


def write_to(stream: TextIO, text: str) -> None:
    """Writes lines without control characters."""
    _write_clean(stream, clean_text(text, LINES))


def _write_clean(stream: TextIO, text: str) -> None:
    """Escapes characters that the stream's encoding does not have."""
    encoding = stream.encoding or "utf-8"
    text = text if text.endswith("\n") else text + "\n"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def print_json(value: Any) -> None:
    """Prints JSON to stdout, with control characters as JSON escapes."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    if not text.replace("\n", "").isprintable():
        escaped = (letter if _is_harmless(letter) or letter == "\n" else json.dumps(letter)[1:-1] for letter in text)
        text = "".join(escaped)
    print_data(text)


def print_problems(problems: Sequence[Problem]) -> None:
    """Prints all problems to stderr, with a blank line after each and after each hint, then their number."""
    for problem in problems:
        where, key, message, hint, *details = (
            clean_text(hide_secrets(part))
            for part in (str(problem.where), problem.key, problem.message, problem.hint, *problem.details)
        )
        head = ": ".join(part for part in (where, paint(key, "bold", sys.stderr), message) if part)
        _write_clean(sys.stderr, "\n  ".join((head, *details)) + "\n\n")
        if hint:
            _write_clean(sys.stderr, f"{paint('hint:', 'yellow', sys.stderr)} {hint}\n\n")
    _write_clean(
        sys.stderr, paint(format_count(sum(problem.count for problem in problems), "problem"), "red", sys.stderr)
    )


def paint(text: str, style: str, stream: Any) -> str:
    """Colour for a terminal, plain text for everything else."""
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if text and stream.isatty() else text


def color_classes(text: str) -> str:
    """Samples for a terminal: targets green, what the assistant says besides yellow."""
    for style, marks in CLASSES.items():
        text = marks.sub(paint(r"\g<0>", style, sys.stdout), text)
    return text


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Pads each column to its widest cell. The last column is not padded."""
    table = [[clean_text(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    )
