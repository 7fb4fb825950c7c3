"""The parts that all charts share: axes with round ticks, size, palettes for light and dark, escaped text, a frame,
labels that do not overlap. Knows numbers, units and SVG, but no kind of chart."""

from __future__ import annotations

import html
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ulysses_cli.plan.units import BINARY_SUFFIXES, SI_SUFFIXES, format_bytes, pick_scale
from ulysses_cli.report.quantities import LARGEST, format_binary, format_number, trim_zeros

LONGEST_TICK = 11
SMALLEST = 1e-290  # the smallest value on a logarithmic axis: smaller floats are no longer exact


@dataclass(frozen=True)
class Axis:
    """Maps `low` to pixel `start` and `high` to pixel `end`. Ticks are (value, text), in rising order."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool
    ticks: tuple[tuple[float, str], ...]

    def place(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log2(value), math.log2(low), math.log2(high)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def make_axis(
    values: Iterable[float],
    start: float,
    end: float,
    unit: str = "",
    *,
    is_log: bool = False,
    num_ticks: int = 5,
    is_whole: bool = False,
    padding: float = 0.0,
    from_zero: bool = False,
) -> Axis:
    """`padding` is the free share at both ends. A linear axis with padding starts at zero if the lowest value is less
    than a quarter of the highest."""
    numbers = list(values)
    if not numbers:
        return Axis(1.0, 2.0, start, end, is_log, ())
    low, high = min(numbers), max(numbers)
    if is_log:
        low, high = (low / 1.5, high * 1.5) if high <= low * (1 + 1e-9) else (low, high)
        spread = 2.0 ** ((math.log2(high) - math.log2(low)) * padding)
        low, high = max(low / spread, SMALLEST / 1e9), min(high * spread, LARGEST)
        return Axis(low, high, start, end, True, _make_log_ticks(low, high, unit, num_ticks))
    if from_zero or (padding and 0 < low < high / 4):
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= max(abs(low), abs(high)) * 1e-9 or high - low < 1e-290:
        room = max(abs(high) * 1e-6, 1.0) if is_whole else max(abs(high) * 0.05, 1e-6) if high else 1.0
        low, high = (low if low == 0 else low - room), high + room
    room = (high - low) * padding
    low, high = (low if low == 0 else low - room), (high if high == 0 else high + room)
    return Axis(low, high, start, end, False, _make_linear_ticks(low, high, unit, num_ticks, is_whole))


def _make_linear_ticks(
    low: float, high: float, unit: str, num_ticks: int, is_whole: bool
) -> tuple[tuple[float, str], ...]:
    largest = max(abs(low), abs(high))
    scale, suffix = _pick_tick_scale(largest, unit)
    step = _round_step((high - low) / scale / num_ticks)
    if is_whole and scale == 1:
        step = max(1.0, step)
    first, last = math.ceil(low / scale / step - 1e-9), math.floor(high / scale / step + 1e-9)
    numbers = [index * step for index in range(first, last + 1)]
    texts = _format_ticks(numbers, step)
    return tuple(
        (number * scale, text + suffix if number else "0")
        for place, (number, text) in enumerate(zip(numbers, texts, strict=True))
        if text not in texts[:place]
    )


def _format_ticks(numbers: list[float], step: float) -> list[str]:
    """Formats ticks with as many decimals as the step has, or with powers of ten if that would be too long. Uses more
    digits if two ticks would have the same text."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    texts = [f"{number:,.{min(decimals, 20)}f}" for number in numbers]
    if max(map(len, texts), default=0) > LONGEST_TICK or max(map(abs, numbers), default=1) < 1e-3:
        texts = [format_number(number) for number in numbers]
    return texts if len(set(texts)) == len(texts) else [f"{number:.7g}" for number in numbers]


def _pick_tick_scale(largest: float, unit: str) -> tuple[float, str]:
    """One scale for all ticks of an axis, so that they are easy to compare."""
    if unit == "bytes":
        scale, suffix = pick_scale(largest, BINARY_SUFFIXES)
        return scale, f" {suffix}B"
    if unit == "seconds":
        return next(
            (scale, suffix)
            for least, scale, suffix in ((7200, 3600.0, " h"), (120, 60.0, " min"), (1, 1.0, " s"), (0, 1e-3, " ms"))
            if largest >= least
        )
    if unit == "share":
        return 0.01, "%"
    scale, suffix = pick_scale(largest, SI_SUFFIXES) if 9_999.5 <= largest < 1e15 else (1.0, "")
    return scale, suffix


def _round_step(rough: float) -> float:
    """Rounds up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))


def _make_log_ticks(low: float, high: float, unit: str, num_ticks: int) -> tuple[tuple[float, str], ...]:
    base = 2.0 if unit in ("tokens", "bytes") else 10.0
    first = math.ceil(math.log(low, base) - 1e-9)
    last = math.floor(math.log(high, base) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / (num_ticks + 1)))
    ticks = [base**power for power in range(first, last + 1, stride)]
    if base == 10 and len(ticks) < 3:
        powers = range(first - 1, last + 1)
        ticks = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
        ticks = [value for value in ticks if low <= value <= high]
    if len(ticks) < 2:
        return _make_linear_ticks(low, high, unit, num_ticks, False)
    return tuple((value, _format_log_tick(value, unit)) for value in ticks)


def _format_log_tick(value: float, unit: str) -> str:
    if unit == "tokens" and 1 <= value < 2.0**50:
        return format_binary(value)
    if unit == "bytes" and 1 <= value < 2.0**60:
        number, _, suffix = format_bytes(value).partition(" ")
        return f"{trim_zeros(number)} {suffix}"
    return format_number(value)


WIDTH, HEIGHT = 480, 290
TOP, BOTTOM = 58, 246  # of the plot: title and the y axis's name above, ticks and the x axis's name below
FONT_SIZE, LINE_HEIGHT = 12.5, 16
SMALL_SCREEN = 1.1  # text is larger by this factor on a small screen
MAX_LABEL_WIDTH, MAX_TITLE_WIDTH, MAX_LABELS = 165, WIDTH / 1.2, 11
GLYPH_WIDTHS = {
    **dict.fromkeys("%MW@mw\u2026", 0.98),
    **dict.fromkeys("iljtfrI.,:;'|!()[]- ", 0.41),
}  # of DejaVu Sans, a wide font
LIGHT = {"surface": "#ffffff", "ink": "#1b1f24", "muted": "#5b6470", "grid": "#e3e6ea"}
DARK = {"surface": "#171a1f", "ink": "#e8eaed", "muted": "#a0a9b5", "grid": "#30363f"}
LIGHT_SERIES = (
    *("#1f5fd0", "#b45309", "#0b7a5b", "#a8289c", "#c62828"),
    *("#0a7189", "#6d3fd1", "#6b6a00", "#56606e", "#7c4a32"),
)
DARK_SERIES = (
    *("#78a9ff", "#f2a24b", "#4fc59a", "#e58be0", "#ff8580"),
    *("#4cc3dd", "#b39bff", "#c9c24e", "#a3adba", "#cf9f86"),
)


def _list_variables(colours: dict[str, str], series: Sequence[str]) -> str:
    named = [*colours.items(), *((f"s{index}", colour) for index, colour in enumerate(series))]
    return "".join(f"--{name}:{colour};" for name, colour in named)


STYLE = (
    f".chart{{{_list_variables(LIGHT, LIGHT_SERIES)}"
    f"font:{FONT_SIZE}px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;"
    "font-variant-numeric:tabular-nums;display:block;width:100%;height:auto}"
    f"@media(prefers-color-scheme:dark){{.chart{{{_list_variables(DARK, DARK_SERIES)}}}}}"
    f"@media(max-width:520px){{.chart{{font-size:{FONT_SIZE * SMALL_SCREEN:.1f}px}}}}"
    ".chart text{fill:var(--ink)}.chart .muted{fill:var(--muted)}.chart .own{fill:currentColor}"
    ".chart .title{font-weight:650;font-size:1.12em}"
    ".chart .grid{stroke:var(--grid);stroke-width:1}.chart .base{stroke:var(--muted);stroke-width:1}"
    ".chart .line{fill:none;stroke:currentColor;stroke-width:1.75;stroke-linejoin:round;stroke-linecap:round}"
    ".chart .many{stroke-width:1}"
    ".chart .dot,.chart .bar{fill:currentColor}"
    ".chart .part{fill:currentColor;stroke:var(--surface);stroke-width:.75}"
    ".chart .mark{stroke:var(--muted);stroke-width:1.25;stroke-dasharray:4 3}"
    ".chart .bad{stroke:var(--s4);stroke-width:1.5;fill:none}"
    + "".join(f".chart .s{index}{{color:var(--s{index})}}" for index in range(len(LIGHT_SERIES)))
)


@dataclass(frozen=True)
class Label:
    """Text at the right edge, as near to a height as other labels allow. `series` is below 0 for a mark's label."""

    height: float
    text: str
    series: int = -1


def escape(text: object) -> str:
    """Escapes text for HTML and XML, also within attributes. Replaces characters that XML cannot hold."""
    clean = re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", str(text))
    return html.escape(clean, quote=True)


def estimate_width(text: str) -> float:
    """An upper bound of a text's width on a small screen, for the common fonts."""
    glyphs = (GLYPH_WIDTHS.get(letter, 0.66 if letter < "\u2e80" else 1.05) for letter in text)
    return sum(glyphs) * FONT_SIZE * SMALL_SCREEN


def shorten(text: str, room: float) -> str:
    """Leaves out the middle of a text: names with a common start differ at their ends."""
    if estimate_width(text) <= room:
        return text
    for length in range(min(len(text) - 1, int(room)), 0, -1):
        tail = length // 3
        short = f"{text[: length - tail]}\u2026{text[len(text) - tail :]}"
        if estimate_width(short) <= room:
            return short
    return ""


def pick_class(index: int) -> str:
    return f"s{index % len(LIGHT_SERIES)}"


def write_text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "", slant: float = 0) -> str:
    kinds = f' class="{kind}"' if kind else ""
    turn = f' transform="rotate({slant:g} {x:.1f} {y:.1f})"' if slant else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kinds}{turn}>{escape(text)}</text>'


def wrap_svg(title: str, description: str, marks: Iterable[str]) -> str:
    """A complete SVG. Its ids link the title and the description to it for screen readers."""
    body = "".join(marks)
    name = f"c{zlib.crc32((title + description + body).encode('utf-8', 'replace')):08x}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-labelledby="{name}t {name}d"><title id="{name}t">{escape(title)}</title>'
        f'<desc id="{name}d">{escape(description)}</desc><style>{STYLE}</style>'
        f"{write_text(2, 17, shorten(title, MAX_TITLE_WIDTH / 1.12), kind='title')}{body}</svg>"
    )


def compute_left(y_ticks: Sequence[tuple[float, str]]) -> float:
    return 10 + min(max((estimate_width(text) for _, text in y_ticks), default=0), 110)


def compute_right(labels: Sequence[str]) -> float:
    longest = max((min(estimate_width(text), MAX_LABEL_WIDTH) for text in labels), default=0)
    return WIDTH - 4 - (longest + 8 if longest else 8)


def draw_frame(left: float, right: float, y_axis: Axis, y_label: str) -> list[str]:
    """Grid lines with their values, and the y axis's name: level and on top, so that it is easy to read."""
    marks = [write_text(2, TOP - 17, shorten(y_label, MAX_TITLE_WIDTH), kind="muted")]
    for value, text in y_axis.ticks:
        height = y_axis.place(value)
        kind = "base" if value == 0 else "grid"
        marks.append(f'<path class="{kind}" d="M{left:.1f} {height:.1f}H{right:.1f}"/>')
        marks.append(write_text(left - 7, height + 4, text, anchor="end", kind="muted"))
    return marks


def draw_x_ticks(x_axis: Axis, x_label: str) -> list[str]:
    """Leaves out a tick whose text would touch the one before it."""
    marks, taken = [], -math.inf
    for value, text in x_axis.ticks:
        place, half = x_axis.place(value), estimate_width(text) / 2
        if place - half < taken:
            continue
        taken = place + half + 8
        marks.append(f'<path class="base" d="M{place:.1f} {BOTTOM}v4"/>')
        marks.append(write_text(place, BOTTOM + 19, text, anchor="middle", kind="muted"))
    middle = (x_axis.start + x_axis.end) / 2
    return [*marks, write_text(middle, HEIGHT - 7, shorten(x_label, MAX_TITLE_WIDTH), anchor="middle", kind="muted")]


def draw_labels(right: float, labels: Sequence[Label]) -> list[str]:
    """Draws each label at its height, moved up or down just enough that labels do not overlap."""
    shown = list(labels[:MAX_LABELS])
    if len(labels) > len(shown):
        shown[-1:] = [Label(BOTTOM, f"and {len(labels) - MAX_LABELS + 1} more")]
    order = sorted(range(len(shown)), key=lambda index: shown[index].height)
    heights: list[float] = []
    for index in order:
        heights.append(max(shown[index].height, heights[-1] + LINE_HEIGHT if heights else TOP))
    limit = float(BOTTOM)
    for position in reversed(range(len(heights))):
        heights[position] = min(heights[position], limit)
        limit = heights[position] - LINE_HEIGHT
    marks = []
    for index, height in zip(order, heights, strict=True):
        label = shown[index]
        kind = f"own {pick_class(label.series)}" if label.series >= 0 else "muted"
        marks.append(write_text(right + 8, height + 4, shorten(label.text, MAX_LABEL_WIDTH), kind=kind))
    return marks
