"""Draws charts as SVG: lines, bars, stacks, with linear or logarithmic axes, and a grid of scores by length and
depth. Escapes text, keeps gaps, and keeps every spike when it thins points. A label may end in its unit, as in
`memory (bytes)`: tokens, bytes, seconds, share and USD have their formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ulysses_cli.plan.units import format_count
from ulysses_cli.report.page import drawing
from ulysses_cli.report.page.drawing import BOTTOM, HEIGHT, SMALLEST, TOP, WIDTH, Axis, Label, estimate_width, make_axis
from ulysses_cli.report.quantities import NO_VALUE, format_quantity, is_number, split_unit

COLUMN_WIDTH = 0.5  # in units of the viewBox: points within one column are thinned
MANY_POINTS = 400
MAX_VALUES_SHOWN = 8  # above bars; with more bars, no value is written
LEAST_LEVEL_ROOM, LEAST_SLANTED_BAND, SLANTED_ROOM = 72, 20, 62
Values = Sequence[float | None]


@dataclass(frozen=True)
class Series:
    """A named line. None is a gap; a NaN or infinite value is a gap with a cross at the top edge."""

    name: str
    xs: Sequence[float]
    ys: Values


@dataclass(frozen=True)
class Mark:
    """A dashed line across the chart with its text, such as a GPU's capacity on the y axis."""

    value: float
    text: str
    axis: Literal["x", "y"] = "y"


@dataclass
class _Track:
    """A series prepared for drawing: unbroken runs of points, and the x of values that are NaN or infinite."""

    runs: list[list[tuple[float, float]]] = field(default_factory=list)
    broken: list[float] = field(default_factory=list)

    def walk(self) -> Iterator[tuple[float, float]]:
        for run in self.runs:
            yield from run


def draw_lines(
    title: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    x_log: bool = False,
    y_log: bool = False,
    marks: Sequence[Mark] = (),
) -> str:
    (x_text, x_unit), (y_text, y_unit) = split_unit(x_label), split_unit(y_label)
    tracks = [_make_track(curve, x_log, y_log) for curve in series]
    xs = [x for track in tracks for x in (*(x for x, _ in track.walk()), *track.broken)]
    ys = [y for track in tracks for _, y in track.walk()]
    levels = [m for m in marks if m.axis == "y" and is_number(m.value) and (m.value > SMALLEST or not y_log)]
    y_axis = make_axis(
        [*ys, *(m.value for m in levels)], BOTTOM, TOP, y_unit, is_log=y_log, padding=0.05, from_zero=y_unit == "bytes"
    )
    ends = [_label_end(curve, track, y_unit, len(series) == 1) for curve, track in zip(series, tracks, strict=True)]
    left = drawing.compute_left(y_axis.ticks)
    right = drawing.compute_right([*ends, *(m.text for m in levels)])
    is_whole = all(float(x).is_integer() for x in xs)
    x_axis = make_axis(xs, left, right, x_unit, is_log=x_log, is_whole=is_whole)
    parts = [*drawing.draw_frame(left, right, y_axis, y_text), *drawing.draw_x_ticks(x_axis, x_text)]
    parts += _draw_x_marks(marks, x_axis)
    labels = []
    for level in levels:
        height = y_axis.place(level.value)
        parts.append(f'<path class="mark" d="M{left:.1f} {height:.1f}H{right:.1f}"/>')
        labels.append(Label(height, level.text))
    for index, (track, end) in enumerate(zip(tracks, ends, strict=True)):
        parts.append(_draw_track(index, track, x_axis, y_axis))
        if track.runs:
            labels.append(Label(y_axis.place(track.runs[-1][-1][1]), end, index))
    if not xs:
        parts.append(_draw_empty(left, right))
    description = [f"Lines over {x_text}."]
    description += [_describe_series(curve, track, y_unit) for curve, track in zip(series, tracks, strict=True)]
    for mark in marks:
        description.append(f"{mark.text}: {format_quantity(mark.value, y_unit if mark.axis == 'y' else x_unit)}.")
    return drawing.wrap_svg(title, " ".join(description), [*parts, *drawing.draw_labels(right, labels)])


def draw_bars(title: str, labels: Sequence[str], values: Values | Mapping[str, Values], y_label: str) -> str:
    """One bar per label, or a group of bars per label if `values` maps names to values."""
    y_text, unit = split_unit(y_label)
    groups = dict(values) if isinstance(values, Mapping) else {"": values}
    _check_lengths(labels, groups)
    finite = [value for group in groups.values() for value in group if value is not None and is_number(value)]
    y_axis = make_axis(finite or [1.0], BOTTOM, TOP, unit, from_zero=True, padding=0.04)
    left, right = drawing.compute_left(y_axis.ticks), drawing.compute_right(list(groups))
    bars, texts, floor = drawing.draw_frame(left, right, y_axis, y_text), [], y_axis.place(0)
    band = (right - left) / max(1, len(labels))
    width = band * (0.82 if band > 4 else 1) / max(1, len(groups))
    for index, (name, group) in enumerate(groups.items()):
        for position, value in enumerate(group):
            x, text = left + (position + 0.5) * band + (index - len(groups) / 2) * width, format_quantity(value, unit)
            tooltip = f"{f'{name}, ' if name else ''}{labels[position]}: {text}"
            if value is None or not is_number(value):
                missing = text if estimate_width(text) <= width else NO_VALUE
                texts.append(drawing.write_text(x + width / 2, floor - 5, missing, anchor="middle", kind="muted"))
                continue
            height = y_axis.place(value)
            bars.append(_draw_box("bar", index, x, width, floor, height, tooltip))
            if len(labels) * len(groups) <= MAX_VALUES_SHOWN and estimate_width(text) <= width * 1.1:
                above = height - 5 if value >= 0 else height + 14
                texts.append(drawing.write_text(x + width / 2, above, text, anchor="middle"))
    bars += [*texts, *_draw_band_labels(labels, left, band)]
    step = drawing.LINE_HEIGHT
    names = [Label(TOP + index * step, name, index) for index, name in enumerate(groups) if name]
    description = f"Bars, {y_text}, {format_count(len(labels), 'label')}." + "".join(
        f" {name or y_text}: highest {format_quantity(max(ys), unit)} at {labels[list(group).index(max(ys))]}."
        for name, group in groups.items()
        if (ys := [value for value in group if value is not None and is_number(value)])
    )
    return drawing.wrap_svg(title, description, [*bars, *drawing.draw_labels(right, names)])


def draw_stack(title: str, labels: Sequence[str], parts: Mapping[str, Sequence[float]], unit: str) -> str:
    """One bar per label, stacked from its parts, the first at the bottom. `unit` is bytes, seconds, or any word."""
    y_text, unit = split_unit(unit)
    _check_lengths(labels, parts)
    for name, values in parts.items():
        if any(not is_number(value) or value < 0 for value in values):
            raise ValueError(f"{name} of {title} has a part that is negative or not a number: {list(values)}")
    totals = [math.fsum(values) for values in zip(*parts.values(), strict=True)]
    y_axis = make_axis(totals or [1.0], BOTTOM, TOP, unit, from_zero=True, padding=0.04)
    left, right = drawing.compute_left(y_axis.ticks), drawing.compute_right(list(parts))
    marks = drawing.draw_frame(left, right, y_axis, "" if y_text == unit else y_text)
    band = (right - left) / max(1, len(labels))
    width = min(band * (0.72 if band > 6 else 1), 90)
    below, names = [0.0] * len(labels), []
    for index, (name, values) in enumerate(parts.items()):
        for position, value in enumerate(values):
            floor, height = y_axis.place(below[position]), y_axis.place(below[position] + value)
            if value > 0:
                x = left + (position + 0.5) * band - width / 2
                tooltip = f"{name}, {labels[position]}: {format_quantity(value, unit)}"
                marks.append(_draw_box("part", index, x, width, floor, height, tooltip))
            if position == len(labels) - 1:
                names.append(Label((floor + height) / 2, name, index))
            below[position] += value
    texts = [format_quantity(total, unit) for total in totals]
    if len(labels) <= MAX_VALUES_SHOWN and max(map(estimate_width, texts), default=0) < band:
        for position, (total, text) in enumerate(zip(totals, texts, strict=True)):
            x = left + (position + 0.5) * band
            marks.append(drawing.write_text(x, y_axis.place(total) - 5, text, anchor="middle"))
    marks += _draw_band_labels(labels, left, band)
    if not labels:
        marks.append(_draw_empty(left, right))
    description = f"{format_count(len(labels), 'stacked bar')}." + "".join(
        f" {label}: {format_quantity(total, unit)}, most of it {max(parts, key=lambda name: parts[name][position])}."
        for position, (label, total) in enumerate(zip(labels, totals, strict=False))
        if position < MAX_VALUES_SHOWN
    )
    return drawing.wrap_svg(title, description, [*marks, *drawing.draw_labels(right, names)])


def thin_points(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keeps the first, the lowest, the highest and the last point of every pixel column, in their order."""
    kept: list[tuple[float, float]] = []
    start = 0
    for position in range(1, len(points) + 1):
        is_end = position == len(points) or points[position][0] // COLUMN_WIDTH != points[start][0] // COLUMN_WIDTH
        if is_end:
            column = range(start, position)
            lowest, highest = min(column, key=lambda i: points[i][1]), max(column, key=lambda i: points[i][1])
            kept += [points[index] for index in sorted({start, lowest, highest, position - 1})]
            start = position
    return kept


def _make_track(series: Series, x_log: bool, y_log: bool) -> _Track:
    """Breaks the line at gaps, and where x decreases, as it does if a run resumes from an older checkpoint."""
    track, is_open = _Track(), False
    for x, y in zip(series.xs, series.ys, strict=True):
        if not is_number(x) or (x_log and x < SMALLEST):
            is_open = False
            continue
        is_drawable = y is not None and is_number(y) and (y > SMALLEST or not y_log)
        if y is None or not is_drawable:
            is_open = False
            if y is not None and not is_number(y):
                track.broken.append(x)
            continue
        if not is_open or x < track.runs[-1][-1][0]:
            track.runs.append([])
        track.runs[-1].append((x, y))
        is_open = True
    return track


def _draw_track(index: int, track: _Track, x_axis: Axis, y_axis: Axis) -> str:
    path, dots = [], []
    for run in track.runs:
        points = thin_points([(x_axis.place(x), y_axis.place(y)) for x, y in run])
        if len(points) == 1:
            dots.append(f'<circle class="dot" cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="2.5"/>')
        else:
            places = [f"{x:.1f} {y:.1f}" for x, y in points]
            path.append(
                "M" + "L".join(p for i, p in enumerate(places) if i < 1 or p != places[i - 1] or len(places) == 2)
            )
    crosses = sorted({round(x_axis.place(x)) for x in track.broken})
    bad = "".join(f"M{x - 3} {TOP - 8}l6 6m0 -6l-6 6" for x in crosses)
    many = " many" if sum(map(len, track.runs)) > MANY_POINTS else ""
    line = f'<path class="line{many}" d="{"".join(path)}"/>' if path else ""
    cross = f'<path class="bad" d="{bad}"><title>not a number</title></path>' if bad else ""
    return f'<g class="{drawing.pick_class(index)}">{line}{"".join(dots)}{cross}</g>'


def _draw_x_marks(marks: Sequence[Mark], x_axis: Axis) -> list[str]:
    drawn, taken = [], -math.inf
    shown = [m for m in marks if m.axis == "x" and x_axis.low <= m.value <= x_axis.high]
    for mark in sorted(shown, key=lambda m: m.value):
        place, width = x_axis.place(mark.value), estimate_width(mark.text)
        drawn.append(f'<path class="mark" d="M{place:.1f} {TOP}V{BOTTOM}"/>')
        start = place + 4 if place + width < WIDTH - 8 else place - width
        if start > taken:
            drawn.append(drawing.write_text(start, TOP + 10, mark.text, kind="muted"))
            taken = start + width
    return drawn


def _draw_box(kind: str, index: int, x: float, width: float, floor: float, height: float, tooltip: str) -> str:
    top, tall = min(floor, height), max(abs(floor - height), 0.3)
    return (
        f'<rect class="{kind} {drawing.pick_class(index)}" x="{x:.2f}" y="{top:.1f}" width="{width:.2f}" '
        f'height="{tall:.1f}"><title>{drawing.escape(tooltip)}</title></rect>'
    )


def _draw_band_labels(labels: Sequence[str], left: float, band: float) -> list[str]:
    """Draws labels level if they fit, slanted if there are few of them, and otherwise only every n-th."""
    longest, room = max(map(estimate_width, labels), default=0.0), band - 6
    slant, stride = 0.0, 1
    if longest > room and room < LEAST_LEVEL_ROOM:
        if band >= LEAST_SLANTED_BAND and longest > 30:
            slant, room = -30.0, SLANTED_ROOM
        else:
            stride = math.ceil((longest + 6) / band)
            room = longest
    anchor, y = ("end", BOTTOM + 13) if slant else ("middle", BOTTOM + 19)
    return [
        drawing.write_text(left + (i + 0.5) * band, y, text, anchor=anchor, kind="muted", slant=slant)
        for i in range(0, len(labels), stride)
        if (text := drawing.shorten(labels[i], room))
    ]


def _label_end(series: Series, track: _Track, unit: str, is_alone: bool) -> str:
    """A series' name with its last value, or the name alone if there is no room for both."""
    if not track.runs:
        return ""
    value = format_quantity(track.runs[-1][-1][1], unit)
    text = value if is_alone else f"{series.name} {value}"
    return text if estimate_width(text) <= drawing.MAX_LABEL_WIDTH else series.name


def _describe_series(series: Series, track: _Track, unit: str) -> str:
    ys = [y for _, y in track.walk()]
    if not ys:
        return f"{series.name}: no values."
    named = (("first", ys[0]), ("lowest", min(ys)), ("highest", max(ys)), ("last", ys[-1]))
    text = f"{series.name}: " + ", ".join(f"{word} {format_quantity(value, unit)}" for word, value in named)
    return text + (f"; {format_count(len(track.broken), 'value')} not a number." if track.broken else ".")


def _draw_empty(left: float, right: float) -> str:
    return drawing.write_text((left + right) / 2, HEIGHT / 2, "no values", anchor="middle", kind="muted")


def _check_lengths(labels: Sequence[str], groups: Mapping[str, Sequence[object]]) -> None:
    for name, values in groups.items():
        if len(values) != len(labels):
            raise ValueError(f"{len(values)} values of {name or 'the bars'} for {len(labels)} labels")


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
