"""Tests charts: every spike is drawn, gaps stay gaps, text is escaped and legible, positions are exact."""

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.report import quantities
from ulysses_cli.report.page import drawing
from ulysses_cli.report.page.charts import COLUMN_WIDTH, Mark, Series, draw_bars, draw_lines, draw_stack, thin_points
from ulysses_cli.report.page.drawing import make_axis

SVG = "{http://www.w3.org/2000/svg}"
PLANTED = '</text><script>alert(1)</script>&"\x00\ud800'
anything = st.floats(allow_nan=True, allow_infinity=True) | st.none()


def read(svg: str) -> ET.Element:
    """Reads a chart as strict XML and checks that every position is a finite number inside the picture."""
    root = ET.fromstring(svg.encode())
    for element in root.iter():
        for name in ("x", "y", "cx", "cy", "width", "height"):
            if element.tag != f"{SVG}svg" and name in element.attrib:
                assert -60 <= float(element.attrib[name]) <= drawing.WIDTH, (element.tag, element.attrib)
        for number in re.findall(r"[-\d.e]+", element.attrib.get("d", "").replace("-6l", " ")):
            assert math.isfinite(float(number))
    return root


def list_texts(svg: str) -> list[str]:
    return [text.text or "" for text in read(svg).iter(f"{SVG}text")]


def read_line(svg: str) -> list[list[tuple[float, float]]]:
    """Returns the unbroken runs of the first line."""
    path = next(e.attrib["d"] for e in read(svg).iter(f"{SVG}path") if "line" in e.attrib["class"])
    pair = r"([-\d.]+) ([-\d.]+)"
    return [[(float(x), float(y)) for x, y in re.findall(pair, run)] for run in path.split("M")[1:]]


def find_tick(svg: str, text: str) -> float:
    return next(float(t.attrib["y"]) - 4 for t in read(svg).iter(f"{SVG}text") if t.text == text)


@given(st.lists(st.tuples(st.floats(0, 300), st.floats(-1e6, 1e6)), max_size=300))
def test_thinning_keeps_the_extremes_of_every_column(points: list[tuple[float, float]]) -> None:
    points = sorted(points)
    kept = thin_points(points)
    columns: dict[float, list[float]] = {}
    thinned: dict[float, list[float]] = {}
    for source, target in ((points, columns), (kept, thinned)):
        for x, y in source:
            target.setdefault(x // COLUMN_WIDTH, []).append(y)
    assert columns.keys() == thinned.keys()
    for column, ys in columns.items():
        assert (min(ys), max(ys)) == (min(thinned[column]), max(thinned[column]))
        assert len(thinned[column]) <= 4
    remaining = iter(points)
    assert all(point in remaining for point in kept), "order"


def test_points_agree_with_the_ticks() -> None:
    svg = draw_lines("t", [Series("a", [1, 2, 3], [2.0, 4.0, 8.0])], "step", "loss", y_log=True)
    heights = [y for _, y in read_line(svg)[0]]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    assert heights[0] == pytest.approx(find_tick(svg, "2"), abs=0.2)


def test_gaps_stay_gaps_and_values_that_are_no_numbers_are_mentioned(snapshot: SnapshotAssertion) -> None:
    svg = draw_lines("t", [Series("a", range(7), [1.0, 2.0, None, 2.0, 1.0, math.nan, 1.0])], "step", "loss")
    assert [len(run) for run in read_line(svg)] == [2, 2]
    assert len(list(read(svg).iter(f"{SVG}circle"))) == 1  # the last value has no neighbour
    assert re.findall("[^<>]*not a number[^<>]*", svg) == snapshot
    assert "not a number" not in draw_lines("t", [Series("a", [1, 2], [None, 1.0])], "step", "loss")
    resumed = draw_lines("t", [Series("a", [1, 2, 3, 2, 3], [5.0, 4.0, 3.0, 4.0, 3.0])], "step", "loss")
    assert [len(run) for run in read_line(resumed)] == [3, 2], "a run that resumed at an earlier step is two lines"


def test_tokens_bytes_and_marks_have_their_own_ticks() -> None:
    lengths = [2**power for power in range(13, 20)]
    line = Series("peak", lengths, [length * 100_000.0 for length in lengths])
    mark = Mark(80 * 2**30, "80 GiB card")
    svg = draw_lines("t", [line], "row (tokens)", "memory (bytes)", x_log=True, marks=[mark])
    assert {"8Ki", "512Ki", "20 GiB", "80 GiB card"} <= set(list_texts(svg))
    marked = next(e.attrib["d"] for e in read(svg).iter(f"{SVG}path") if e.attrib["class"] == "mark")
    assert float(marked.split()[1].split("H")[0]) == pytest.approx(find_tick(svg, "80 GiB"), abs=0.1)


@given(st.lists(st.tuples(anything, anything), max_size=30), st.booleans(), st.booleans())
@example([(0.0, 2.2250738585072014e-308), (5e-324, 1.0)], True, True)
@example([(9007199254740996.0, 0.0)], False, False)
def test_no_values_break_a_line_chart(points: list[tuple[float, float]], x_log: bool, y_log: bool) -> None:
    xs = [math.nan if x is None else x for x, _ in points]
    series = [Series("a", xs, [y for _, y in points]), Series("b", [], [])]
    read(draw_lines("t", series, "row (tokens)", "memory (bytes)", x_log=x_log, y_log=y_log))


@given(st.lists(anything, max_size=40), st.sampled_from(["documents", "time (seconds)", "memory (bytes)", "share"]))
def test_no_values_break_bars(values: list[float | None], label: str) -> None:
    names = [f"label {index}" for index in range(len(values))]
    read(draw_bars("t", names, {"a": values, "b": values[::-1]}, label))


@given(
    st.lists(st.floats(-1e290, 1e290), min_size=1, max_size=5),
    st.sampled_from(["", "tokens", "bytes", "seconds", "share"]),
    st.booleans(),
    st.floats(0, 0.1),
)
def test_ticks_are_few_distinct_increasing_and_inside(
    values: list[float], unit: str, is_log: bool, padding: float
) -> None:
    values = [abs(value) + 1e-200 for value in values] if is_log else values
    axis = make_axis(values, 300, 10, unit, is_log=is_log, padding=padding)
    places = [axis.place(value) for value, _ in axis.ticks]
    assert places == sorted(places, reverse=True)
    assert len(axis.ticks) <= 12
    assert len({text for _, text in axis.ticks}) == len(axis.ticks)
    assert all(9.9 <= place <= 300.1 for place in [*places, *(axis.place(value) for value in values)])


def test_bars_are_as_tall_as_their_values() -> None:
    svg = draw_bars("t", ["a", "b", "c", "d"], [10.0, 20.0, -5.0, None], "documents")
    boxes = list(read(svg).iter(f"{SVG}rect"))
    ten, twenty, below = [float(box.attrib["height"]) for box in boxes]
    assert twenty == pytest.approx(2 * ten, abs=0.2)
    assert below == pytest.approx(ten / 2, abs=0.2)
    assert float(boxes[2].attrib["y"]) == pytest.approx(find_tick(svg, "0"), abs=0.1)
    assert quantities.NO_VALUE in list_texts(svg)


@given(st.lists(st.lists(st.floats(0, 1e12), min_size=3, max_size=3), min_size=1, max_size=12))
def test_parts_of_a_stack_stand_on_each_other(rows: list[list[float]]) -> None:
    parts = {f"part {index}": row for index, row in enumerate(rows)}
    boxes = list(read(draw_stack("t", ["x", "y", "z"], parts, "memory (bytes)")).iter(f"{SVG}rect"))
    assert len(boxes) == sum(value > 0 for row in rows for value in row)
    totals = [math.fsum(row[place] for row in rows) for place in range(3)]
    for place in range(3):
        column = [box for box in boxes if f", {'xyz'[place]}: " in (box[0].text or "")]
        tops = [float(box.attrib["y"]) for box in column]
        assert tops == sorted(tops, reverse=True)
        if totals[place] == max(totals) > 1e-200:
            assert (drawing.BOTTOM - min(tops)) == pytest.approx((drawing.BOTTOM - drawing.TOP) / 1.04, rel=0.02)


def test_what_cannot_be_drawn_is_refused(snapshot: SnapshotAssertion) -> None:
    drawn = [
        *((draw_stack, {"logits": [1.0, bad]}) for bad in (-1.0, math.nan, math.inf)),
        (draw_stack, {"logits": [1.0, 2.0, 3.0]}),
        (draw_bars, [1.0]),
    ]
    assert [explain(call, "Memory", "ab", values, "bytes", error=ValueError) for call, values in drawn] == snapshot


def test_all_text_is_escaped() -> None:
    pictures = [
        draw_lines(PLANTED, [Series(PLANTED, [1, 2], [1, math.nan])] * 2, PLANTED, PLANTED, marks=[Mark(1, PLANTED)]),
        draw_lines("t", [Series("a", [1, 2], [1, 2])], "s", "l", marks=[Mark(1, PLANTED, "x")]),
        draw_bars(PLANTED, [PLANTED], {PLANTED: [1.0]}, PLANTED),
        draw_stack(PLANTED, [PLANTED], {PLANTED: [1.0]}, PLANTED),
    ]
    for svg in pictures:
        read(svg)
        assert "<script" not in svg


@given(st.lists(st.floats(0, 400), min_size=1, max_size=30))
def test_labels_never_cover_each_other(heights: list[float]) -> None:
    labels = [drawing.Label(height, str(index), index) for index, height in enumerate(heights)]
    drawn = [float(y) for y in re.findall(r' y="([-\d.]+)"', "".join(drawing.draw_labels(300, labels)))]
    assert len(drawn) == min(len(heights), drawing.MAX_LABELS)
    gaps = [later - earlier for earlier, later in zip(sorted(drawn), sorted(drawn)[1:], strict=False)]
    assert all(gap >= drawing.LINE_HEIGHT - 0.2 for gap in gaps)
    assert all(drawing.TOP - 20 <= y <= drawing.BOTTOM + 5 for y in drawn)


def compute_contrast(first: str, second: str) -> float:
    """Returns the contrast as WCAG 2 defines it."""

    def compute_luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    light, dark = sorted((compute_luminance(first), compute_luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(
    ("colours", "series"), [(drawing.LIGHT, drawing.LIGHT_SERIES), (drawing.DARK, drawing.DARK_SERIES)]
)
def test_every_colour_is_legible(colours: dict[str, str], series: tuple[str, ...]) -> None:
    assert compute_contrast(colours["ink"], colours["surface"]) >= 12
    for colour in (colours["muted"], *series):
        assert compute_contrast(colour, colours["surface"]) >= 4.5, colour
    assert len(drawing.LIGHT_SERIES) == len(drawing.DARK_SERIES) == len(set(series))


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "", "0"), (2.3149, "", "2.31"), (1234, "", "1,234"), (12_345, "", "12.3k"), (999_999, "", "1M"),
        (2e-5, "", "2e-5"), (1.23e-7, "", "1.23e-7"), (80 * 2**30, "bytes", "80.0 GiB"), (1536, "bytes", "1.50 KiB"),
        (12, "bytes", "12 B"), (0.25, "seconds", "250 ms"), (59.99, "seconds", "1 min"),
        (252, "seconds", "4 min 12 s"), (7260, "seconds", "2 h 1 min"), (3599.9, "seconds", "1 h"),
        (0.1234, "share", "12.3%"), (312.4, "USD", "USD 312.40"), (123_456, "tokens", "123,456"),
        (math.nan, "bytes", quantities.NO_VALUE), (None, "", quantities.NO_VALUE), (math.inf, "", "infinite"),
    ],
)  # fmt: skip
def test_quantities_in_words(value: float | None, unit: str, text: str) -> None:
    assert quantities.format_quantity(value, unit) == text


def test_shortened_names_stay_different() -> None:
    names = ["flash_attention_2", "flash_attention_3"]
    assert len({drawing.shorten(name, 80) for name in names}) == 2
    assert all(40 < drawing.estimate_width(drawing.shorten(name, 80)) <= 80 for name in names)
    assert drawing.shorten("short", 80) == "short"
    assert drawing.shorten("x" * 100_000, 3) == ""
