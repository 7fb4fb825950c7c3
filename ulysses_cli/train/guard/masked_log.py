"""Logs without secrets. Whatever a process, its libraries and their C++ write goes through a pipe to a small process of
its own, which masks it line by line and outlives its writer: last words arrive, however a rank ends.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Collection
from io import TextIOWrapper

from ulysses_cli.plan.secrets import mask_text

CHUNK_BYTES = 1 << 16
PATIENCE_SECONDS = 1.0  # a line that is not ended is written after this time


class MaskedStream(TextIOWrapper):
    """A text stream whose every write is masked."""

    known: Collection[str] = ()

    def write(self, text: str) -> int:
        return super().write(mask_text(text, self.known))


def open_masked(log: int, known: Collection[str]) -> int:
    """-> a file that is written to instead of `log`, which is taken over. Forks: called before there are threads."""
    source, target = os.pipe()
    if os.fork() == 0:
        try:
            _leave(source, log)
            _copy(source, log, known)
        finally:
            os._exit(0)
    os.close(source)
    os.close(log)
    return target


def _leave(*kept: int) -> None:
    """Nothing of the parent's is held: neither its locks nor its pipes, nor its signals."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in {*kept, nowhere} and os.path.exists(f"/proc/self/fd/{name}"):
            os.dup2(nowhere, int(name), inheritable=False)


def _copy(source: int, log: int, known: Collection[str]) -> None:
    rest = b""
    while True:
        is_ready = bool(select.select([source], [], [], PATIENCE_SECONDS if rest else None)[0])
        chunk = os.read(source, CHUNK_BYTES) if is_ready else b""
        is_over = is_ready and not chunk
        whole, line_end, rest = (rest + chunk).rpartition(b"\n")
        if not is_ready or is_over or len(rest) > CHUNK_BYTES:
            whole, rest = whole + line_end + rest, b""
        else:
            whole += line_end
        if whole:
            _write(log, mask_text(whole.decode("utf-8", "surrogateescape"), known).encode("utf-8", "surrogateescape"))
        if is_over:
            return


def _write(log: int, text: bytes) -> None:
    """A disk that is full costs lines of the log, and nothing else."""
    try:
        while text:
            text = text[os.write(log, text) :]
    except OSError:
        return
