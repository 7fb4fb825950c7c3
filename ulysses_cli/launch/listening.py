"""Passes the lines of a run's metrics to a function of this process while the run goes on."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ulysses_cli.run_folder.early_stop import ASKED_FILE

POLL_SECONDS = 0.2
READ_BYTES = 1 << 16


class StepListener:
    """Reads lines from a FIFO that rank 0 writes to, in the thread that waits for the agent. `receive` takes a split
    and a line; if it returns True or raises, the run stops with a checkpoint, and `error` holds what it raised."""

    def __init__(self, handle: int, environ: Mapping[str, str], receive: Callable[[str, dict[str, Any]], object]):
        self.handle, self.environ, self.receive = handle, dict(environ), receive
        self.error: BaseException | None = None
        self.waiting, self.asker = b"", ""

    def follow(self, agent: subprocess.Popen[bytes], stop: Callable[[], None]) -> int:
        """Returns the agent's exit code."""
        has_stopped = False
        while agent.poll() is None:
            if self._pass_on(POLL_SECONDS) and not has_stopped:
                has_stopped = True
                Path(self.environ[ASKED_FILE]).write_text(f"the program's {self.asker}", encoding="utf-8")
                stop()
        self._pass_on(0)
        return agent.wait()

    def _pass_on(self, seconds: float) -> bool:
        """Passes on what arrives in time. Returns whether the run shall stop."""
        wants_stop = False
        while select.select([self.handle], [], [], seconds)[0]:
            seconds = 0
            *lines, self.waiting = (self.waiting + os.read(self.handle, READ_BYTES)).split(b"\n")
            for line in lines:
                wants_stop |= self._call(line)
        return wants_stop

    def _call(self, written: bytes) -> bool:
        if self.error is not None:
            return False
        split = ""
        try:
            line = json.loads(written)
        except ValueError:  # a rank was killed while it wrote; the run goes on, and its own files are whole
            return False
        try:
            split = line.pop("split")
            wants_stop = self.receive(split, line) is True
        except BaseException as error:  # noqa: BLE001 - raised again once the run has saved and ended
            self.error, wants_stop = error, True
        if wants_stop:
            self.asker = self.asker or ("on_step" if split == "train" else "on_eval")
        return wants_stop


@contextmanager
def open_listener(receive: Callable[[str, dict[str, Any]], object]) -> Iterator[StepListener]:
    """Opens the FIFO for reading and writing: it then has no end before its last writer is gone, however often ranks
    start again."""
    with TemporaryDirectory(prefix="ulysses-lines-") as folder:
        path = Path(folder) / "lines"
        os.mkfifo(path, 0o600)
        handle = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        try:
            environ = {"ULYSSES_LINES": str(path), ASKED_FILE: str(path.with_name("asked"))}
            yield StepListener(handle, environ, receive)
        finally:
            os.close(handle)
