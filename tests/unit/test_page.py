"""Tests that a page is complete in itself, whatever text is planted in it."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from ulysses_cli.report.page.charts import Series, draw_lines
from ulysses_cli.report.page.page import (
    MAX_TABLE_ROWS,
    Chart,
    Facts,
    Figures,
    Note,
    PageSection,
    Preformatted,
    Table,
    make_page,
    tabulate_bars,
    tabulate_lines,
)

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x00\ud800"
VOID = {"meta", "link", "img", "br", "hr", "input", "path", "rect", "circle"}


class Reader(HTMLParser):
    """Reads tags, attributes and text; fails on a tag that is closed wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert not reader.open
    return reader


def make_evil_page() -> str:
    line = [Series(EVIL, [1, 2], [1.0, 2.0])]
    chart = Chart(draw_lines(EVIL, line, EVIL, EVIL), EVIL, tabulate_lines(line, EVIL, EVIL))
    blocks = [
        chart, chart, Table([EVIL, "n"], [[EVIL, "1"]], EVIL), Preformatted(EVIL), Preformatted(EVIL, EVIL),
        Note(EVIL, is_warning=True), Facts([(EVIL, EVIL)]), Figures([(EVIL, EVIL, EVIL)]),
    ]  # fmt: skip
    return make_page(EVIL, [PageSection(EVIL, blocks), PageSection("empty", [])], EVIL)


def test_planted_text_stays_text() -> None:
    page = make_evil_page()
    page.encode()  # a lone surrogate would fail
    reader = read(page)
    assert not {"script", "img", "link", "iframe", "object", "base", "form"} & {tag for tag, _ in reader.tags}
    for tag, attributes in reader.tags:
        assert not any(name.startswith("on") or name in ("href", "src", "style") for name in attributes), tag
    assert reader.text.count("<script>alert(1)</script>") >= 15  # as text
    assert page.count('<div class="charts">') == 1
    assert "<th scope=col class=n>n</th>" in page


def test_the_policy_admits_only_the_pages_own_styles() -> None:
    page = make_evil_page()
    policy = next(a["content"] for tag, a in read(page).tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.index("Content-Security-Policy") < page.index("<style>")
    styles = set(re.findall(r"<style>(.*?)</style>", page, re.S))
    assert len(styles) == 2
    for style in styles:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}'" in policy
        assert "url(" not in style
        assert "@import" not in style
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page)


def test_no_table_is_cut_at_the_edge_of_its_card() -> None:
    """A card of many columns gets the whole width while it is open. test_browser.py measures real pages."""
    for num_columns, is_wide in ((7, False), (8, True)):
        svg = draw_lines("a", [Series("b", [1, 2], [1.0, 2.0])], "x", "y")
        chart = Chart(svg, "", Table([str(column) for column in range(num_columns)], []))
        assert ("<details class=wide>" in make_page("t", [PageSection("s", [chart])])) == is_wide


def test_markup_in_a_charts_text_is_escaped() -> None:
    with pytest.raises(ValueError, match=r"charts\.py"):
        make_page("t", [PageSection("s", [Chart("<p>hello</p>")])])


def test_the_numbers_of_drawings_are_tables() -> None:
    """Those of lines are merged by position, and sampled."""
    few = tabulate_lines([Series("a", [1, 2], [0.5, None]), Series("b", [2], [3.0])], "step", "loss")
    assert [*few.header] == ["step", "a", "b"]
    assert few.rows == [("1", "0.5", "–"), ("2", "–", "3")]
    assert few.caption == ""
    many = tabulate_lines([Series("", range(1001), [1.0] * 1001)], "step", "memory (bytes)")
    assert [*many.header] == ["step", "memory"]
    assert len(many.rows) <= MAX_TABLE_ROWS + 1
    assert (many.rows[0][0], many.rows[-1][0]) == ("0", "1,000")
    assert many.caption == f"{len(many.rows)} of 1,001 rows"
    assert not tabulate_lines([], "step", "loss").rows
    table = tabulate_bars(["load"], {"weights": [2.0**30], "logits": [0.0]}, "memory (bytes)", "phase")
    assert [*table.header] == ["phase", "weights", "logits"]
    assert table.rows == [("load", "1.00 GiB", "0 B")]
