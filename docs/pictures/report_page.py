"""Report pages as Chromium shows them: of the tiny recipe, whose run takes a minute or two, and of the real run, whose
records are kept in benchmarks/results/. A picture is made again only when recipe or records, or the page's style, have
changed. They stand as a hash in the PNG, with a title and a description.
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
RECORDS = ROOT / "benchmarks" / "results" / "real-run"
# Two charts side by side, and a table below them; pixels of the picture in one of the page.
SIZES = {"report-page": ((896, 772), 1.5), "real-run-page": ((896, 1190), 1.25)}
# The picture shows the top of the page: the figures, the first two charts, and the table of short texts.
HIDDEN = {"report-page": "n+3", "real-run-page": "n+4"}
ONLY_TOP = "<style>section:nth-of-type({}),figure:nth-of-type(n+3),footer{{display:none!important}}</style>"
POLICY = re.compile('<meta http-equiv="Content-Security-Policy"[^>]*>')  # which allows no style but the page's
PREFERRED = {"dark": 0, "light": 1}  # Chromium's numbers
SIGNATURE = b"\x89PNG\r\n\x1a\n"
PAGE = "top.html"
TITLES = {"report-page": "The report page of a run", "real-run-page": "The report page of the real run"}
KEYS = ("Title", "Description", "Inputs")


def compute_inputs(name: str) -> str:
    files = [RECIPE] if name == "report-page" else sorted(file for file in RECORDS.rglob("*") if file.is_file())
    text = "".join(file.read_text() for file in files)
    text += page.PAGE_STYLE + drawing.STYLE + repr((*SIZES[name], ONLY_TOP.format(HIDDEN[name])))
    return hashlib.sha256(text.encode()).hexdigest()


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


def take_pictures(name: str) -> dict[str, bytes]:
    """By theme. Works in a folder that is gone afterwards."""
    chromium = find_chromium()
    if chromium is None:
        raise FileNotFoundError("no Chromium here: it takes the picture of the report page")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run = RECORDS if name == "real-run-page" else _train(folder)
        summary = json.loads(_run_ulysses(folder, "report", str(run), "--format", "json", "--output", "report.html"))
        description = _describe(summary)
        whole = POLICY.sub("", (folder / "report.html").read_text())
        (folder / PAGE).write_text(whole.replace("</head>", ONLY_TOP.format(HIDDEN[name]) + "</head>"))
        return {
            theme.name: write_texts(
                _take_picture(chromium, folder, theme.name, *SIZES[name]),
                dict(zip(KEYS, (TITLES[name], description, compute_inputs(name)), strict=True)),
            )
            for theme in THEMES
        }


def _train(folder: Path) -> Path:
    recipe = shutil.copy(RECIPE, folder)
    _run_ulysses(folder, "train", Path(recipe).name)
    return next((folder / "runs").glob("*/logs")).parent


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


def _take_picture(chromium: str, folder: Path, theme: str, size: tuple[int, int], scale: float) -> bytes:
    picture = folder / f"{theme}.png"
    width, height = size
    command = [
        *(chromium, "--headless", "--disable-gpu", "--hide-scrollbars", f"--force-device-scale-factor={scale}"),
        *(f"--blink-settings=preferredColorScheme={PREFERRED[theme]}", f"--window-size={width},{height}"),
        *(f"--user-data-dir={folder / 'browser'}", f"--screenshot={picture}", (folder / PAGE).as_uri()),
    ]
    if os.geteuid() == 0:
        command.insert(1, "--no-sandbox")  # which Chromium refuses to set up for root
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return picture.read_bytes()


def _describe(summary: dict) -> str:
    train, evals, short = summary["loss"], summary["eval_loss"], summary["short_check"]
    recipe, table = f"recipes/{RECIPE.name}", "."
    if short:
        recipe = "benchmarks/real_run.py"
        table = f", and a table of what {short['texts']} short texts lose: {short['difference']:+.3f} nats per token."
    return (
        f"The top of the page that `ulysses report` makes of a run of {recipe}. Tiles with the figures"
        f" that matter: step {summary['last_step']} of {summary['num_steps']}; the training loss, from"
        f" {train['first']:.2f} to {train['last']:.2f}; the evaluation loss, from {evals['first']:.2f} to"
        f" {evals['last']:.2f}; {summary['tokens']:,} tokens; tokens per second; peak memory; the part of a step that"
        " takes most time. Below them line charts: the loss by step, and the evaluation loss by position in the"
        f" document{table}"
    )
