"""What `ulysses evaluate` found on the tiny model of tests/ranks/test_recall.py: before training and after, and beside
a checkpoint at more lengths. recall.json holds the findings as that test's commands wrote them, without the
questions and the folders' names."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from canvas import MARGIN, WIDTH, Theme, draw_heading, place_chart, read_description, wrap_svg, write

from ulysses_cli.report.page.charts import Series, draw_heat_map, draw_lines
from ulysses_cli.report.quantities import format_binary

RESULT = Path(__file__).with_name("recall.json")
HEADING = "Score by length and depth, before training and after"
BELOW = "niah_single_1 on two ranks: the first half of a prompt is rank 0's, and the question stands on rank 1"
SIDES = {"untrained": "untrained", "trained": "after 300 steps"}
GAP, CHART_TOP, HEIGHT = 24, 104, 330
COMPARED_HEADING = "A model beside its own checkpoint, question by question"
COMPARED_BELOW = "niah_single_1 on two ranks, 16 questions of each length; the model was trained on up to 900 tokens"
MODELS = ("after 300 steps", "after 75 steps")


def draw_recall(theme: Theme) -> str:
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    width = (WIDTH - 2 * MARGIN - GAP) / 2
    parts, said = draw_heading(theme, HEADING, BELOW), []
    for at, (name, title) in enumerate(SIDES.items()):
        findings: dict[str, Any] = found[name]
        cells = {(row["length"], row["depth"]): row["score"] for row in findings["heat_map"]}
        svg = draw_heat_map(title, cells, format_binary)
        x = MARGIN + at * (width + GAP)
        parts.append(place_chart(theme, svg, x, CHART_TOP, width))
        scores = ", ".join(
            f"{100 * row['score']:.0f} % of {row['n']} questions at {row['length']} tokens"
            for row in findings["scores"]
        )
        parts.append(write(theme, x, 86, scores, 12))
        said.append(f"{title[0].upper()}{title[1:]}: {scores}. {html.unescape(read_description(svg))}")
    return wrap_svg(theme, HEIGHT, HEADING, f"Two heat maps of the needle task {BELOW}. {' '.join(said)}", parts)


def draw_compared(theme: Theme) -> str:
    """Scores by length of both, and where the better one finds its needles."""
    findings: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))["compared"]
    width = (WIDTH - 2 * MARGIN - GAP) / 2
    series = [
        Series(name, [float(row["length"]) for row in rows], [row["score"] for row in rows])
        for name, rows in zip(MODELS, (findings["mean"], findings["against"]["mean"]), strict=True)
    ]
    cells = {(row["length"], row["depth"]): row["score"] for row in findings["heat_map"]}
    charts = [
        draw_lines("Score by length", series, "tokens", "score", x_log=True),
        draw_heat_map(f"Score by length and depth, {MODELS[0]}", cells, format_binary),
    ]
    difference = findings["difference"]
    said = (
        f"Of all questions {100 * difference['difference']:+.1f} points, 95 % interval "
        f"{100 * difference['low']:+.0f} to {100 * difference['high']:+.0f}. Effective length: "
        f"{format_binary(findings['effective_length']['own'])} after 300 steps."
    )
    parts = [*draw_heading(theme, COMPARED_HEADING, COMPARED_BELOW), write(theme, MARGIN, 86, said, 12)]
    for at, svg in enumerate(charts):
        parts.append(place_chart(theme, svg, MARGIN + at * (width + GAP), CHART_TOP, width))
    described = " ".join(html.unescape(read_description(svg)) for svg in charts)
    return wrap_svg(theme, HEIGHT, COMPARED_HEADING, f"The task {COMPARED_BELOW}. {said} {described}", parts)
