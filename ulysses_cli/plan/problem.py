"""One thing wrong with a recipe, where it stands and what to do about it.

Must not know how problems are found or shown: rules make them, report.py prints them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, order=True)
class Where:
    """A place in an input. Line and column count from 1; line 0 is no line: a command line, a file as a whole."""

    file: str = ""
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True)
class Problem:
    """`key` is the full dotted name of the setting; `message` says what is wrong in one line, `details` what belongs to
    it in a line each, `hint` what to write instead."""

    key: str
    message: str
    hint: str = ""
    where: Where = Where()
    details: tuple[str, ...] = ()

    def __str__(self) -> str:
        message = "\n  ".join((self.message, *self.details))
        head = ": ".join(part for part in (str(self.where), self.key, message) if part)
        return f"{head}\n\nhint: {self.hint}\n" if self.hint else f"{head}\n"

    def as_json(self) -> dict[str, object]:
        return {"key": self.key, **asdict(self.where), "message": self.describe(), "hint": self.hint}

    def describe(self) -> str:
        return "\n  ".join((self.message, *self.details))


class RecipeError(Exception):
    """Every problem of an input at once. The only exception that a bad recipe raises. `readable` is what is left of
    the input without its bad values, so that rules can go on looking; never to be run."""

    def __init__(self, problems: Iterable[Problem], readable: object = None) -> None:
        self.problems = tuple(problems)
        self.readable = readable
        super().__init__("\n".join(str(problem) for problem in self.problems))
