"""`ulysses merge`: writes the weighted sum of models, or the mean of a run's last checkpoints, as a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ulysses_cli.commands.export import export_and_exit
from ulysses_cli.commands.options import Format, FormatOption, end_with


def merge(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL[:WEIGHT]...", help="model folders or hub names, with weights that add up to 1; or one run"
        ),
    ],
    to: Annotated[Path, typer.Option("--to", help="the folder to write; it must not exist")],
    last: Annotated[
        int | None, typer.Option("--last", metavar="N", help="merge the last N checkpoints of a run, in equal shares")
    ] = None,
    output: FormatOption = Format.text,
) -> None:
    """Write the weighted sum of models of one architecture, or the mean of a run's last checkpoints.

    Merging a model for long contexts with the one that it was made from can win back what short texts lost. Sums are
    float32, tensor by tensor, and are rounded once to the dtype of the models. Host memory holds one shard. The first
    model gives config and tokenizer. Models without weights get equal shares. Other shapes, dtypes or tokenizers are
    refused, and so are adapters.

    \b
    Examples:
      ulysses merge tuned:0.9 base:0.1 --to merged
      ulysses merge runs/a/model runs/b/model --to merged
      ulysses merge runs/mine --last 3 --to merged
    """
    from ulysses_cli.plan.rules.merged_models import parse_parts
    from ulysses_cli.run.preflight import check_merge

    if problems := list(check_merge(models, last, to)):
        end_with(problems, output)
    if last is not None:
        export_and_exit([models[0], "--to", str(to), f"--last={last}"], to, output)
    parts = parse_parts(models)
    weights = ",".join(repr(part.weight) for part in parts)
    export_and_exit([*(part.name for part in parts), "--to", str(to), f"--weights={weights}"], to, output)
