"""Text, JSON and problems on the terminal. stdout is data, stderr is talk; nothing outside this room prints."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.problem import Problem
from ulysses_cli.plan.secrets import mask_text

STYLES = {"bold": "1", "red": "31", "yellow": "33"}


def print_data(text: str) -> None:
    """To stdout. A reader that has gone away (`| head`) is no failure."""
    try:
        write_to(sys.stdout, text)
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
    write_to(sys.stderr, mask_text(text))


def write_to(stream: TextIO, text: str) -> None:
    """What the terminal cannot show is shown by its number."""
    encoding = stream.encoding or "utf-8"
    text = text if text.endswith("\n") else text + "\n"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def print_json(value: Any) -> None:
    print_data(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_problems(problems: Sequence[Problem]) -> None:
    """All problems on stderr, a blank line after each hint, then their number."""
    for problem in problems:
        head = [str(problem.where), paint(problem.key, "bold", sys.stderr), problem.message]
        print_talk(": ".join(part for part in head if part))
        if problem.hint:
            print_talk(f"\n{paint('hint:', 'yellow', sys.stderr)} {problem.hint}\n\n")
    print_talk(paint(format_count(len(problems), "problem"), "red", sys.stderr))


def paint(text: str, style: str, stream: Any) -> str:
    """Colour for a terminal, plain text for everything else."""
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if text and stream.isatty() else text


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their content; the last one is left ragged."""
    table = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    )
