"""Masks secrets in logs. All that a process, its libraries and their C++ write goes through a pipe to a small second
process, which masks it line by line. It outlives the writer: the last lines reach the log even after a SIGKILL."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Collection
from io import TextIOWrapper

from ulysses_cli.plan.secrets import mask_text

CHUNK_BYTES = 1 << 16
FLUSH_SECONDS = 1.0  # an unfinished line is written after this time


class MaskedStream(TextIOWrapper):
    """A text stream that masks every write."""

    secrets: Collection[str] = ()

    def write(self, text: str) -> int:
        return super().write(mask_text(text, self.secrets))


def open_masked(log: int, secrets: Collection[str]) -> int:
    """Returns a file descriptor to write to instead of `log`, and closes `log`. Forks: call before threads start."""
    source, target = os.pipe()
    if os.fork() == 0:
        try:
            _detach(source, log)
            _copy(source, log, secrets)
        finally:
            os._exit(0)
    os.close(source)
    os.close(log)
    return target


def _detach(*kept_files: int) -> None:
    """Gives up the parent's locks, pipes and signals."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    devnull = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in {*kept_files, devnull} and os.path.exists(f"/proc/self/fd/{name}"):
            os.dup2(devnull, int(name), inheritable=False)


def _copy(source: int, log: int, secrets: Collection[str]) -> None:
    rest = b""
    while True:
        is_ready = bool(select.select([source], [], [], FLUSH_SECONDS if rest else None)[0])
        chunk = os.read(source, CHUNK_BYTES) if is_ready else b""
        is_end = is_ready and not chunk
        lines, line_end, rest = (rest + chunk).rpartition(b"\n")
        if not is_ready or is_end or len(rest) > CHUNK_BYTES:
            lines, rest = lines + line_end + rest, b""
        else:
            lines += line_end
        if lines:
            _write(log, mask_text(lines.decode("utf-8", "surrogateescape"), secrets).encode("utf-8", "surrogateescape"))
        if is_end:
            return


def _write(log: int, text: bytes) -> None:
    """On a full disk, lines of the log are lost and the run continues."""
    try:
        while text:
            text = text[os.write(log, text) :]
    except OSError:
        return
