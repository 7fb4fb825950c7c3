"""Problem is one mistake in a recipe or another input, with its place and a hint; RecipeError carries all of them.
A command ends with one of the exit codes below, which docs/faq.md explains.
Rules make problems and report/ prints them; this file does neither. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass


@dataclass(frozen=True, order=True)
class Where:
    """A place in an input. Line and column count from 1; line 0 means a command line or a file as a whole."""

    file: str = ""
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True)
class Problem:
    """`key` is the full dotted name of the setting; `message` says in one line what is wrong, `details` add a line
    each, `hint` says what to write instead. `count`: of problems that it stands for."""

    key: str
    message: str
    hint: str = ""
    where: Where = Where()
    details: tuple[str, ...] = ()
    count: int = 1

    def __str__(self) -> str:
        message = "\n  ".join((self.message, *self.details))
        head = ": ".join(part for part in (str(self.where), self.key, message) if part)
        return f"{head}\n\nhint: {self.hint}\n" if self.hint else f"{head}\n"

    def as_json(self) -> dict[str, object]:
        return {"key": self.key, **asdict(self.where), "message": self.describe(), "hint": self.hint}

    def describe(self) -> str:
        return "\n  ".join((self.message, *self.details))


Problems = Iterator[Problem]


class RecipeError(Exception):
    """All problems of an input at once; the only exception that a bad recipe raises. `readable` is the input without
    its bad values, so that rules can check the rest; it must not be run."""

    def __init__(self, problems: Iterable[Problem], readable: object = None) -> None:
        self.problems = tuple(problems)
        self.readable = readable
        super().__init__("\n".join(str(problem) for problem in self.problems))


DONE = 0
FAILED = 1  # the run or the proof failed
USAGE = 2  # the recipe or the command line is wrong
STOPPED = 75  # stopped with a checkpoint before the last step, under a scheduler; the sysexits' "try again later"


def get_signal_code(number: int) -> int:
    """Of a process that a signal ended before its work was done, as shells report it: 130 after SIGINT, 143 after
    SIGTERM."""
    return 128 + number
