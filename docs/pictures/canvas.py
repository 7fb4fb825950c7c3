"""What all pictures share: two themes, text, a panel with a heading, and a complete SVG with title and description.

Colours are those of the report pages. Every colour is written out, so that a picture needs no style sheet.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support import commands  # noqa: E402

from ulysses_cli.report.page import drawing  # noqa: E402
from ulysses_cli.report.page.drawing import escape  # noqa: E402

WIDTH = 800  # what GitHub shows of a page
MARGIN = 24
SANS = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
MONO = "ui-monospace,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace"
MONO_ADVANCE = 0.602  # of the font's size, the widest of these fonts
# A person's own models, rates and cache are left out: pictures are the same everywhere.
NO_PERSON = dict.fromkeys(("XDG_CONFIG_HOME", "HF_HUB_CACHE"), str(Path(__file__).parent / "nobody"))
DARK_MODE = re.compile(r"@media\(prefers-color-scheme:dark\)\{(\.chart\{[^}]*\})\}")


def run_tool(*words: str) -> str:
    """What `ulysses WORDS` writes to stdout."""
    done = commands.run(*words, **NO_PERSON)
    if done.returncode:
        raise RuntimeError(f"ulysses {' '.join(words)}: {done.stderr}")
    return done.stdout


@dataclass(frozen=True)
class Theme:
    name: str
    colours: dict[str, str] = field(hash=False)  # surface, ink, muted, grid
    series: tuple[str, ...]
    on_series: str  # text on a filled shape

    def __getitem__(self, name: str) -> str:
        return self.colours[name]


LIGHT = Theme("light", drawing.LIGHT, drawing.LIGHT_SERIES, "#ffffff")
DARK = Theme("dark", drawing.DARK, drawing.DARK_SERIES, "#10131a")
THEMES = (LIGHT, DARK)


def write(
    theme: Theme,
    x: float,
    y: float,
    text: str,
    size: float = 13,
    colour: str = "ink",
    *,
    bold: bool = False,
    anchor: str = "start",
    mono: bool = False,
    turn: float = 0,
) -> str:
    fill = theme.colours.get(colour, colour)
    more = ' font-weight="650"' if bold else ""
    more += f' font-family="{MONO}"' if mono else ""
    more += f' transform="rotate({turn:g} {x:g} {y:g})"' if turn else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}"{more}>'
        f"{escape(text)}</text>"
    )


def draw_box(x: float, y: float, width: float, height: float, fill: str, line: str = "none", **more: object) -> str:
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{line}"{attributes}/>'
    )


def draw_heading(theme: Theme, heading: str, below: str) -> list[str]:
    return [
        write(theme, MARGIN, 38, heading, 19, bold=True),
        write(theme, MARGIN, 60, below, 13, "muted"),
    ]


def wrap_words(text: str, size: float, room: float) -> list[str]:
    """Lines no wider than `room`, by the widths of a wide font."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and estimate_width(longer, size) <= room:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def estimate_width(text: str, size: float) -> float:
    return drawing.estimate_width(text) / drawing.FONT_SIZE / drawing.SMALL_SCREEN * size


def wrap_svg(theme: Theme, height: float, title: str, description: str, parts: Iterable[str], edge: float = 12) -> str:
    """A whole picture on a panel of its own, so that it can be read on any page."""
    panel = draw_box(0.5, 0.5, WIDTH - 1, height - 1, theme["surface"], theme["grid"], rx=edge)
    body = "\n".join([panel, *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
        f'viewBox="0 0 {WIDTH} {height:g}" role="img" aria-labelledby="title description" font-family="{SANS}">\n'
        f'<title id="title">{escape(title)}</title>\n<desc id="description">{escape(description)}</desc>\n'
        f"{body}\n</svg>\n"
    )


def place_chart(theme: Theme, svg: str, x: float, y: float, width: float) -> str:
    """A chart of a report page as part of a picture, in the picture's theme and not in the reader's."""
    inside = re.sub(r"<title id.*?</desc>", "", svg.split(">", 1)[1].removesuffix("</svg>"))
    style = DARK_MODE.sub(r"\1" if theme.name == "dark" else "", drawing.STYLE)
    assert drawing.STYLE in inside
    inside = inside.replace(drawing.STYLE, style)
    return f'<g class="chart" transform="translate({x:g} {y:g}) scale({width / drawing.WIDTH:g})">{inside}</g>'


def read_description(svg: str) -> str:
    """What a chart says of itself, as it stands in the file: escaped."""
    match = re.search(r"<desc[^>]*>(.*?)</desc>", svg, re.DOTALL)
    assert match
    return match[1]
