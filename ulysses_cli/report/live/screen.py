"""Shows a few rows that are redrawn on a terminal, below lines that stay. Prints plain lines if there is no terminal.

Knows nothing about runs. A thread of its own draws, so that a new line costs the caller microseconds, and a terminal
that is closed does not stop the work.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TextIO

from ulysses_cli.report.printing import clean_text, write_to

REFRESH_SECONDS = 0.25
BARS, ASCII_BARS = "\u2501\u2500", "#-"
SPARKS, ASCII_SPARKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588", "_.-=+*#@"
SPINNER, ASCII_SPINNER = "\u280b\u2819\u2839\u2838\u283c\u2834\u2826\u2827\u2807\u280f", "|/-\\"
Piece = tuple[str, str]  # text and style
Row = Sequence[Piece]


class Screen:
    """`draw(width)` returns the rows of the part that is redrawn. It is called from another thread."""

    def __init__(self, stream: TextIO, draw: Callable[[int], Sequence[Row]]) -> None:
        self._stream = stream
        self._draw = draw
        self._waiting: deque[Piece] = deque()
        self._closing = threading.Event()
        self._is_closed = False
        self.is_live = _is_terminal(stream)
        self.has_unicode = _can_show(stream, BARS + SPARKS + SPINNER)
        if self.is_live:
            self._thread = threading.Thread(target=self._run, name="display", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def print_line(self, text: str, style: str = "") -> None:
        """Prints a line that stays."""
        if self._is_closed:
            return
        text = clean_text(" ".join(text.splitlines())).rstrip()
        if self.is_live:
            self._waiting.append((text, style))
            return
        try:
            write_to(self._stream, text)
        except (OSError, ValueError):  # the reader has gone, or the stream is closed; the run continues
            self._is_closed = True

    def close(self) -> None:
        """Prints the lines that wait, and removes the part that is redrawn."""
        if self.is_live and not self._is_closed:
            self._closing.set()
            self._thread.join(timeout=5)
            atexit.unregister(self.close)
        self._is_closed = True

    def make_bar(self, share: float, width: int) -> list[Piece]:
        letters = BARS if self.has_unicode else ASCII_BARS
        done = max(0, min(width, int(share * width)))
        return [(letters[0] * done, "cyan"), (letters[1] * (width - done), "dim")]

    def make_sparks(self, values: Sequence[float], width: int) -> str:
        """A sparkline of at most `width` letters, each for the mean of an equal share of the values."""
        count = min(width, len(values))
        edges = [place * len(values) // count for place in range(count + 1)] if count else []
        means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
        low, high = min(means, default=0), max(means, default=0)
        letters = SPARKS if self.has_unicode else ASCII_SPARKS
        return "".join(letters[round((mean - low) / (high - low or 1) * (len(letters) - 1))] for mean in means)

    def pick_spinner(self) -> str:
        letters = SPINNER if self.has_unicode else ASCII_SPINNER
        return letters[int(time.monotonic() / REFRESH_SECONDS) % len(letters)]

    def _run(self) -> None:
        try:
            self._show()
        except (OSError, ValueError):  # the terminal was closed
            pass
        finally:
            self._is_closed = True

    def _show(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        console = Console(file=self._stream, highlight=False, markup=False, emoji=False, soft_wrap=True)

        def make_text() -> Text:
            rows = [fit_row(row, console.width - 1) for row in self._draw(console.width - 1)]
            text = Text(no_wrap=True, overflow="crop")
            for place, row in enumerate(rows):
                text.append("\n" if place else "")
                for piece, style in row:
                    text.append(self._escape(piece), style or None)
            return text

        is_stderr = self._stream is sys.stderr  # then rich prints the libraries' messages above the redrawn part
        with Live(
            console=console,
            get_renderable=make_text,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,  # stdout is data
            redirect_stderr=is_stderr,
        ) as live:
            console.show_cursor(True)  # a killed process must not leave the cursor hidden
            is_last = False
            while not is_last:
                is_last = self._closing.wait(REFRESH_SECONDS)
                while self._waiting:
                    text, style = self._waiting.popleft()
                    console.print(Text(self._escape(text), style=style))
                live.refresh()

    def _escape(self, text: str) -> str:
        encoding = self._stream.encoding or "utf-8"
        return clean_text(text).encode(encoding, "backslashreplace").decode(encoding)


def fit_row(row: Row, width: int) -> list[Piece]:
    """The pieces of a row that fit. A piece that does not fit is left out with all after it; a first piece is cut."""
    fitting: list[Piece] = []
    left = width
    for text, style in row:
        if len(text) > left:
            return fitting or [(text[: max(0, left)], style)]
        fitting.append((text, style))
        left -= len(text)
    return fitting


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    except ValueError:
        return False


def _can_show(stream: TextIO, letters: str) -> bool:
    try:
        letters.encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
