"""Formats where the ranks of a run stand: machines, their GPUs, which of them share a row, or a copy of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ulysses_cli.plan.layout import Placement, list_divisors
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.planner.estimate import Estimate
from ulysses_cli.plan.planner.machines import LayoutInside
from ulysses_cli.plan.speed import compute_second_gather_seconds, compute_speed
from ulysses_cli.report.quantities import format_seconds

SHOWN_MACHINES = 8


Seconds = tuple[float, float]  # of a step: as the ranks stand, and if each group stood on one machine


@dataclass(frozen=True)
class CrossingCosts:
    """What is predicted for groups that cross machines. `inside`: the layout whose rows need not cross, if it fits."""

    exchange: Seconds
    gather: Seconds
    inside: LayoutInside | None = None


def describe_placement(placement: Placement, costs: CrossingCosts | None, shape: ModelShape) -> dict[str, Any]:
    shown = range(min(placement.num_nodes, SHOWN_MACHINES))
    has_copies = placement.layout.dp_replicate_size > 1
    return {
        "machines": placement.num_nodes,
        "gpus_per_machine": placement.gpus_per_node,
        "rows_by_machine": [[[ranks[0], ranks[-1]] for ranks in placement.list_machine(node)] for node in shown],
        "copies_by_machine": [placement.list_copies(node) for node in shown] if has_copies else [],
        "crossing_rows": placement.num_crossing,
        "crossing_copies": placement.num_crossing_copies,
        "exchange_seconds": costs.exchange if costs is not None else None,
        "gather_seconds": costs.gather if costs is not None and has_copies else None,
        "warnings": list_warnings(placement, costs, shape),
    }


def list_warnings(placement: Placement, costs: CrossingCosts | None, shape: ModelShape) -> list[str]:
    """Of groups that cross machines. `shape`: its heads decide which layouts are legal."""
    found = (
        explain_crossing(placement, costs, shape),
        explain_crossing_copies(placement, costs.gather if costs is not None else None),
    )
    return [warning for warning in found if warning]


def compute_crossing_costs(placement: Placement, estimate: Estimate) -> CrossingCosts:
    """`estimate`: for machines of as many GPUs as the placement's."""
    layout, job, here = placement.layout, estimate.job, estimate.gpu
    row, copy = (replace(here, gpus_per_node=size) for size in (layout.sp_size, layout.replica_size))
    return CrossingCosts(
        (compute_speed(job, here).parts["exchange"], compute_speed(job, row).parts["exchange"]),
        (
            job.accumulation * compute_second_gather_seconds(job, here),
            job.accumulation * compute_second_gather_seconds(job, copy),
        ),
        estimate.inside,
    )


def _tell_cost(what: str, seconds: Seconds | None) -> str:
    if seconds is None:
        return "validate-config with --gpu says what it costs"
    here, together = (format_seconds(part) for part in seconds)
    return f"{what} is predicted to take {here} of a step instead of {together} on one machine"


def explain_crossing_copies(placement: Placement, seconds: Seconds | None) -> str:
    """'' where no copy of the weights crosses machines."""
    if not placement.num_crossing_copies:
        return ""
    layout, per_node = placement.layout, placement.gpus_per_node
    count = f"{format_count(placement.num_crossing_copies, 'copy')} of the weights of {layout.dp_replicate_size}"
    cost = _tell_cost("the backward's gather", seconds)
    better = [copies for copies in list_divisors(layout.world_size // layout.sp_size)
              if copies > 1 and per_node % (layout.world_size // copies) == 0]  # fmt: skip
    hint = (
        f"dp_replicate_size {better[0]} with dp_shard_size {layout.dp_size // better[0]} keeps each inside a machine"
        if better
        else "dp_replicate_size 1 gathers as fast, and needs no memory for copies"
    )
    return f"{count} cross machines: {layout.replica_size} ranks each, machines of {per_node}; {cost}; {hint}"


def explain_crossing(placement: Placement, costs: CrossingCosts | None, shape: ModelShape) -> str:
    """'' where no row crosses machines."""
    if not placement.num_crossing:
        return ""
    size, rows, gpus = placement.layout.sp_size, placement.layout.dp_size, format_count(placement.gpus_per_node, "GPU")
    if placement.must_cross:
        text = f"every row crosses machines: sp_size {size} is more than {gpus}"
    else:
        crossing = format_count(placement.num_crossing, "row")
        text = f"{crossing} of {rows} cross machines without need: sp_size {size} does not divide {gpus}"
    cost = _tell_cost("the exchange", costs.exchange if costs is not None else None)
    if costs is None:
        inside = _name_size_inside(placement, shape)
    else:
        inside = format_inside(costs.inside, placement.layout.ring_size) if costs.inside is not None else ""
    return "; ".join((text, cost, *filter(None, (inside, _name_ring_inside(placement, shape)))))


def format_inside(inside: LayoutInside, own_ring: int) -> str:
    """The layout with its predicted time beside that of the job's own."""
    layout, (rows, own_rows) = inside.layout, inside.rows_per_step
    ring = f", ring_size {layout.ring_size}" if max(layout.ring_size, own_ring) > 1 else ""
    steps = f" and gradient_accumulation_steps {inside.accumulation}" if inside.accumulation > 1 else ""
    took, own = format_seconds(inside.seconds), format_seconds(inside.own_seconds)
    text = f"sp_size {layout.sp_size}{ring} with dp_shard_size {layout.dp_shard_size}{steps} fits and would not cross"
    more = f" (a step then has {rows} rows instead of {own_rows})" if rows != own_rows else ""
    return f"{text}: predicted to take {took} for the tokens of a step instead of {own}{more}"


def _name_size_inside(placement: Placement, shape: ModelShape) -> str:
    """The layout with the most ranks for each row, of those that are legal and keep rows inside machines. '' where the
    row asks for more ranks than a machine has."""
    if placement.must_cross:
        return ""
    layout = placement.layout
    fitting = [
        size
        for size in list_divisors(placement.gpus_per_node)
        if size < layout.sp_size
        and shape.list_ring_sizes(size)
        and layout.world_size % (layout.dp_replicate_size * size) == 0
    ]
    if not fitting:
        return ""
    size, ring = fitting[-1], shape.list_ring_sizes(fitting[-1])[0]
    named = f", ring_size {ring}" if max(ring, layout.ring_size) > 1 else ""
    shards = layout.world_size // (layout.dp_replicate_size * size)
    return f"sp_size {size}{named} with dp_shard_size {shards} would not cross"


def _name_ring_inside(placement: Placement, shape: ModelShape) -> str:
    """The smallest ring whose ranks exchange heads inside machines."""
    if not placement.num_crossing_heads:
        return "heads are exchanged inside machines, and only keys and values cross"
    size, per_node = placement.layout.sp_size, placement.gpus_per_node
    inside = [ring for ring in shape.list_ring_sizes(size) if ring > 1 and per_node % (size // ring) == 0]
    return f"with ring_size {inside[0]} only keys and values would cross" if inside else ""


def format_placement(described: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns lines of (label, text): a machine each, with the ranks that share a row in brackets."""
    size = format_count(described["gpus_per_machine"], "GPU")
    copies = described["copies_by_machine"]
    words = ", those beside a copy share its weights" if copies else ""
    lines = [("machines", f"{described['machines']} with {size} each; ranks in brackets share a row{words}")]
    for node, rows in enumerate(described["rows_by_machine"]):
        drawn = " ".join(f"[{' '.join(map(str, range(first, last + 1)))}]" for first, last in rows)
        lines.append(("", f"{node}: {drawn}{_name_copies(copies[node]) if copies else ''}"))
    if described["machines"] > SHOWN_MACHINES:
        lines.append(("", "..."))
    return [*lines, *(("warning", warning) for warning in described["warnings"])]


def _name_copies(copies: Sequence[int]) -> str:
    return f"  {'copies' if len(copies) > 1 else 'copy'} {', '.join(map(str, copies))}"
