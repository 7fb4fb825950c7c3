"""Tests the display of a run: plain lines for grep, a live display that fits, and no event that hurts the run."""

import io
import os
import pty
import re
import select
import subprocess
import sys
import termios
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.report import live
from ulysses_cli.report.live import make_display

STEP: dict[str, Any] = {
    "event": "step", "step": 1, "loss": 2.5, "grad_norm": 0.75, "learning_rate": 1e-5, "tokens_per_second": 49943.66,
    "step_seconds": 20.0, "peak_memory_bytes": 94 * 2**30, "communication_share": 0.123,
}  # fmt: skip


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def show(*events: dict[str, Any], seconds: float = 0, **options: Any) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    display = make_display(stream, 100, clock=clock, **options)
    for event in events:
        clock.now += seconds
        display.emit(event)
    display.close()
    return stream.getvalue().splitlines()


def test_every_event_has_its_line(snapshot: SnapshotAssertion) -> None:
    assert show(STEP, seconds=3600, price_per_gpu_hour=2.5, num_gpus=8) == snapshot(name="a step")
    lines = show(
        {"event": "plan", "lines": ["8 GPUs", "one row"], "note": "a\nb"},
        {"event": "phase", "name": "loading model", "detail": "Qwen/Qwen3-8B"},
        {**STEP, "loss": float("nan")},
        {**STEP, "step": 2, "loss": None},
        {"event": "eval", "step": 20, "loss": 1.5, "perplexity": 4.48, "tokens": 2000, "by_position": {"0-2K": {}}},
        {"event": "warning", "message": "two\nlines \x1b[31mred", "details": ["one", "and\ntwo"]},
        {"event": "saved", "path": "runs/a/checkpoints/step-20", "seconds": 61},
        {"event": "stopped", "reason": "max_hours"},
        {"event": "done", "model_dir": "runs/a/model"},
        {"event": "done", "model_dir": "runs/a/model", "diverged": True},
        {"event": "weather", "sky": "blue", "degrees": 20.5},
        {},
    )
    assert lines == snapshot(name="others")


def test_steps_between_logging_steps_are_silent_but_the_last_is_not() -> None:
    lines = show(*({**STEP, "step": step} for step in range(1, 38)), logging_steps=10)
    assert [line.split()[0] for line in lines] == [f"step={step}/100" for step in (1, 10, 20, 30, 37)]


def test_the_time_left_counts_evaluations_and_saves() -> None:
    lines = show(*({**STEP, "step": step} for step in (41, 42, 43)), seconds=60)  # resumed
    assert "eta_seconds=3420" in lines[-1]  # 57 steps of a minute, although a step takes 20 s


plain = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
)
names = st.sampled_from(["plan", "phase", "step", "eval", "warning", "saved", "stopped", "done", "other"])
events = st.dictionaries(st.sampled_from([*STEP, "name", "detail", "message", "path", "seconds", "reason"]), plain)


@given(st.lists(st.tuples(names, events), max_size=8), st.integers(0, 120), st.booleans())
def test_no_event_hurts_and_every_row_fits(named_events: list[tuple[str, Any]], width: int, has_unicode: bool) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8" if has_unicode else "ascii")
    display = make_display(stream, 10, 2.0, 8)
    assert display._screen.has_unicode is has_unicode
    for name, event in named_events:
        display.emit({**event, "event": name})
        for row in display._draw(width):
            assert sum(len(text) for text, _ in live.fit_row(row, width)) <= width
    display.close()


def test_a_closed_stream_does_not_stop_the_run() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", buffering=1) as stream:
        display = make_display(stream, 10)
        for step in range(3):
            display.emit({**STEP, "step": step})
        display.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)  # the rest of the buffer must go somewhere
    display.emit(STEP)


def test_sparks_show_the_losses() -> None:
    sparks = live.Screen(io.StringIO(), lambda _: ()).make_sparks
    assert sparks([1, 2, 3, 4, 5, 6, 7, 8], 8) == live.SPARKS
    assert sparks([3.0] * 5, 24) == live.SPARKS[0] * 5
    assert sparks([], 24) == ""
    assert sparks(range(1000), 4) == "▁▃▆█"


SCRIPT = """
import sys, time
from ulysses_cli.report.live import make_display
display = make_display(sys.stderr, 100, 2.5, 8)
display.emit({"event": "phase", "name": "loading model"})
input()
slowest = []
for step in range(1, 43):
    start = time.perf_counter()
    display.emit({"event": "step", "step": step, "loss": 3 - step / 50, "tokens_per_second": 5e4,
                  "step_seconds": 20.0, "peak_memory_bytes": 94 * 2**30})
    slowest.append(time.perf_counter() - start)
display.emit({"event": "eval", "step": 42, "loss": 1.5})
display.emit({"event": "warning", "message": "caf\\u00e9 [bold]markup[/bold] is text"})
print("said by a library", file=sys.stderr)
input()
display.close()
print("slowest", max(slowest), "median", sorted(slowest)[21])
"""


AWAITED = "loading", r"step[ =]42/100|step=1/100", "$^"  # what a terminal shows before the script goes on


def run_on_a_terminal(columns: int, **environment: str) -> tuple[str, str]:
    """Returns (what the terminal got, stdout) of a process with a terminal of its own on stderr only."""
    main, other = pty.openpty()
    termios.tcsetwinsize(other, (24, columns))
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=other,
        env={**kept, "TERM": "xterm-256color", "COLUMNS": str(columns), "PYTHONIOENCODING": "utf-8", **environment},
    )
    os.close(other)
    assert process.stdin
    written, awaited = b"", 0
    while True:
        if re.search(AWAITED[awaited], strip(written.decode("utf-8", "replace"))):
            awaited += 1
            process.stdin.write(b"\n")
            process.stdin.flush()
        assert select.select([main], [], [], 60)[0], f"the terminal shows nothing new: {written.decode()}"
        try:
            part = os.read(main, 65536)
        except OSError:  # how Linux says that the other end is closed
            part = b""
        if not part:
            break
        written += part
    os.close(main)
    output = process.communicate(timeout=30)[0].decode()
    assert process.returncode == 0, written.decode()
    return written.decode("utf-8", "replace"), output


def render(text: str) -> list[str]:
    """Returns the lines that are left on a terminal, which knows only these movements."""
    rows, row, column = [""], 0, 0
    for word in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|.|\n", text, re.S):
        if word == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif word == "\r":
            column = 0
        elif word.endswith("A") and word.startswith("\x1b"):
            row -= int(word[2:-1] or 1)
        elif word == "\x1b[2K":
            rows[row] = ""
        elif not word.startswith("\x1b"):
            rows[row] = rows[row][:column].ljust(column) + word + rows[row][column + 1 :]
            column += 1
    return [line for line in rows if line.strip()]


def strip(text: str) -> str:
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", text)


def test_on_a_terminal_it_is_live(snapshot: SnapshotAssertion) -> None:
    text, output = run_on_a_terminal(100)
    assert "loading model" in text
    plain = strip(text)
    for words in ("step 42/100  42%", "loss 2.16", "50k tokens/s", "94.0 GiB", "of about ", "━", "▁", "eval 1.5"):
        assert words in plain, words
    assert [re.sub(r" (eta_seconds|cost_usd)=.*", "", line) for line in render(text)] == snapshot  # what stays
    assert text.rindex("\x1b[?25h") > text.find("\x1b[?25l")  # the cursor is visible
    assert output.startswith("slowest ")
    assert float(output.split()[-1]) < 1e-3


@pytest.mark.parametrize("columns", [20, 40])
def test_on_a_narrow_terminal_rows_fit(columns: int) -> None:
    text, _ = run_on_a_terminal(columns)
    moving = [line for line in re.split(r"[\r\n]+", strip(text)) if re.match(r"(step|loss) \d|50k tokens", line)]
    assert moving
    assert max(map(len, moving)) < columns


@pytest.mark.check
def test_without_colour_and_without_unicode() -> None:
    text, _ = run_on_a_terminal(100, NO_COLOR="1")
    assert not re.search(r"\x1b\[[\d;]*3[0-9](;|m)", text)
    text, _ = run_on_a_terminal(100, PYTHONIOENCODING="ascii")
    assert text.isascii()
    assert "####" in text
    assert "caf\\xe9" in text


def test_a_dumb_terminal_gets_plain_lines() -> None:
    text, _ = run_on_a_terminal(80, TERM="dumb")
    assert "\x1b" not in text
    assert text.count("step=") == 43  # every step and the evaluation
