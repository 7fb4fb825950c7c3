"""Draws scores by length and depth as a grid of cells, with each score as text: no colour needs to be told apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ulysses_cli.report.page import drawing
from ulysses_cli.report.page.drawing import BOTTOM, TOP, WIDTH

LEFT, NUM_DEPTHS = 48, 10
MIN_CELL_WIDTH = 34  # below, cells have no text
SERIES = 0  # the colour of a full score


def draw_heat_map(title: str, cells: Mapping[tuple[int, float], float], format_length: Callable[[float], str]) -> str:
    """Takes scores in [0, 1] by length and depth, the lower end of a tenth. The higher a score, the fuller its cell."""
    lengths = sorted({length for length, _ in cells})
    width, height = (WIDTH - 8 - LEFT) / max(1, len(lengths)), (BOTTOM - TOP) / NUM_DEPTHS
    marks = [drawing.write_text(2, TOP - 17, "depth of the evidence", kind="muted")]
    marks += [
        drawing.write_text(LEFT - 7, TOP + (row + 0.7) * height, f"{row * 10} %", anchor="end", kind="muted")
        for row in range(0, NUM_DEPTHS, 2)
    ]
    for column, length in enumerate(lengths):
        x = LEFT + column * width
        marks.append(
            drawing.write_text(x + width / 2, BOTTOM + 16, format_length(length), anchor="middle", kind="muted")
        )
        for row in range(NUM_DEPTHS):
            value = cells.get((length, row / NUM_DEPTHS))
            if value is None:
                continue
            y, text = TOP + row * height, f"{100 * value:.0f}"
            tooltip = drawing.escape(f"{format_length(length)}, {row * 10} %: {text} %")
            marks.append(
                f'<rect class="bar {drawing.pick_class(SERIES)}" x="{x + 1:.1f}" y="{y + 1:.1f}" '
                f'width="{width - 2:.1f}" height="{height - 2:.1f}" fill-opacity="{0.06 + 0.54 * value:.2f}">'
                f"<title>{tooltip}</title></rect>"
            )
            if width >= MIN_CELL_WIDTH:
                marks.append(drawing.write_text(x + width / 2, y + height * 0.72, text, anchor="middle"))
    lowest = min(cells.items(), key=lambda cell: cell[1], default=None)
    described = (
        f" Lowest: {100 * lowest[1]:.0f} % at {format_length(lowest[0][0])}, depth {100 * lowest[0][1]:.0f} %."
        if lowest
        else ""
    )
    return drawing.wrap_svg(title, f"Cells of {len(lengths)} lengths and {NUM_DEPTHS} depths.{described}", marks)
