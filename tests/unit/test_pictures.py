"""Tests that the docs' pictures are what their script makes, in two themes, with a text, and load no external file."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"
PICTURES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".svg", ".png"))
SVG = "{http://www.w3.org/2000/svg}"
MAX_BYTES = 200_000


@pytest.mark.full
def test_pictures_are_what_the_script_makes() -> None:
    """Compares the picture of a report page, which needs a run and Chromium, by the hash of its inputs."""
    command = [sys.executable, str(FOLDER / "make.py"), "--check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_each_picture_exists_for_light_and_dark_pages() -> None:
    names = {path.name.replace("-dark.", "-light.") for path in PICTURES}
    assert len(names) == 8
    assert {path.name for path in PICTURES} == names | {name.replace("-light.", "-dark.") for name in names}


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_small_and_complete_in_itself(path: Path) -> None:
    assert path.stat().st_size < MAX_BYTES
    if path.suffix == ".png":
        return
    text = path.read_text()
    root = ElementTree.fromstring(text)
    for kind in ("title", "desc"):
        words = root.findtext(f"{SVG}{kind}")
        assert words, kind
    assert root.get("role") == "img"
    assert not re.search(r"<script|<image|@import|@font-face|href=|url\(|prefers-color-scheme", text)
    assert text.replace(f'xmlns="{SVG[1:-1]}"', "").count("//") == 0
