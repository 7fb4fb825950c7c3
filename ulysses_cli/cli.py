"""The command line as a whole: which commands there are. What each does stands in commands/."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ulysses_cli import __version__
from ulysses_cli.commands import (
    bench,
    doctor,
    estimate_memory,
    export,
    plan,
    prepare,
    recipes,
    report,
    train,
    validate_config,
    verify,
)
from ulysses_cli.commands.options import DONE, FAILED, USAGE

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


def _print_version(wanted: bool) -> None:
    if wanted:
        from ulysses_cli.report import printing

        printing.print_data(f"ulysses {__version__}")
        raise typer.Exit(DONE)


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


app.command()(validate_config.validate_config)
app.command()(validate_config.config_schema)
app.command()(prepare.prepare)
app.command()(train.train)
app.command()(export.export)
app.command()(verify.verify)
app.command()(doctor.doctor)
app.command()(bench.bench)
app.command()(estimate_memory.estimate_memory)
app.command()(plan.plan)
app.command()(report.report)
app.add_typer(recipes_app, name="recipes")
recipes_app.command("list")(recipes.list_recipes)
recipes_app.command("show")(recipes.show_recipe)
recipes_app.command("copy")(recipes.copy_recipe)


def run() -> None:
    """Entry point of the `ulysses` command."""
    from ulysses_cli.plan.problem import RecipeError

    try:
        app()
    except RecipeError as error:  # of the machine: a command tells those of its recipe itself
        from ulysses_cli.report import printing

        printing.print_problems(error.problems)
        sys.exit(USAGE)
    except OSError as error:
        sys.stderr.write(f"the result cannot be written: {error.strerror}\n")
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(130)
