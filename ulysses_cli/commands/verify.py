"""`ulysses verify`: compares training on several ranks with training on one process, number by number."""

from __future__ import annotations

from typing import Annotated

import typer

from ulysses_cli.commands.options import Format, FormatOption, OnlineOption, PageOption, RecipeWords


def verify(
    words: RecipeWords,
    is_all: Annotated[bool, typer.Option("--all", help="every valid sp_size that this machine can run")] = False,
    html: PageOption = None,
    online: OnlineOption = False,
    output: FormatOption = Format.text,
) -> None:
    """Prove on this machine that training with sequence parallelism gives the same numbers as one process.

    The recipe's model is shrunk to a few layers of the same kinds, with random weights. It trains two steps with plain
    transformers, and two steps on several ranks with the recipe's memory settings, packing and adapters. Compared are
    the loss, every gradient, the weights, an evaluation, and leaks between documents. Exit code 1 when one of them
    differs. Needs no GPU and no data.

    \b
    Examples:
      ulysses verify recipes/tiny-cpu.yaml
      ulysses verify my.yaml parallel.sp_size=4 --all --format json
    """
    from ulysses_cli.commands.children.proving import prove, read_subject

    subject = read_subject(words, output, online=online)
    prove("verify", subject, {"all": is_all}, output, html)
