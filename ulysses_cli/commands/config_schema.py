"""`ulysses config-schema`: prints the settings of a recipe."""

from __future__ import annotations

from typing import Annotated

import typer

from ulysses_cli.commands.options import Format, FormatOption, or_exit


def config_schema(
    key: Annotated[
        str, typer.Argument(metavar="[SECTION]", help="a section or a setting, such as train or data.max_length")
    ] = "",
    output: FormatOption = Format.text,
) -> None:
    """Print every setting of a recipe: its meaning, unit, allowed values, default and aliases.

    With a section or a setting, print that one in detail. `[]` in a name stands for each element of a list.

    \b
    Examples:
      ulysses config-schema
      ulysses config-schema train
      ulysses config-schema data.datasets
      ulysses config-schema --format json > recipe.schema.json
    """
    from ulysses_cli.plan.recipe.schema import find_settings, make_json_schema
    from ulysses_cli.report import printing
    from ulysses_cli.report.recipe import describe_settings, tabulate_settings

    settings = or_exit(lambda: find_settings(key), output)
    if output is Format.json:
        printing.print_json(make_json_schema(settings[0].key if key else ""))
    else:
        printing.print_data(describe_settings(settings) if key else tabulate_settings(settings))
