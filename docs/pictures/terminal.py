"""One error as a terminal shows it: the command is run on a terminal, and its text and colours are drawn."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from canvas import MARGIN, MONO, MONO_ADVANCE, NO_PERSON, ROOT, WIDTH, Theme, escape, wrap_svg, write

RECIPE, CHANGE = "llama-3.1-8b-128k-8gpu", ("sp_size: 8", "sp_size: 6")
FILE = "my.yaml"
COMMAND = ("validate-config", FILE)
STYLE = re.compile(r"\x1b\[(\d+)m")
PROMPT = "\x1b[36m$\x1b[0m"
LINE_HEIGHT, BAR = 21, 38
MAX_SIZE = 13


def draw_error(theme: Theme) -> str:
    code, output = _run_on_terminal()
    prompt = f"ulysses {' '.join(COMMAND)}"
    lines = [f"{PROMPT} {prompt}", *output.splitlines(), f"{PROMPT} echo $?", str(code)]
    columns = max(len(STYLE.sub("", line)) for line in lines)
    size = min(MAX_SIZE, (WIDTH - 2 * MARGIN) / (columns * MONO_ADVANCE))
    parts = [
        f'<path d="M0.5 {BAR}H{WIDTH - 0.5}" stroke="{theme["grid"]}"/>',
        *(
            f'<circle cx="{MARGIN + 18 * index}" cy="{BAR / 2}" r="5.5" fill="{theme.series[colour]}" opacity="0.75"/>'
            for index, colour in enumerate((4, 1, 2))
        ),
        write(theme, WIDTH / 2, BAR / 2 + 4.5, f"{RECIPE} with {CHANGE[1]}", 12.5, "muted", anchor="middle"),
    ]
    y = BAR + 32.0
    for line in lines:
        parts.append(
            f'<text x="{MARGIN}" y="{y:g}" font-size="{size:.2f}" font-family="{MONO}" fill="{theme["ink"]}" '
            f'xml:space="preserve">{_paint(theme, line)}</text>'
        )
        y += LINE_HEIGHT
    title = "An error that names its place and what to write instead"
    description = f"A terminal. `{prompt}` prints: {' '.join(STYLE.sub('', output).split())}. The exit code is {code}."
    return wrap_svg(theme, y + 4, title, description, parts)


def _paint(theme: Theme, line: str) -> str:
    """ANSI styles -> tspans."""
    styles = {
        "1": 'font-weight="700"',
        "31": f'fill="{theme.series[4]}"',
        "33": f'fill="{theme.series[1]}"',
        "36": f'fill="{theme.series[2]}"',
    }
    parts, style = [], "0"
    for index, piece in enumerate(STYLE.split(line)):
        if index % 2:
            style = piece
        elif piece:
            parts.append(escape(piece) if style == "0" else f"<tspan {styles[style]}>{escape(piece)}</tspan>")
    return "".join(parts)


@cache
def _run_on_terminal() -> tuple[int, str]:
    text = (ROOT / "recipes" / f"{RECIPE}.yaml").read_text()
    if text.count(CHANGE[0]) != 1:
        raise ValueError(f"{RECIPE} does not hold {CHANGE[0]} once")
    parent, child = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment |= {"PYTHONPATH": str(ROOT), **NO_PERSON}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, FILE).write_text(text.replace(*CHANGE))
        command = [sys.executable, "-m", "ulysses_cli", *COMMAND]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdin=child, stdout=child, stderr=child)
        os.close(child)
        chunks = []
        while True:
            try:
                chunk = os.read(parent, 4096)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            chunks.append(chunk)
        code = process.wait()
    os.close(parent)
    return code, b"".join(chunks).decode().replace("\r\n", "\n")
