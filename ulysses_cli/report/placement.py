"""Formats where the ranks of a run stand: machines, their GPUs, and which of them share a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.layout import Placement, list_divisors
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.speed import compute_speed

SHOWN_MACHINES = 8


def describe_placement(
    placement: Placement, seconds: tuple[float, float] | None, rings: Sequence[int] = ()
) -> dict[str, Any]:
    """`seconds`: the exchange's share of a step, as the ranks stand and if no row crossed machines. `rings`: the legal
    sizes of a ring."""
    return {
        "machines": placement.num_nodes,
        "gpus_per_machine": placement.gpus_per_node,
        "rows_by_machine": [
            [[ranks[0], ranks[-1]] for ranks in placement.list_machine(node)]
            for node in range(min(placement.num_nodes, SHOWN_MACHINES))
        ],
        "crossing_rows": placement.num_crossing,
        "exchange_seconds": seconds,
        "warning": explain_crossing(placement, seconds, rings),
    }


def compute_exchange_seconds(placement: Placement, job: Job, gpu: Gpu) -> tuple[float, float]:
    """Of a step: as the ranks stand, and if all ranks of a row stood on one machine."""
    here = replace(gpu, gpus_per_node=placement.gpus_per_node)
    together = replace(gpu, gpus_per_node=placement.layout.sp_size)
    return compute_speed(job, here).parts["exchange"], compute_speed(job, together).parts["exchange"]


def explain_crossing(placement: Placement, seconds: tuple[float, float] | None, rings: Sequence[int] = ()) -> str:
    """'' where no row crosses machines."""
    if not placement.num_crossing:
        return ""
    size, per_node, rows = placement.layout.sp_size, placement.gpus_per_node, placement.layout.dp_size
    crossing = format_count(placement.num_crossing, "row")
    cost = "add --gpu to see what it costs"
    if seconds is not None:
        here, together = (f"{part * 1e3:,.3g} ms" for part in seconds)
        cost = f"the exchange is predicted to take {here} of a step, on one machine {together}"
    if placement.must_cross:
        text = f"every row crosses machines: sp_size {size} is more than {per_node} GPUs; {cost}"
        if not placement.num_crossing_heads:
            return f"{text}; heads are exchanged inside machines, and only keys and values cross"
        better = [ring for ring in rings if size % ring == 0 and per_node % (size // ring) == 0]
        return f"{text}; with ring_size {better[0]} only keys and values would cross" if better else text
    fitting = [str(number) for number in list_divisors(per_node) if placement.layout.world_size % number == 0]
    return (
        f"{crossing} of {rows} cross machines without need: sp_size {size} does not divide {per_node} GPUs; {cost}; "
        f"sp_size {', '.join(fitting)} would not cross, where the model's heads allow it"
    )


def format_placement(described: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns lines of (label, text): a machine each, with the ranks that share a row in brackets."""
    size = format_count(described["gpus_per_machine"], "GPU")
    lines = [("machines", f"{described['machines']} with {size} each; ranks in brackets share a row")]
    for node, rows in enumerate(described["rows_by_machine"]):
        drawn = " ".join(f"[{' '.join(map(str, range(first, last + 1)))}]" for first, last in rows)
        lines.append(("", f"{node}: {drawn}"))
    if described["machines"] > SHOWN_MACHINES:
        lines.append(("", "..."))
    if described["warning"]:
        lines.append(("warning", described["warning"]))
    return lines
