"""Formats models as plain data and as text: those that are served, and why others are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ulysses_cli.plan.models.families import UNSERVED
from ulysses_cli.plan.models.shape import ModelSummary
from ulysses_cli.plan.rules.model import REPLACEABLE
from ulysses_cli.plan.units import format_parameters
from ulysses_cli.report.printing import format_table
from ulysses_cli.report.quantities import format_binary

COLUMNS = ("model", "family", "parameters", "sp sizes by heads", "ring", "positions", "licence gate")


def make_model(summary: ModelSummary) -> dict[str, Any]:
    return dataclasses.asdict(summary) | {"is_served": not summary.refused}


def make_list(summaries: Sequence[ModelSummary], families: Sequence[str], refused: Mapping[str, str]) -> dict[str, Any]:
    return {
        "families": list(families),
        "models": [make_model(summary) for summary in summaries],
        "refused": dict(refused),
    }


def format_model(summary: ModelSummary) -> str:
    rows = [
        ("family", summary.model_type),
        ("parameters", format_size(summary)),
        *(("layers" if at == 0 else "", text) for at, text in enumerate(summary.layers)),
        *(("heads" if at == 0 else "", text) for at, text in enumerate(summary.heads)),
        ("sp sizes", f"{format_sizes(summary)} by heads alone"),
        ("", _format_rings(summary)),
        ("positions", format_positions(summary)),
        ("licence gate", format_gate(summary)),
        ("served", _format_verdict(summary)),
    ]
    return f"{summary.name}\n" + format_table(rows[0], rows[1:])


def _format_rings(summary: ModelSummary) -> str:
    if summary.ring_obstacle:
        return f"no others by a ring: {summary.ring_obstacle}"
    chosen = (
        f"{size} = ring {ring} x {size // ring}" if ring > 1 else f"{size} by heads"
        for size, ring in summary.auto_rings.items()
    )
    return f"any other with a ring; auto takes {', '.join(chosen)}"


def format_positions(summary: ModelSummary) -> str:
    """What a row asks for that is longer than the model was made for."""
    if not summary.rope_type:
        longer = "a longer row needs no stretch, since there are no rotary positions"
    elif summary.rope_type in REPLACEABLE:
        longer = "a longer row needs model.rope_scaling"
    else:
        longer = f"no longer row, since positions of its own kind ({summary.rope_type}) would be taken away"
    return f"{summary.max_positions:,}: {longer}"


def _format_verdict(summary: ModelSummary) -> str:
    if not summary.refused:
        return "yes, exactly"
    return f"{'no' if summary.refused in UNSERVED else 'on one rank per row only'}: {summary.refused}"


def format_list(summaries: Sequence[ModelSummary], families: Sequence[str], refused: Mapping[str, str]) -> str:
    table = format_table(COLUMNS, [make_row(summary) for summary in summaries])
    reasons = format_table(("refused family", "why its rows cannot be split over ranks"), list(refused.items()))
    names = ", ".join(families)
    return (
        f"{len(families)} families are exact on rows that are split over ranks:\n{names}\n\n"
        f"Models whose shape is known without a download. A ring reaches every sp size:\n{table}\n\n{reasons}"
    )


def format_family(family: str, summaries: Sequence[ModelSummary], refused: str) -> str:
    if refused:
        return f"{family} is refused where a row is split over ranks: {refused}"
    head = f"{family} is exact on rows that are split over ranks."
    if not summaries:
        return f"{head} No model of it is in the table; `ulysses models OWNER/NAME --online` describes one."
    return f"{head}\n\n" + format_table(COLUMNS, [make_row(summary) for summary in summaries])


def make_row(summary: ModelSummary) -> tuple[str, ...]:
    return (
        summary.name,
        summary.model_type,
        format_size(summary),
        format_sizes(summary),
        format_ring(summary),
        format_binary(summary.max_positions),
        format_gate(summary),
    )


def format_size(summary: ModelSummary) -> str:
    return "not known" if summary.num_parameters is None else format_parameters(summary.num_parameters)


def format_sizes(summary: ModelSummary) -> str:
    return ", ".join(str(size) for size in summary.sp_sizes)


def format_ring(summary: ModelSummary) -> str:
    return "no" if summary.ring_obstacle else "yes"


def format_gate(summary: ModelSummary) -> str:
    return "not known" if summary.gated is None else "yes" if summary.gated else "no"
