"""Text, JSON and problems on the terminal. stdout is data, stderr is talk; nothing outside this room prints.

Whatever is written here may hold words of others: it comes without secrets, and moves no cursor.
"""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.problem import Problem
from ulysses_cli.plan.secrets import MASK, collect_secrets, mask_text

LINES = "\n\t"
JOINERS = "\u200c\u200d"  # of letters and of emoji; they are written in Persian and Hindi
STYLES = {"bold": "1", "red": "31", "yellow": "33"}


def print_data(text: str) -> None:
    """To stdout. A reader that has gone away (`| head`) is no failure."""
    try:
        write_to(sys.stdout, hide_secrets(text))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def reserve_stdout() -> Iterator[None]:
    """For print_data alone: what libraries and a model's own code write there in between is talk."""
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(answer, 1)
        os.close(answer)


def print_talk(text: str) -> None:
    """What is said lands in logs of clusters: without what looks like a secret."""
    write_to(sys.stderr, hide_secrets(text))


def hide_secrets(text: str) -> str:
    """By their look, and by the values that the environment names as secret."""
    return mask_text(text, collect_secrets({}, os.environ))


def hide_known(text: str) -> str:
    """Of a page, whose own code may look like anything: only the values that the environment names."""
    for secret in sorted(collect_secrets({}, os.environ), key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text


def clean_text(text: str, keep: str = "") -> str:
    """The one cleaner for words of others, such as names of files and columns, samples and messages: one line in which
    nothing moves the cursor, hides or turns letters round. What is not in `keep` is shown as Python would write it."""
    if text.isprintable():
        return text
    return "".join(letter if _is_harmless(letter) or letter in keep else _spell(letter) for letter in text)


def _is_harmless(letter: str) -> bool:
    return letter.isprintable() or unicodedata.category(letter) == "Zs" or letter in JOINERS


def _spell(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


def write_to(stream: TextIO, text: str) -> None:
    """Lines without control characters."""
    _write_clean(stream, clean_text(text, LINES))


def _write_clean(stream: TextIO, text: str) -> None:
    """What the stream's encoding does not have is shown by its number."""
    encoding = stream.encoding or "utf-8"
    text = text if text.endswith("\n") else text + "\n"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def print_json(value: Any) -> None:
    """Controls as JSON writes them."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    if not text.replace("\n", "").isprintable():
        spelled = (letter if _is_harmless(letter) or letter == "\n" else json.dumps(letter)[1:-1] for letter in text)
        text = "".join(spelled)
    print_data(text)


def print_problems(problems: Sequence[Problem]) -> None:
    """All problems on stderr, a blank line after each hint, then their number."""
    for problem in problems:
        where, key, message, hint, *details = (
            clean_text(hide_secrets(part))
            for part in (str(problem.where), problem.key, problem.message, problem.hint, *problem.details)
        )
        head = ": ".join(part for part in (where, paint(key, "bold", sys.stderr), message) if part)
        _write_clean(sys.stderr, "\n  ".join((head, *details)))
        if hint:
            _write_clean(sys.stderr, f"\n{paint('hint:', 'yellow', sys.stderr)} {hint}\n\n")
    _write_clean(sys.stderr, paint(format_count(len(problems), "problem"), "red", sys.stderr))


def paint(text: str, style: str, stream: Any) -> str:
    """Colour for a terminal, plain text for everything else."""
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if text and stream.isatty() else text


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their content; the last one is left ragged."""
    table = [[clean_text(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    )
