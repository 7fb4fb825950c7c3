"""`ulysses verify`: sequence parallelism changes nothing for this model, shown number by number."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ulysses_cli.commands.options import Format, FormatOption


def verify(
    words: Annotated[
        list[str], typer.Argument(metavar="RECIPE [KEY=VALUE ...]", help="a recipe file, and settings laid over it")
    ],
    is_all: Annotated[bool, typer.Option("--all", help="every legal sp_size that this machine has room for")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="write the result to this file as a page")] = None,
    online: Annotated[bool, typer.Option("--online", help="ask the hub for shapes that are not known here")] = False,
    output: FormatOption = Format.text,
) -> None:
    """Prove on this machine that ranks that share rows train like one process does.

    The recipe's model, shrunk to a few layers of the same kinds with random weights, takes two steps with plain
    transformers, and on ranks with the recipe's levers, packing and adapters. Loss, every gradient, the weights, an
    evaluation and leaks between documents are compared. Exit code 1 when one differs. Needs no GPU and no data.

    \b
    Examples:
      ulysses verify recipes/tiny-cpu.yaml
      ulysses verify my.yaml parallel.sp_size=4 --all --format json
    """
    from ulysses_cli.commands.proving import prove, read_subject

    subject = read_subject(words, output, online=online)
    prove("verify", subject, {"all": is_all}, output, html)
