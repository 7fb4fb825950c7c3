"""Memory against length as a table for the terminal, as plain data, and as a page with a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ulysses_cli.plan.hardware import GIB
from ulysses_cli.plan.planner.estimate import Estimate
from ulysses_cli.plan.planner.sweep import LengthSweep, compute_sweep
from ulysses_cli.report.page.charts import Mark, Series, draw_lines
from ulysses_cli.report.page.page import Chart, Note, PageSection, Table, make_page
from ulysses_cli.report.printing import format_table

LEVERS = "with the levers of the estimate; tiles that are left open come on where a row cannot be indexed without"


def describe_sweep(found: Estimate, sweep: LengthSweep) -> dict[str, Any]:
    return {
        "gpu": found.gpu.key,
        "gpu_capacity_bytes": found.fit.gpu_capacity_bytes,
        "lengths": list(sweep.lengths),
        "gpu_peak_bytes": {curve.name: list(curve.peaks) for curve in sweep.curves},
    }


def format_sweep(found: Estimate, sweep: LengthSweep) -> str:
    """GiB of a rank; what does not fit is marked."""
    room = found.fit.gpu_capacity_bytes

    def cell(peak: int | None) -> str:
        return "-" if peak is None else f"{peak / GIB:,.1f}{'' if peak <= room else ' x'}"

    rows = [
        (f"{length:,}", *(cell(curve.peaks[index]) for curve in sweep.curves))
        for index, length in enumerate(sweep.lengths)
    ]
    head = f"{found.job.shape.name} on {found.job.world_size} x {found.gpu.key}: GiB per GPU, of {room / GIB:.1f}"
    table = format_table(("tokens per row", *(curve.name for curve in sweep.curves)), rows)
    return f"{head}\n\n{table}\n{_explain_marks(found, sweep)}"


def _explain_marks(found: Estimate, sweep: LengthSweep) -> str:
    peaks = [peak for curve in sweep.curves for peak in curve.peaks]
    lines = (
        ["x: does not fit"] if any(peak is not None and peak > found.fit.gpu_capacity_bytes for peak in peaks) else []
    )
    if None in peaks:
        why = "".join(f" while memory.{name} is false" for name in sweep.closed[:1])
        lines.append(f"-: a tensor of a rank would pass 2^31 elements, which kernels cannot index{why}")
    return "\n" + "\n".join(lines)


def make_sweep_page(found: Sequence[tuple[Estimate, LengthSweep]]) -> str:
    sections = []
    for each, sweep in found:
        room = each.fit.gpu_capacity_bytes
        most = 2.5 * room  # beyond, a curve says nothing more
        series = [
            Series(curve.name, sweep.lengths, [p if p is None or p <= most else None for p in curve.peaks])
            for curve in sweep.curves
        ]
        marks = [Mark(room, f"{each.gpu.key}")]
        title = f"{each.job.shape.name} on {each.job.world_size} x {each.gpu.name}"
        own = f"{each.job.world_size} x {each.gpu.name}"
        svg = draw_lines(own, series, "tokens per row (tokens)", "memory per GPU (bytes)", x_log=True, marks=marks)
        rows = [
            (f"{length:,}", *("-" if (p := c.peaks[i]) is None else f"{p / GIB:,.1f}" for c in sweep.curves))
            for i, length in enumerate(sweep.lengths)
        ]
        table = Table(("tokens per row", *(curve.name for curve in sweep.curves)), rows, "GiB per GPU")
        note = f"Predicted by formula, {LEVERS}; the last curve has every lever."
        sections.append(PageSection(title, [Chart(svg, note, table)]))
    sections.append(
        PageSection("What this is", [Note("Predictions before a run; a rehearsal on the machine measures.")])
    )
    return make_page("Memory against length", sections)


def compute_sweeps(results: Sequence[Estimate]) -> list[tuple[Estimate, LengthSweep]]:
    return [(each, compute_sweep(each.job, each.choice.reasons)) for each in results]
