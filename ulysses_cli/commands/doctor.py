"""`ulysses doctor`: is this machine fit to train, and what to fix first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ulysses_cli.commands.options import Format, FormatOption


def doctor(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE ...]", help="a recipe, and settings laid over it")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="write the result to this file as a page")] = None,
    online: Annotated[bool, typer.Option("--online", help="ask the hub for shapes that are not known here")] = False,
    output: FormatOption = Format.text,
) -> None:
    """Execute what training needs on this machine: exchanges between ranks, attention kernels, DeepSpeed's operators.

    With a recipe, also whether its memory, disks, GPUs and kernels are there. Ends with what to fix, in order; exit
    code 1 when the recipe cannot run here. Takes about a minute.

    \b
    Examples:
      ulysses doctor
      ulysses doctor my.yaml parallel.sp_size=8 --format json
    """
    from ulysses_cli.commands.proving import prove, read_subject

    subject = read_subject(words, output, online=online) if words else None
    prove("doctor", subject, {}, output, html)
