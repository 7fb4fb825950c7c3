"""`ulysses models [NAME]`: which models are served, and why others are refused."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from ulysses_cli.commands.options import Format, FormatOption, OnlineOption, or_exit

if TYPE_CHECKING:
    from ulysses_cli.plan.models.shape import ModelShape


def models(
    name: Annotated[
        str | None, typer.Argument(help="a model on the hub (owner/name), a local folder, or a family (model_type)")
    ] = None,
    online: OnlineOption = False,
    output: FormatOption = Format.text,
) -> None:
    """List the models that are served, or describe one: layers, heads, sp sizes, positions, licence gate.

    \b
    Examples:
      ulysses models
      ulysses models Qwen/Qwen3-4B
      ulysses models gemma4_text
      ulysses models deepseek_v32
    """
    from ulysses_cli import hub
    from ulysses_cli.plan.ledger.weights import find_num_parameters
    from ulysses_cli.plan.models.families import FAMILIES, REFUSED_FAMILIES, find_text_types
    from ulysses_cli.plan.models.shape import summarize
    from ulysses_cli.plan.resolved import list_auto_rings
    from ulysses_cli.report import models as shown
    from ulysses_cli.report import printing

    known = {*FAMILIES, *REFUSED_FAMILIES}
    named = known if name is None else {name} & known or set(find_text_types(name, known))
    if name is not None and not named:
        shape = or_exit(lambda: _find_shape(name, known, online=online))
        summary = summarize(shape, find_num_parameters(shape), hub.find_gate(name), list_auto_rings(shape))
        if output is Format.json:
            printing.print_json(shown.make_model(summary))
        else:
            printing.print_data(shown.format_model(summary))
        return
    summaries = or_exit(hub.summarize_table)
    served = [family for family in FAMILIES if family in named]
    refused = {family: why for family, why in REFUSED_FAMILIES.items() if family in named}
    chosen = [summary for summary in summaries if name is None or named & {summary.model_type}]
    if output is Format.json:
        printing.print_json(shown.make_list(chosen, served, refused))
    elif name is None:
        printing.print_data(shown.format_list(chosen, served, refused))
    else:
        if name not in named:
            what = "Its text part is trained; the rest stays as it was." if served else "Its text part decides."
            printing.print_data(f"{name} is a multimodal model. {what}")
        for family in sorted(named):
            own = [summary for summary in chosen if family == summary.model_type]
            printing.print_data(shown.format_family(family, own, refused.get(family, "")))


def _find_shape(name: str, families: set[str], *, online: bool) -> ModelShape:
    """A model's shape. A word that names no model is taken for a family's name."""
    import difflib

    from ulysses_cli.commands.estimate_memory import find_shape
    from ulysses_cli.plan.problem import Problem, RecipeError

    try:
        return find_shape(name, online=online, key="NAME")
    except RecipeError:
        if online or "/" in name or "." in name or os.path.exists(name):
            raise
    close = difflib.get_close_matches(name, families, n=1, cutoff=0.75)
    message = f"{name} is neither a family proven exact nor a model on this machine"
    hint = (
        f"did you mean {close[0]}?" if close else "`ulysses models` lists families; --online asks the hub for a model"
    )
    raise RecipeError([Problem("NAME", message, hint)])
