"""The report page of a real run, as Chromium shows it: the run takes a minute or two, so it is made again only when the
recipe or the page's style has changed. Both stand as a hash in the PNG, with a title and a description.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

from canvas import ROOT, THEMES

from ulysses_cli.report.page import drawing, page

RECIPE = ROOT / "recipes" / "tiny-cpu.yaml"
SIZE, SCALE = (896, 772), 1.5  # two charts side by side
# The picture shows the top of the page: the figures and the first two charts.
ONLY_TOP = "<style>section:nth-of-type(n+3),figure:nth-of-type(n+3),footer{display:none!important}</style>"
POLICY = re.compile('<meta http-equiv="Content-Security-Policy"[^>]*>')  # which allows no style but the page's
PREFERRED = {"dark": 0, "light": 1}  # Chromium's numbers
SIGNATURE = b"\x89PNG\r\n\x1a\n"
PAGE = "top.html"
TITLE = "The report page of a run"
KEYS = ("Title", "Description", "Inputs")


def compute_inputs() -> str:
    text = RECIPE.read_text() + page.PAGE_STYLE + drawing.STYLE + repr((SIZE, SCALE, ONLY_TOP))
    return hashlib.sha256(text.encode()).hexdigest()


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


def take_pictures() -> dict[str, bytes]:
    """By theme. Runs the recipe in a folder that is gone afterwards."""
    chromium = find_chromium()
    if chromium is None:
        raise FileNotFoundError("no Chromium here: it takes the picture of the report page")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = shutil.copy(RECIPE, folder)
        _run_ulysses(folder, "train", Path(recipe).name)
        run = next((folder / "runs").glob("*/logs")).parent
        summary = json.loads(_run_ulysses(folder, "report", str(run), "--format", "json", "--output", "report.html"))
        description = _describe(summary)
        whole = POLICY.sub("", (folder / "report.html").read_text())
        (folder / PAGE).write_text(whole.replace("</head>", ONLY_TOP + "</head>"))
        return {
            theme.name: write_texts(
                _take_picture(chromium, folder, theme.name),
                dict(zip(KEYS, (TITLE, description, compute_inputs()), strict=True)),
            )
            for theme in THEMES
        }


def read_texts(picture: bytes) -> dict[str, str]:
    texts = {}
    for kind, data in _walk_chunks(picture):
        if kind == b"iTXt":
            key, _, rest = data.partition(b"\0")
            texts[key.decode()] = rest[4:].decode()
    return texts


def write_texts(picture: bytes, texts: dict[str, str]) -> bytes:
    """As iTXt chunks after the header; a program's own texts go."""
    chunks = [(kind, data) for kind, data in _walk_chunks(picture) if kind not in (b"tEXt", b"iTXt", b"tIME")]
    added = [(b"iTXt", key.encode() + b"\0" * 5 + text.encode()) for key, text in texts.items()]
    whole = SIGNATURE
    for kind, data in [*chunks[:1], *added, *chunks[1:]]:
        whole += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return whole


def _walk_chunks(picture: bytes) -> list[tuple[bytes, bytes]]:
    assert picture.startswith(SIGNATURE)
    at, chunks = len(SIGNATURE), []
    while at < len(picture):
        (length,) = struct.unpack(">I", picture[at : at + 4])
        chunks.append((picture[at + 4 : at + 8], picture[at + 8 : at + 8 + length]))
        at += length + 12
    return chunks


def _run_ulysses(folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ulysses_cli", *words]
    return subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def _take_picture(chromium: str, folder: Path, theme: str) -> bytes:
    picture = folder / f"{theme}.png"
    width, height = SIZE
    command = [
        *(chromium, "--headless", "--disable-gpu", "--hide-scrollbars", f"--force-device-scale-factor={SCALE}"),
        *(f"--blink-settings=preferredColorScheme={PREFERRED[theme]}", f"--window-size={width},{height}"),
        *(f"--user-data-dir={folder / 'browser'}", f"--screenshot={picture}", (folder / PAGE).as_uri()),
    ]
    if os.geteuid() == 0:
        command.insert(1, "--no-sandbox")  # which Chromium refuses to set up for root
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return picture.read_bytes()


def _describe(summary: dict) -> str:
    train, evals = summary["loss"], summary["eval_loss"]
    return (
        f"The top of the page that `ulysses report` makes of a run of recipes/{RECIPE.name}. Tiles with the figures"
        f" that matter: step {summary['last_step']} of {summary['num_steps']}; the training loss, from"
        f" {train['first']:.2f} to {train['last']:.2f}; the evaluation loss, from {evals['first']:.2f} to"
        f" {evals['last']:.2f}; {summary['tokens']:,} tokens; tokens per second; peak memory; the part of a step that"
        " takes most time. Below them line charts: the loss by step, and the evaluation loss by position in the"
        " document."
    )
