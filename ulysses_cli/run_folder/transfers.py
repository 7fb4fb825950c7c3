"""Says how far bytes on their way to or from a remote disk have come: done, of how many, how fast, how long still."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ulysses_cli.plan.units import BINARY_SUFFIXES, pick_scale

REPORT_SECONDS = 10.0


def format_transfer(num_bytes: int, total_bytes: int, seconds: float) -> str:
    """`1.20 of 8.00 GiB, 105 MiB/s, 66 s left`. The rate is that of all `seconds` so far."""
    scale, prefix = pick_scale(total_bytes, BINARY_SUFFIXES)
    decimals = 2 if prefix else 0
    text = f"{num_bytes / scale:.{decimals}f} of {total_bytes / scale:.{decimals}f} {prefix}B"
    if not num_bytes or seconds <= 0:
        return text
    rate = num_bytes / seconds
    scale, prefix = pick_scale(rate, BINARY_SUFFIXES)
    left = f", {(total_bytes - num_bytes) / rate:.0f} s left" if num_bytes < total_bytes else ""
    return f"{text}, {rate / scale:.3g} {prefix}B/s{left}"


@contextmanager
def watch_download(address: str, place: Path, total_bytes: int, say: Callable[[str], object]) -> Iterator[None]:
    """Says every few seconds how many bytes a file, or the files below a folder, have by now: that is known of every
    kind of remote disk."""
    is_over, began = threading.Event(), time.monotonic()

    def report() -> None:
        while not is_over.wait(REPORT_SECONDS):
            say(f"{address}: {format_transfer(count_bytes(place), total_bytes, time.monotonic() - began)}")

    thread = threading.Thread(target=report, name="bytes that have come", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def count_bytes(place: Path) -> int:
    files = place.rglob("*") if place.is_dir() else [place]
    return sum(_measure(file) for file in files)


def _measure(file: Path) -> int:
    try:
        return file.stat().st_size if file.is_file() else 0
    except OSError:
        return 0  # it was renamed or deleted just now
