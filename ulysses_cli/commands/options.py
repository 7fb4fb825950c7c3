"""Options that several commands share, what the shell offers for them when Tab is pressed, exit codes, and how a
command ends on a user's mistake. Offers come from this machine alone; a mistake in a file means no offer, never a
trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from typer.core import TyperCommand

from ulysses_cli.plan.problem import USAGE

if TYPE_CHECKING:
    from ulysses_cli.plan.problem import Problem


RECIPE_SUFFIXES = (".yaml", ".yml")


def complete_words(incomplete: str) -> list[str]:
    """Offers recipe files, folders, and settings as `section.key=`; after the `=`, the values that a setting names."""
    key, equals, start = incomplete.partition("=")
    if equals:
        return [f"{key}={value}" for value in _list_values(key) if value.startswith(start)]
    return [*_list_paths(incomplete), *(f"{name}=" for name in _list_keys() if name.startswith(incomplete))]


def complete_recipe_names(incomplete: str) -> list[str]:
    """Offers the recipes that come with this tool."""
    from ulysses_cli import shipped

    return [name for name, _ in shipped.list_recipes() if name.startswith(incomplete)]


def complete_gpus(incomplete: str) -> list[str]:
    """Offers kinds of GPU; after a comma, another one."""
    from ulysses_cli.hardware_table import load_hardware
    from ulysses_cli.plan.problem import RecipeError

    before, comma, start = incomplete.rpartition(",")
    try:
        return [f"{before}{comma}{key}" for key in load_hardware().gpus if key.startswith(start)]
    except RecipeError:
        return []


def _list_paths(incomplete: str) -> Iterator[str]:
    folder = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
    prefix = incomplete[: len(incomplete) - len(Path(incomplete).name)] if not incomplete.endswith("/") else incomplete
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    for entry in entries:
        name = f"{prefix}{entry.name}"
        is_hidden = entry.name.startswith(".") and not Path(incomplete).name.startswith(".")
        if not name.startswith(incomplete) or is_hidden:
            continue
        if entry.is_dir():
            yield f"{name}/"
        elif entry.suffix in RECIPE_SUFFIXES:
            yield name


def _list_keys() -> Iterator[str]:
    from ulysses_cli.plan.recipe.schema import walk_settings

    for setting in walk_settings():
        if not setting.accepts.section and "[" not in setting.key and setting.key != "extends":  # of a file
            yield setting.key


def _list_values(key: str) -> list[str]:
    from ulysses_cli.plan.recipe.schema import walk_settings

    for setting in walk_settings():
        if setting.key == key:
            literals = [str(value) for value in setting.accepts.literals]
            return [*literals, *(["true", "false"] if bool in setting.accepts.scalars else [])]
    return []


EXIT_CODES = """\
Exit codes:
  0         done; stopped early with a checkpoint, without a scheduler
  1         the run or the proof failed; may not fit in memory (--strict)
  2         a mistake in the recipe or the command; no plan fits
  75        stopped early with a checkpoint, under a scheduler
  130, 143  ended by Ctrl-C or SIGTERM without a new checkpoint
"""
T = TypeVar("T")


class Format(StrEnum):
    text = "text"
    json = "json"


class Command(TyperCommand):
    """Says in plain words what is wrong with an option. Takes `--config FILE` for a recipe, as other tools name it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any((param.metavar or "").strip("[").startswith("RECIPE") for param in self.params):
            args = _drop_config(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:  # the words are those of the library that validates
            reason = error.message.removeprefix("Value error, ").replace("Input should be", "must be")
            error.message = reason.partition(", unable to parse")[0]
            raise


def _drop_config(args: list[str]) -> list[str]:
    """The file's name alone in place of `--config FILE` and `--config=FILE`."""
    end = args.index("--") if "--" in args else len(args)
    own = [each.removeprefix("--config=") for at, each in enumerate(args[:end]) if each != "--config" or at == end - 1]
    return own + args[end:]


FormatOption = Annotated[Format, typer.Option("--format", help="text for people, json for programs")]
OnlineOption = Annotated[
    bool, typer.Option("--online", help="download the model's config.json if it is not on this machine")
]
PageOption = Annotated[Path | None, typer.Option("--html", help="also write the result to this file, as an HTML page")]
RecipeWords = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE [KEY=VALUE ...]",
        help="a recipe file, and settings that override it",
        autocompletion=complete_words,
    ),
]
OptionalRecipeWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] [KEY=VALUE ...]",
        help="a recipe file, and settings that override it",
        autocompletion=complete_words,
    ),
]


def write_page(file: Path, text: str) -> None:
    """Writes the page of --html; its folder is made."""
    from ulysses_cli.plan.problem import RecipeError
    from ulysses_cli.report import printing

    def write() -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(printing.hide_known(text), encoding="utf-8")
        except OSError as error:
            raise RecipeError([_explain_page(file, error)]) from None

    or_exit(write)
    printing.print_message(f"wrote {file}")


def get_cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "ulysses"


def or_exit(call: Callable[[], T], output: Format = Format.text) -> T:
    """Returns the call's result. Problems with the user's input are printed without a trace and end the command."""
    from ulysses_cli.plan.problem import RecipeError

    try:
        return call()
    except RecipeError as error:
        end_with(error.problems, output)


def end_with(problems: Sequence[Problem], output: Format) -> NoReturn:
    """Prints problems and exits: as text to stderr, or as JSON to stdout."""
    from ulysses_cli.report import printing

    if output is Format.json:
        printing.print_json({"problems": [problem.as_json() for problem in problems]})
    else:
        printing.print_problems(problems)
    raise typer.Exit(USAGE)


def check_page(file: Path | None) -> None:
    """Checks before long work that its page can be written. Raises RecipeError."""
    from ulysses_cli.plan.problem import RecipeError

    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a", encoding="utf-8"):
            pass
        if not file.stat().st_size:
            file.unlink()
    except OSError as error:
        raise RecipeError([_explain_page(file, error)]) from None


def _explain_page(file: Path, error: OSError) -> Problem:
    from ulysses_cli.plan.problem import Problem

    above = next((parent for parent in file.parents if parent.is_file()), None)
    reason = f"{above} is a file, not a folder" if above else error.strerror
    return Problem("--html", f"{file} cannot be written: {reason}", "name another file")
