"""The command line: parse, call, hand to report, exit code. No logic; heavy commands start child processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from ulysses_cli import __version__

DONE, FAILED, USAGE = 0, 1, 2
T = TypeVar("T")

app = typer.Typer(
    name="ulysses",
    help="Fine-tune language models on very long sequences.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(
    help="The recipes that come with this tool.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(recipes_app, name="recipes")


class Format(StrEnum):
    text = "text"
    json = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="text for people, json for programs")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from ulysses_cli import report

        report.print_data(f"ulysses {__version__}")
        raise typer.Exit(DONE)


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


@app.command()
def validate_config(
    words: Annotated[
        list[str], typer.Argument(metavar="RECIPE... [KEY=VALUE ...]", help="recipe files, and settings laid over them")
    ],
    num_processes: Annotated[
        int | None, typer.Option(min=1, max=1 << 20, help="processes of the run; left out: the recipe's own product")
    ] = None,
    online: Annotated[bool, typer.Option("--online", help="ask the hub for shapes that are not known here")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="problems only")] = False,
    output: FormatOption = Format.text,
) -> None:
    """Find every mistake in a recipe before a GPU is rented.

    Nothing is launched. Exit code 2 when there is a problem, each with its place and what to write instead.

    \b
    Examples:
      ulysses validate-config recipes/tiny-cpu.yaml
      ulysses validate-config my.yaml parallel.sp_size=8 data.max_length=512Ki --num-processes 8
      ulysses validate-config recipes/*.yaml --format json
    """
    from ulysses_cli import report, validate

    files, overrides = validate.split_words(words)
    results = [validate.validate_recipe(file, overrides, num_processes, online=online) for file in files]
    problems = [problem for result in results for problem in result.list_problems(is_alone=len(files) == 1)]
    plans = [report.describe_plan(result) for result in results if not result.problems]
    if not files:
        problems = [validate.no_recipe(words)]
    if output is Format.json:
        report.print_json(
            {
                "valid": not problems,
                "problems": [problem.as_json() for problem in problems],
                "plans": plans,
            }
        )
    else:
        if plans and not quiet:
            report.print_data("\n\n".join(report.format_plan(plan, with_defaults=len(files) == 1) for plan in plans))
        if problems:
            report.print_problems(problems)
    raise typer.Exit(USAGE if problems else DONE)


@app.command()
def config_schema(output: FormatOption = Format.text) -> None:
    """Print every setting of a recipe: what it means, its unit, what it takes, its default and its aliases.

    \b
    Examples:
      ulysses config-schema
      ulysses config-schema --format json > recipe.schema.json
    """
    from ulysses_cli import report
    from ulysses_cli.plan.resolved import format_value
    from ulysses_cli.plan.schema import make_json_schema, walk_settings

    if output is Format.json:
        report.print_json(make_json_schema())
        return
    rows = []
    for setting in walk_settings():
        takes = setting.accepts.describe() if not setting.accepts.section else "a section"
        default = (
            "required" if setting.is_required else "" if setting.accepts.section else format_value(setting.default)
        )
        also = f" (also: {', '.join(setting.aliases)})" if setting.aliases else ""
        rows.append((setting.key, default, setting.unit, takes, setting.doc + also))
    report.print_data(report.format_table(("key", "default", "unit", "takes", "meaning"), rows))


@recipes_app.command("list")
def list_recipes(output: FormatOption = Format.text) -> None:
    """List the recipes that come with this tool.

    \b
    Examples:
      ulysses recipes list
      ulysses recipes list --format json
    """
    from ulysses_cli import report, shipped

    found = shipped.list_recipes()
    if output is Format.json:
        report.print_json([{"name": name, "summary": summary} for name, summary in found])
    else:
        report.print_data(report.format_table(("recipe", "what it is for"), found))


@recipes_app.command("show")
def show_recipe(name: Annotated[str, typer.Argument(help="a name from `ulysses recipes list`")]) -> None:
    """Print a recipe.

    \b
    Examples:
      ulysses recipes show tiny-cpu
      ulysses recipes show llama-3.1-8b-128k-8gpu > my.yaml
    """
    from ulysses_cli import report, shipped

    report.print_data(_or_exit(lambda: shipped.read_recipe(name)))


@recipes_app.command("copy")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="a name from `ulysses recipes list`")],
    to: Annotated[Path | None, typer.Argument(help="file or folder; left out: here, under its own name")] = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite a file that is there")] = False,
) -> None:
    """Copy a recipe, to change it.

    \b
    Examples:
      ulysses recipes copy tiny-cpu
      ulysses recipes copy llama-3.1-8b-128k-8gpu my.yaml
    """
    from ulysses_cli import report, shipped

    report.print_talk(f"wrote {_or_exit(lambda: shipped.copy_recipe(name, to, force=force))}")


def _or_exit(call: Callable[[], T]) -> T:
    """A user's mistake ends the command with its problems and no trace."""
    from ulysses_cli import report
    from ulysses_cli.plan.problem import RecipeError

    try:
        return call()
    except RecipeError as error:
        report.print_problems(error.problems)
        raise typer.Exit(USAGE) from None


def run() -> None:
    """Entry point of the `ulysses` command."""
    try:
        app()
    except OSError as error:
        sys.stderr.write(f"the result cannot be written: {error.strerror}\n")
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(130)
