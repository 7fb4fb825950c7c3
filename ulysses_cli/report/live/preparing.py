"""Shows the progress of data preparation on stderr: one changing line on a terminal, a line every 10 s elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from ulysses_cli.plan.nouns import format_count
from ulysses_cli.report.printing import clean_text, hide_secrets, print_message
from ulysses_cli.report.quantities import format_seconds

TERMINAL_SECONDS, FILE_SECONDS = 0.2, 10.0
BAR_CELLS = 24
STAGES = {"tokenizer": "loading the tokenizer", "rows": "packing rows"}


class ProgressLine:
    """Shows events of data preparation."""

    def __init__(self) -> None:
        self.is_terminal = sys.stderr.isatty()
        self._shown = 0.0
        self._started: dict[str, float] = {}
        self._is_open = False

    def show(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "wait":
            self.end()
            print_message(clean_text(f"another process is making {event['what']}; waiting for it"))
        elif kind == "stage" and self.is_terminal and event["stage"] in STAGES:
            self._write(STAGES[event["stage"]])
        elif kind == "progress":
            self._show_progress(event)

    def _show_progress(self, event: Mapping[str, Any]) -> None:
        now = time.monotonic()
        start = self._started.setdefault(event["source"], now)
        is_done = event.get("is_done", False)
        interval = TERMINAL_SECONDS if self.is_terminal else FILE_SECONDS
        self._shown = self._shown or now
        if not is_done and now - self._shown < interval:
            return
        self._shown = now
        self._write(format_progress(event, now - start))
        if is_done:
            self.end()

    def _write(self, text: str) -> None:
        text = clean_text(hide_secrets(text))
        if not self.is_terminal:
            print_message(text)
            return
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()
        self._is_open = True

    def end(self) -> None:
        """Ends the changing line, so that the next output starts on a line of its own."""
        if self._is_open:
            sys.stderr.write("\n")
            sys.stderr.flush()
            self._is_open = False


def format_progress(event: Mapping[str, Any], seconds: float) -> str:
    """One line: name, bar, tokens, speed, time left."""
    done, total = event["bytes"], event["total_bytes"]
    parts = [f"tokenizing {event['name']}"]
    if total:
        share = min(1.0, done / total)
        filled = int(share * BAR_CELLS)
        parts.append(f"[{'#' * filled}{'.' * (BAR_CELLS - filled)}] {share:4.0%}")
    parts.append(format_count(event["tokens"], "token"))
    if seconds > 0.5:
        parts.append(f"{done / 1e6 / seconds:.1f} MB/s")
        if total and 0 < done < total:
            parts.append(f"{format_seconds(round(seconds * (total - done) / done))} left")
    return "  ".join(parts)
