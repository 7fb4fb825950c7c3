"""Exit codes, options that several commands share, and the end of a command that a user's mistake brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer

from ulysses_cli.plan.exit_codes import USAGE

if TYPE_CHECKING:
    from ulysses_cli.plan.problem import Problem

EXIT_CODES = """\
Exit codes:
  0         done; also a run that was stopped early and left a checkpoint
  1         the run or the proof failed; does not fit for sure (--strict)
  2         a mistake in the recipe or the command; no plan fits
  130, 143  ended by Ctrl-C or SIGTERM before there was a checkpoint
"""
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
            file.write_text(printing.hide_known(text), encoding="utf-8")
        except OSError as error:
            problem = Problem("--html", f"{file} cannot be written: {error.strerror}", "name another file")
            raise RecipeError([problem]) from None

    or_exit(write)
    printing.print_message(f"wrote {file}")


def or_exit(call: Callable[[], T], output: Format = Format.text) -> T:
    """A user's mistake ends the command with its problems and no trace."""
    from ulysses_cli.plan.problem import RecipeError

    try:
        return call()
    except RecipeError as error:
        end_with(error.problems, output)


def end_with(problems: Sequence[Problem], output: Format) -> NoReturn:
    """For people on stderr, for programs on stdout."""
    from ulysses_cli.report import printing

    if output is Format.json:
        printing.print_json({"problems": [problem.as_json() for problem in problems]})
    else:
        printing.print_problems(problems)
    raise typer.Exit(USAGE)


def check_page(file: Path | None) -> None:
    """Before long work: its page can be written. Raises RecipeError."""
    from ulysses_cli.plan.problem import Problem, RecipeError

    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a", encoding="utf-8"):
            pass
        if not file.stat().st_size:
            file.unlink()
    except OSError as error:
        message = f"{file} cannot be written: {error.strerror}"
        raise RecipeError([Problem("--html", message, "name another file")]) from None
