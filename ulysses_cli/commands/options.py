"""Exit codes, options that several commands share, and the end of a command that a user's mistake brings."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

DONE, FAILED, USAGE = 0, 1, 2
T = TypeVar("T")


class Format(StrEnum):
    text = "text"
    json = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="text for people, json for programs")]


def write_page(file: Path, text: str) -> None:
    """The file of an --html; its folder is made."""
    from ulysses_cli.plan.problem import Problem, RecipeError
    from ulysses_cli.report import printing

    def write() -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            problem = Problem("--html", f"{file} cannot be written: {error.strerror}", "name another file")
            raise RecipeError([problem]) from None

    or_exit(write)
    printing.print_talk(f"wrote {file}")


def or_exit(call: Callable[[], T]) -> T:
    """A user's mistake ends the command with its problems and no trace."""
    from ulysses_cli.plan.problem import RecipeError
    from ulysses_cli.report import printing

    try:
        return call()
    except RecipeError as error:
        printing.print_problems(error.problems)
        raise typer.Exit(USAGE) from None
