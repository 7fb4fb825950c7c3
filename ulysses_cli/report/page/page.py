"""Makes one HTML page of charts, tables and text that needs no script, network, font or image file.

Escapes everything but charts. The page's Content-Security-Policy also blocks scripts and requests.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ulysses_cli.report.page import drawing
from ulysses_cli.report.page.charts import Series
from ulysses_cli.report.page.drawing import escape
from ulysses_cli.report.quantities import format_quantity, split_unit

MAX_TABLE_ROWS = 200
MAX_CARD_COLUMNS = 7  # a card of numbers with more takes the whole width while it is open
MAX_LINE_LETTERS = 40


@dataclass(frozen=True)
class Table:
    """A table of formatted cells. Columns of numbers are aligned to the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Chart:
    """An SVG of charts.py, a line of text below it, and its numbers as a table, for people who cannot see the chart."""

    svg: str
    note: str = ""
    data: Table | None = None


@dataclass(frozen=True)
class Preformatted:
    """Preformatted text, such as a recipe or a log. With a name, it is folded. `parts` follow the text, each in the
    colour of its kind: target, answer or context."""

    text: str
    name: str = ""
    parts: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Note:
    """A paragraph. A warning is highlighted."""

    text: str
    is_warning: bool = False


@dataclass(frozen=True)
class Facts:
    """Names with their values, one pair per line."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Figures:
    """The most important numbers, in large type: (name, value, remark)."""

    items: Sequence[tuple[str, str, str]]


Block = Chart | Table | Preformatted | Note | Facts | Figures


@dataclass(frozen=True)
class PageSection:
    heading: str
    body: Sequence[Block]


def make_page(title: str, sections: Sequence[PageSection], subtitle: str = "") -> str:
    hashes = " ".join(f"'sha256-{_hash(style)}'" for style in (PAGE_STYLE, drawing.STYLE))
    policy = f"default-src 'none'; style-src {hashes}; base-uri 'none'; form-action 'none'"
    below = f"<p class=sub>{escape(subtitle)}</p>" if subtitle else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f"<title>{escape(title)}</title><style>{PAGE_STYLE}</style></head>\n"
        f"<body><main><header><h1>{escape(title)}</h1>{below}</header>\n"
        + "\n".join(_make_section(section) for section in sections)
        + "\n<footer>made by ulysses</footer></main></body></html>\n"
    )


def tabulate_lines(series: Sequence[Series], x_label: str, y_label: str) -> Table:
    """The numbers of a line chart, one row per x. A long table is sampled evenly, and its caption says so."""
    (x_text, x_unit), (y_text, y_unit) = split_unit(x_label), split_unit(y_label)
    values: dict[float, dict[int, float | None]] = {}
    for index, curve in enumerate(series):
        for x, y in zip(curve.xs, curve.ys, strict=True):
            values.setdefault(x, {})[index] = y
    xs = sorted(values)
    stride = -(-len(xs) // MAX_TABLE_ROWS)
    shown = [x for place, x in enumerate(xs) if place % stride == 0 or place == len(xs) - 1]
    rows = [
        (
            f"{x:,.10g}" if x_unit != "bytes" else format_quantity(x, x_unit),
            *(format_quantity(values[x].get(index), y_unit) for index in range(len(series))),
        )
        for x in shown
    ]
    caption = f"{len(shown)} of {len(xs):,} rows" if len(shown) < len(xs) else ""
    return Table((x_text, *(curve.name or y_text for curve in series)), rows, caption)


def tabulate_bars(
    labels: Sequence[str], values: Mapping[str, Sequence[float | None]], y_label: str, of: str = ""
) -> Table:
    """The numbers of bars or of a stack, one row per label. `of` is the heading of the labels."""
    unit = split_unit(y_label)[1]
    rows = [
        (label, *(format_quantity(group[place], unit) for group in values.values()))
        for place, label in enumerate(labels)
    ]
    return Table((of, *values), rows)


def _make_section(section: PageSection) -> str:
    """Sets consecutive charts, and tables among them, side by side where there is room."""
    parts = []
    for can_share, group in itertools.groupby(section.body, lambda block: isinstance(block, Chart | Table)):
        blocks = list(group)
        is_grid = can_share and any(isinstance(block, Chart) for block in blocks)
        markup = [_make_block(block) for block in blocks]
        if is_grid:
            markup = [text if text.startswith("<figure") else f"<figure>{text}</figure>" for text in markup]
        parts.append(f'<div class="charts">{"".join(markup)}</div>' if is_grid else "".join(markup))
    return f"<section><h2>{escape(section.heading)}</h2>{''.join(parts)}</section>"


def _make_block(block: Block) -> str:
    match block:
        case Chart():
            if not block.svg.startswith("<svg "):
                raise ValueError("a chart must be an SVG of charts.py")
            note = f"<figcaption>{escape(block.note)}</figcaption>" if block.note else ""
            data = ""
            if block.data is not None:
                kind = " class=wide" if len(block.data.header) > MAX_CARD_COLUMNS else ""
                data = f"<details{kind}><summary>numbers</summary>{_make_table(block.data)}</details>"
            return f"<figure>{block.svg}{note}{data}</figure>"
        case Table():
            return _make_table(block)
        case Preformatted():
            spans = "".join(f"<span class={kind}>{escape(text)}</span>" for text, kind in block.parts)
            kind = " class=wraps" if block.parts else ""
            body = f"<pre tabindex=0{kind}>{escape(block.text)}{spans}</pre>"
            return f"<details><summary>{escape(block.name)}</summary>{body}</details>" if block.name else body
        case Note():
            return f"<p{' class=warning role=note' if block.is_warning else ''}>{escape(block.text)}</p>"
        case Facts():
            pairs = "".join(
                f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in block.pairs
            )
            return f'<dl class="facts">{pairs}</dl>'
        case Figures():
            tiles = "".join(
                f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class=remark>{escape(remark)}</dd></div>"
                for name, value, remark in block.items
            )
            return f'<dl class="figures">{tiles}</dl>'


def _make_table(table: Table) -> str:
    width = len(table.header)
    kinds = [_choose_kind([row[column] for row in table.rows]) for column in range(width)]
    head = "".join(f"<th scope=col{kind}>{escape(cell)}</th>" for cell, kind in zip(table.header, kinds, strict=True))
    rows = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in table.rows
    )
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    body = f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    return f'<div class="scroll" tabindex=0><table>{caption}{body}</table></div>'


def _choose_kind(cells: Sequence[str]) -> str:
    """The class of a column: numbers stay in one line, long texts are wrapped."""
    if max(map(len, cells), default=0) > MAX_LINE_LETTERS:
        return " class=t"
    return " class=n" if any(map(_is_numeric, cells)) else ""


def _is_numeric(cell: str) -> bool:
    return cell.lstrip("-+$~")[:1].isdigit()


def _hash(style: str) -> str:
    return base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()


def _list_colours(colours: Mapping[str, str], page: str) -> str:
    return f"--page:{page};" + "".join(f"--{name}:{colour};" for name, colour in colours.items())


PAGE_STYLE = f"""
:root{{color-scheme:light dark;{_list_colours(drawing.LIGHT, "#f5f6f8")}--warn:#8a4b00;--warnbg:#fff4e0}}
@media(prefers-color-scheme:dark){{:root{{{_list_colours(drawing.DARK, "#0f1114")}--warn:#f2b763;--warnbg:#2c2211}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;-webkit-text-size-adjust:100%}}
main{{max-width:1120px;margin:0 auto;padding:28px 20px 48px}}
h1{{font-size:1.6rem;line-height:1.2;margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}}
h2{{font-size:1.05rem;margin:34px 0 12px}}
p{{margin:8px 0 12px;max-width:75ch;overflow-wrap:anywhere}}
.sub,footer,figcaption,caption,summary{{color:var(--muted)}}
footer{{margin-top:40px;font-size:.85rem}}
.charts{{display:grid;gap:16px;grid-template-columns:repeat(auto-fill,minmax(min(420px,100%),1fr));margin:12px 0}}
figure{{margin:0;padding:14px 16px 10px;background:var(--surface);border:1px solid var(--grid);border-radius:10px;
min-width:0}}
figcaption{{font-size:.87rem;margin-top:4px;overflow-wrap:anywhere}}
details{{margin-top:6px}}
summary{{cursor:pointer;font-size:.87rem;width:max-content;max-width:100%}}
.scroll{{overflow:auto;max-height:420px;max-width:100%;margin:8px 0}}
table{{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums}}
caption{{text-align:left;caption-side:bottom;padding:6px 0}}
th,td{{text-align:left;padding:4px 14px 4px 0;border-bottom:1px solid var(--grid);white-space:nowrap;
vertical-align:top}}
th{{font-weight:600;color:var(--muted)}}
.n{{text-align:right}}
th.n{{white-space:normal;vertical-align:bottom}}
.t{{white-space:normal;overflow-wrap:anywhere;min-width:14ch}}
.charts figure:has(.wide[open]){{grid-column:1/-1}}.charts figure:has(.wide[open]) svg{{max-width:560px}}
pre{{background:var(--surface);border:1px solid var(--grid);border-radius:10px;padding:12px 16px;overflow:auto;
max-height:560px;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;margin:8px 0}}
.wraps{{white-space:pre-wrap;overflow-wrap:anywhere}}.context{{color:var(--muted)}}
.target{{background:color-mix(in srgb,#2e9e4f 22%,transparent)}}
.answer{{background:color-mix(in srgb,#c99700 26%,transparent)}}
dl{{margin:12px 0}}dd{{margin:0;overflow-wrap:anywhere}}dt{{color:var(--muted)}}
.facts div{{display:grid;grid-template-columns:minmax(110px,190px) minmax(0,1fr);gap:12px;padding:4px 0;
border-bottom:1px solid var(--grid)}}
.figures{{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(min(165px,100%),1fr))}}
.figures div{{background:var(--surface);border:1px solid var(--grid);border-radius:10px;padding:12px 14px;min-width:0}}
.figures dt,.remark{{font-size:.84rem}}
.figures dd{{font-size:1.45rem;font-weight:650;line-height:1.25;font-variant-numeric:tabular-nums}}
.figures .remark{{font-size:.84rem;font-weight:400;color:var(--muted);margin-top:2px}}
.warning{{background:var(--warnbg);color:var(--warn);border-radius:8px;padding:9px 13px;max-width:none}}
:focus-visible{{outline:2px solid currentColor;outline-offset:2px}}
@media(max-width:520px){{main{{padding:18px 12px 32px}}figure{{padding:10px 8px 8px}}
td:not(.n){{white-space:normal}}.t{{min-width:9ch}}}}
@media print{{body{{background:none}}figure,.figures div{{break-inside:avoid}}.scroll,pre{{max-height:none}}}}
"""
