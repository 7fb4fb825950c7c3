"""Formats the findings of verify, bench and doctor as text and as a page with charts.

The format of findings is that of prove/results.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ulysses_cli.plan.nouns import format_count
from ulysses_cli.report.page import charts, page
from ulysses_cli.report.page.page import Block, Chart, Facts, Figures, Note, PageSection, Table
from ulysses_cli.report.printing import format_table
from ulysses_cli.report.quantities import NO_VALUE, format_number, format_quantity, format_seconds

Findings = Mapping[str, Any]
Row = Mapping[str, Any]
CURVES = {
    "tokens_per_second": "tokens per second",
    "tflops": "TFLOPS per rank",
    "peak_memory_bytes": "GPU memory (bytes)",
    "host_peak_memory_bytes": "host memory of a rank (bytes)",
    "communication_share": "communication (share)",
    "exchange_share": "all-to-all (share)",
    "step_seconds": "a step (seconds)",
}
# Values without a column: one is part of a row's name, others are many numbers, for programs.
NO_COLUMN = {"max_length", "part_seconds", "predicted_part_seconds"}
PREDICTED = {
    "step_seconds": "predicted_step_seconds",
    "peak_memory_bytes": "predicted_memory_bytes",
    "host_peak_memory_bytes": "predicted_host_memory_bytes",
}


def format_findings(findings: Findings) -> str:
    """A table per group, then notes, fixes and the verdict."""
    parts = []
    for group, rows in collect_groups(findings["rows"]):
        header, cells = make_cells(rows)
        parts.append(f"{group}\n{format_table(header, cells)}")
    if findings["notes"]:
        parts.append("\n".join(f"note: {note}" for note in findings["notes"]))
    if findings["fixes"]:
        lines = [f"{number}. {fix['what']}\n   {fix['how']}" for number, fix in enumerate(findings["fixes"], 1)]
        parts.append("to fix, in this order:\n" + "\n".join(lines))
    return "\n\n".join([*parts, format_verdict(findings)])


def format_verdict(findings: Findings) -> str:
    verdicts = [row["verdict"] for row in findings["rows"]]
    seconds = format_seconds(findings["seconds"])
    failed = verdicts.count("FAIL")
    kinds = [kind for kind in ("PASS", "WARN", "SKIP", "OOM", "FAIL") if kind in verdicts]
    counted = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in kinds)
    result = "PASS" if findings["passed"] else f"FAIL: {format_count(failed, 'finding')}"
    return f"{result} ({counted or 'measured'}; {seconds})"


def collect_groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The rows by group. Groups are in the order of their first rows."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    return list(groups.items())


def make_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The header and the cells of a table with one column per value that some row has."""
    names = list(dict.fromkeys(name for row in rows for name in row["values"] if name not in NO_COLUMN))
    has_verdict, has_text = any(row["verdict"] for row in rows), any(row["text"] for row in rows)
    header = ([""] if has_verdict else []) + ["what", *(name_column(name) for name in names)]
    cells = []
    for row in rows:
        line = [row["verdict"]] if has_verdict else []
        line += [row["name"], *(format_value(name, row["values"].get(name)) for name in names)]
        cells.append(line + ([row["text"]] if has_text else []))
    return header + ([""] if has_text else []), cells


def name_column(name: str) -> str:
    for unit in ("_bytes", "_seconds"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")


def format_value(name: str, value: Any) -> str:
    if value is None:
        return NO_VALUE
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if name in ("difference", "tolerance"):
        return f"{value:.1e}" if value else "0"
    for unit in ("bytes", "seconds"):
        if name.endswith(f"_{unit}"):
            return format_quantity(value, unit)
    if name.endswith(("_share", "_error")) or name == "mfu":
        return format_quantity(value, "share")
    return format_number(value)


def make_findings_page(findings: Findings) -> str:
    """The findings as one HTML page, with a chart for each quantity that was measured at several row lengths."""
    verdict = "PASS" if findings["passed"] else "FAIL"
    sections = [PageSection("Result", [Figures([(findings["command"], verdict, format_verdict(findings))])])]
    curves = _draw_curves(findings["rows"])
    if curves:
        sections.append(PageSection("By row length", curves))
    sections += [PageSection(group, [Table(*make_cells(rows))]) for group, rows in collect_groups(findings["rows"])]
    if findings["fixes"]:
        pairs = [(fix["what"], fix["how"]) for fix in findings["fixes"]]
        sections.append(PageSection("To fix, in this order", [Facts(pairs)]))
    notes: list[Block] = [Note(note) for note in findings["notes"]]
    facts = [(name_column(name), _format_fact(name, value)) for name, value in findings["machine"].items()]
    sections.append(PageSection("How it was measured", [*notes, Facts(facts)]))
    return page.make_page(f"{findings['command']}: {findings['subject']}", sections)


def _format_fact(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {part}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return format_quantity(value, "bytes") if name.endswith("_bytes") else str(value)


def _draw_curves(rows: Sequence[Row]) -> list[Block]:
    """A chart for each quantity that was measured at several row lengths, with its prediction where there is one."""
    blocks: list[Block] = []
    measured = [row for row in rows if row["values"].get("max_length") and row["verdict"] in ("", "PASS")]
    for key, label in CURVES.items():
        series = [
            charts.Series(name, *zip(*points, strict=True))
            for group, group_rows in collect_groups(measured)
            for name, source in ((group, key), (f"{group}, predicted", PREDICTED.get(key, "")))
            if (points := _list_points(group_rows, source))
        ]
        if any(len(curve.xs) > 1 for curve in series):
            x_label = "tokens of a row (tokens)"
            svg = charts.draw_lines(label, series, x_label, label, x_log=True)
            blocks.append(Chart(svg, label, page.tabulate_lines(series, x_label, label)))
    return blocks


def _list_points(rows: Sequence[Row], key: str) -> list[tuple[float, float]]:
    measured = [row["values"] for row in rows if row["values"].get(key) is not None]
    return sorted((float(values["max_length"]), float(values[key])) for values in measured)
