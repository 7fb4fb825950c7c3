"""Formats predicted memory by row length: as plain data, as a table for the terminal, as a page with a chart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ulysses_cli.plan.levers import SPELLED
from ulysses_cli.plan.planner.estimate import Estimate
from ulysses_cli.plan.planner.sweep import Curve, LengthSweep, compute_sweep
from ulysses_cli.report.page.charts import Mark, Series, draw_lines
from ulysses_cli.report.page.page import Chart, Note, PageSection, Table, make_page
from ulysses_cli.report.printing import format_table
from ulysses_cli.report.quantities import format_gib

LEVERS = "with the levers that a run of each length would choose where the recipe leaves them open"


def describe_sweep(estimate: Estimate, sweep: LengthSweep) -> dict[str, Any]:
    return {
        "gpu": estimate.gpu.key,
        "gpu_capacity_bytes": estimate.fit.gpu_capacity_bytes,
        "lengths": list(sweep.lengths),
        "gpu_peak_bytes": {curve.name: list(curve.peaks) for curve in sweep.curves},
        "fits": {curve.name: list(curve.fits) for curve in sweep.curves},
    }


def format_sweep(estimate: Estimate, sweep: LengthSweep) -> str:
    """A table of GiB per GPU. An x marks what does not fit."""
    capacity = estimate.fit.gpu_capacity_bytes

    def cell(curve: Curve, index: int) -> str:
        peak = curve.peaks[index]
        return "-" if peak is None else f"{format_gib(peak)}{'' if curve.fits[index] else ' x'}"

    rows = [
        (f"{length:,}", *(cell(curve, index) for curve in sweep.curves)) for index, length in enumerate(sweep.lengths)
    ]
    gpus = f"{estimate.job.world_size} x {estimate.gpu.key}"
    head = f"{estimate.job.shape.name} on {gpus}: GiB per GPU, of {format_gib(capacity)}"
    table = format_table(("tokens per row", *(curve.name for curve in sweep.curves)), rows)
    return f"{head}\n\n{table}\n\n{_explain_marks(sweep)}"


def _explain_marks(sweep: LengthSweep) -> str:
    cells = [cell for curve in sweep.curves for cell in zip(curve.peaks, curve.fits, strict=True)]
    lines = [f"{LEVERS}; large tiles stay off"]
    if any(peak is not None and not fits for peak, fits in cells):
        lines.append("x: does not fit the GPU or the host with any of them")
    if any(peak is None for peak, _ in cells):
        closed = [f"memory.{SPELLED.get(name, name)} is {str(value).lower()}" for name, value in sweep.closed]
        condition = f" while {' and '.join(closed)}" if closed else ""
        lines.append(f"-: a tensor of a rank would exceed 2^31 elements, which kernels cannot index{condition}")
    return "\n".join(lines)


def make_sweep_page(sweeps: Sequence[tuple[Estimate, LengthSweep]]) -> str:
    sections = []
    for estimate, sweep in sweeps:
        capacity = estimate.fit.gpu_capacity_bytes
        limit = 2.5 * capacity  # higher values are not drawn: they would flatten the part of the curves that matters
        series = [
            Series(curve.name, sweep.lengths, [p if p is None or p <= limit else None for p in curve.peaks])
            for curve in sweep.curves
        ]
        marks = [Mark(capacity, f"{estimate.gpu.key}")]
        gpus = f"{estimate.job.world_size} x {estimate.gpu.name}"
        svg = draw_lines(gpus, series, "tokens per row (tokens)", "memory per GPU (bytes)", x_log=True, marks=marks)
        rows = [
            (f"{length:,}", *("-" if (peak := c.peaks[i]) is None else format_gib(peak) for c in sweep.curves))
            for i, length in enumerate(sweep.lengths)
        ]
        table = Table(("tokens per row", *(curve.name for curve in sweep.curves)), rows, "GiB per GPU")
        note = f"Predicted by formula, {LEVERS}; the last curve has every lever."
        sections.append(PageSection(f"{estimate.job.shape.name} on {gpus}", [Chart(svg, note, table)]))
    about = Note("These are predictions made before a run. A rehearsal on the machine measures the peak.")
    return make_page("Memory by row length", [*sections, PageSection("About this page", [about])])


def compute_sweeps(estimates: Sequence[Estimate]) -> list[tuple[Estimate, LengthSweep]]:
    return [(estimate, compute_sweep(estimate.job, estimate.gpu, estimate.choice.reasons)) for estimate in estimates]
