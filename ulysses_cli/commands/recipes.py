"""`ulysses recipes list | show | copy`: the recipes that come with this tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ulysses_cli.commands.options import Format, FormatOption, complete_recipe_names, or_exit


def list_recipes(output: FormatOption = Format.text) -> None:
    """List the recipes that come with this tool.

    \b
    Examples:
      ulysses recipes list
      ulysses recipes list --format json
    """
    from ulysses_cli import shipped
    from ulysses_cli.report import printing

    shipped_recipes = shipped.list_recipes()
    if output is Format.json:
        printing.print_json([{"name": name, "summary": summary} for name, summary in shipped_recipes])
    else:
        printing.print_data(printing.format_table(("recipe", "what it is for"), shipped_recipes))


def show_recipe(
    name: Annotated[
        str, typer.Argument(help="a name from `ulysses recipes list`", autocompletion=complete_recipe_names)
    ],
) -> None:
    """Print a recipe.

    \b
    Examples:
      ulysses recipes show tiny-cpu
      ulysses recipes show llama-3.1-8b-128k-8gpu > my.yaml
    """
    from ulysses_cli import shipped
    from ulysses_cli.report import printing

    printing.print_data(or_exit(lambda: shipped.read_recipe(name)))


def copy_recipe(
    name: Annotated[
        str, typer.Argument(help="a name from `ulysses recipes list`", autocompletion=complete_recipe_names)
    ],
    to: Annotated[
        Path | None, typer.Argument(help="file or folder  [default: the current folder, under its own name]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite an existing file")] = False,
) -> None:
    """Copy a recipe, to change it.

    \b
    Examples:
      ulysses recipes copy tiny-cpu
      ulysses recipes copy llama-3.1-8b-128k-8gpu my.yaml
    """
    from ulysses_cli import shipped
    from ulysses_cli.report import printing

    printing.print_message(f"wrote {or_exit(lambda: shipped.copy_recipe(name, to, force=force))}")
