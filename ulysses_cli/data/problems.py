"""What is wrong with data: rows that cannot be used, each with its file and line. Ends a run with exit code 1.

What is wrong with the recipe itself is a RecipeError, as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ulysses_cli.plan.problem import Problem, Where

MAX_SHOWN = 20


class BadRow(Exception):
    """One row that cannot be used, before its place is known."""


class NoTemplate(Exception):
    """Chats, and a tokenizer without a chat template: no row's fault, and said once."""


class DataError(Exception):
    """Every problem that was found in the data before the work stopped."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[DataError], tuple[tuple[Problem, ...]]]:
        """A worker's travels to the process that tells it."""
        return DataError, (self.problems,)


def make_where(file: str, line: int, *, has_lines: bool = True) -> Where:
    """A line of a text file; a row of a file that has no lines."""
    if not line:
        return Where(file)
    return Where(file, line, 1) if has_lines else Where(f"{file}, row {line}")


def shorten(problems: Sequence[Problem], total: int, hint: str) -> list[Problem]:
    """The first few, and how many there are in all."""
    shown = list(problems[:MAX_SHOWN])
    if total > len(shown):
        shown.append(Problem("", f"and {total - len(shown):,} more", hint))
    return shown
