"""Errors in data: rows that cannot be used, each with its file and line. A DataError ends a run with exit code 1.

A mistake in the recipe is a RecipeError instead (exit code 2).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ulysses_cli.plan.problem import Problem, Where

MAX_SHOWN = 20
NOT_UTF8 = "is not UTF-8"  # how the message about a row ends whose bytes are no text


SOURCE = "SOURCE"  # in a remedy: the key of the source in the recipe, which a reader of rows does not know


class BadRow(Exception):
    """One row that cannot be used. Raised where the row's file and line are not known yet. `remedy`: a line of the
    recipe with which it can be used, such as `set data.thoughts: drop`."""

    def __init__(self, message: str, remedy: str = "") -> None:
        self.remedy = remedy
        super().__init__(message)


class NoTemplate(Exception):
    """The data holds chats and the tokenizer has no chat template. Not a bad row: reported once for the source."""


class DataError(Exception):
    """All problems of the data that were collected before the work stopped."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[DataError], tuple[tuple[Problem, ...]]]:
        """Makes the error picklable: a worker process sends it to the main process."""
        return DataError, (self.problems,)


def make_where(file: str, line: int, *, has_lines: bool = True) -> Where:
    """`line` is a line of a text file, or a row's number where the file's format has no lines; 0: not known."""
    if not line:
        return Where(file)
    return Where(file, line, 1) if has_lines else Where(f"{file}, row {line}")


def shorten(problems: Sequence[Problem], total: int, hint: str = "") -> list[Problem]:
    """The first problems and the number of those that are not shown. The last line carries the hint, if there is
    one."""
    shown = list(problems[:MAX_SHOWN])
    if total > len(shown):
        shown.append(Problem("", f"and {total - len(shown):,} more", count=total - len(shown)))
    return [*shown[:-1], replace(shown[-1], hint=hint or shown[-1].hint)]


def explain_bad_rows(
    bad: Sequence[tuple[str, int, str]],
    total: int,
    otherwise: str,
    remedies: Iterable[str] = (),
    *,
    has_lines: bool = True,
) -> list[Problem]:
    """`bad`: file, line and message of the first of `total` bad rows. `remedies`: lines of the recipe with which they
    can be used; `otherwise`: what can be done instead."""
    problems = [Problem("", message, "", make_where(file, line, has_lines=has_lines)) for file, line, message in bad]
    foreign = next(((file, message) for file, _, message in bad if message.endswith(NOT_UTF8)), None)
    remedy = "fix the rows" if foreign is None else _explain_conversion(*foreign)
    return shorten(problems, total, ", or ".join((remedy, *remedies, otherwise)))


def _explain_conversion(file: str, message: str) -> str:
    inner = message.rpartition(": byte ")[0]  # a path below a folder that is one document
    encoding = (
        "utf-16" if "byte 1 of the line, 0xff," in message or "byte 1 of the line, 0xfe," in message else "latin1"
    )
    command = f"iconv -f {encoding} -t utf-8 {shlex.quote(f'{file}/{inner}' if inner else file)} > NEW"
    return f"convert it, such as `{command}` for a file in {encoding}"
