"""`ulysses config-schema`."""

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
    """Print every setting of a recipe: what it means, its unit, what it takes, its default and its aliases.

    Of a section its settings alone, one below the other; `[]` stands for each element of a list.

    \b
    Examples:
      ulysses config-schema
      ulysses config-schema train
      ulysses config-schema data.datasets
      ulysses config-schema --format json > recipe.schema.json
    """
    from ulysses_cli.plan.recipe.complaints import find_settings
    from ulysses_cli.plan.recipe.schema import make_json_schema
    from ulysses_cli.report import printing, settings

    found = or_exit(lambda: find_settings(key), output)
    if output is Format.json:
        printing.print_json(make_json_schema(found[0].key if key else ""))
    else:
        printing.print_data(settings.describe_settings(found) if key else settings.tabulate_settings(found))
