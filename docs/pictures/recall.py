"""What `ulysses evaluate` found on the tiny model of tests/ranks/test_recall.py, before training and after. recall.json
holds both findings as that test's commands wrote them, without the questions and the folders' names."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from canvas import MARGIN, WIDTH, Theme, draw_heading, place_chart, read_description, wrap_svg, write

from ulysses_cli.report.page.heat_map import draw_heat_map
from ulysses_cli.report.quantities import format_binary

RESULT = Path(__file__).with_name("recall.json")
HEADING = "Score by length and depth, before training and after"
BELOW = "niah_single_1 on two ranks: the first half of a prompt is rank 0's, and the question stands on rank 1"
SIDES = {"untrained": "untrained", "trained": "after 300 steps"}
GAP, CHART_TOP, HEIGHT = 24, 104, 330


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
