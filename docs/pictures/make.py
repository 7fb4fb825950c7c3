"""Makes the pictures of the docs, each for a light and a dark page, and an index of them with their descriptions.

    python docs/pictures/make.py [--check] [--all]

--check writes nothing and fails if a picture is not what this script makes. The picture of a report page needs a run
and Chromium: it is made again when the recipe or the page's style has changed, or with --all.
"""

from __future__ import annotations

import argparse
import html
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import report_page
from canvas import ROOT, THEMES
from exchange import draw_exchange
from memory import draw_memory_against_length, draw_memory_by_phase
from recall import draw_compared, draw_recall
from rooms import draw_rooms
from terminal import draw_error

FOLDER = Path(__file__).parent
INDEX = FOLDER / "README.md"
DRAWN = {
    "exchange": draw_exchange,
    "rooms": draw_rooms,
    "memory-by-phase": draw_memory_by_phase,
    "memory-against-length": draw_memory_against_length,
    "recall": draw_recall,
    "compared": draw_compared,
    "error": draw_error,
}
TAKEN = tuple(report_page.TITLES)
TEXTS = re.compile(r"<title[^>]*>(.*?)</title>\s*<desc[^>]*>(.*?)</desc>", re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a picture is out of date")
    parser.add_argument("--all", action="store_true", help="also run the recipe again, for the report page")
    args = parser.parse_args()
    drawn = {FOLDER / f"{name}-{theme.name}.svg": draw(theme) for name, draw in DRAWN.items() for theme in THEMES}
    taken = {name: {theme.name: FOLDER / f"{name}-{theme.name}.png" for theme in THEMES} for name in TAKEN}
    if args.check:
        return _check(drawn, taken)
    for path, text in drawn.items():
        path.write_text(text)
    for name, paths in taken.items():
        if args.all or not all(_is_current(name, path) for path in paths.values()):
            for theme, picture in report_page.take_pictures(name).items():
                paths[theme].write_bytes(picture)
    INDEX.write_text(_write_index())
    return 0


def _check(drawn: Mapping[Path, str], taken: Mapping[str, Mapping[str, Path]]) -> int:
    old = [path for path, text in drawn.items() if not path.exists() or path.read_text() != text]
    old += [path for name, paths in taken.items() for path in paths.values() if not _is_current(name, path)]
    if not old and (not INDEX.exists() or INDEX.read_text() != _write_index()):
        old.append(INDEX)
    for path in old:
        sys.stderr.write(f"{path.relative_to(ROOT)} is not what this script makes: run `make pictures`\n")
    return 1 if old else 0


def _is_current(name: str, path: Path) -> bool:
    return path.exists() and report_page.read_texts(path.read_bytes()).get("Inputs") == report_page.compute_inputs(name)


def _write_index() -> str:
    """Every picture with its description, as other pages show it."""
    parts = [
        "# Pictures",
        "Made by `make pictures` (`docs/pictures/make.py`); a test compares them with what the script makes. Another"
        " page shows a picture with the same lines, and its own path to this folder.",
    ]
    for name in (*DRAWN, *TAKEN):
        light, dark = (next(FOLDER.glob(f"{name}-{theme.name}.*")) for theme in THEMES)
        title, description = _read_texts(light)
        parts += [
            f"## {title}",
            f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="{dark.name}">\n'
            f'  <img src="{light.name}" width="800" alt="{_escape(description)}">\n</picture>',
        ]
    return "\n\n".join(parts) + "\n"


def _escape(text: str) -> str:
    """For an attribute in double quotes; an apostrophe stays readable in the Markdown."""
    return html.escape(text, quote=False).replace('"', "&quot;")


def _read_texts(path: Path) -> tuple[str, str]:
    if path.suffix == ".png":
        texts = report_page.read_texts(path.read_bytes())
        return texts["Title"], texts["Description"]
    match = TEXTS.search(path.read_text())
    if match is None:
        raise ValueError(f"{path.name} has no title and description")
    return html.unescape(match[1]), html.unescape(match[2])


if __name__ == "__main__":
    sys.exit(main())
