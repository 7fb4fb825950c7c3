"""Signals and the death of the parent process, heard in a thread of their own: a main thread that waits in a collective
runs no Python handler. Decides when a rank that was told to stop ends. Imports nothing heavy.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable

ORPHANED = 0  # stands beside the signals' numbers: the parent process is dead
STOP_SECONDS = 45.0  # from a signal to the end of a rank that reaches no boundary; the launcher needs up to 10 s more
ORPHAN_SECONDS = 10.0
LAST_SECONDS = 3.0  # for the words that a rank leaves
LOOK_SECONDS = 0.5
PR_SET_PDEATHSIG = 1
STARTED_BY = "ULYSSES_STARTED_BY"  # the process whose death ends this one
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Listener:
    """Calls `hear` in its thread with each signal, and once with ORPHANED; calls `look` twice a second. Tells its own
    children by the environment whose death is theirs."""

    def __init__(self, hear: Callable[[int], None], look: Callable[[], None] = lambda: None) -> None:
        self.hear, self.look = hear, look
        self.parents = os.getppid(), int(os.environ.get(STARTED_BY, os.getppid()))
        os.environ[STARTED_BY] = str(os.getpid())

    def start(self) -> None:
        """On the main thread. Python writes each signal into a pipe, also while the main thread is inside C."""
        source, target = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(target, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        threading.Thread(target=self._listen, args=(source,), name="listener", daemon=True).start()

    def _listen(self, source: int) -> None:
        is_orphan = False
        while True:
            is_told = select.select([source], [], [], LOOK_SECONDS)[0]
            if not is_orphan and self.is_orphan():
                is_orphan = True
                self.hear(ORPHANED)
            for number in os.read(source, 1 << 10) if is_told else b"":
                if number in SIGNALS:
                    self.hear(number)
            self.look()

    def is_orphan(self) -> bool:
        """A shell may stand between this process and the one that started it."""
        direct, starter = self.parents
        try:
            os.kill(starter, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # alive, and another user's
        return os.getppid() != direct


class Interruption:
    """What this rank has been told, and what becomes of it.

    Before the first step, and after the last save, nothing can be lost: the rank ends at once. Between them the loop
    asks for `is_asked` and comes to a boundary with a checkpoint; a rank that does not come there in time ends.
    """

    def __init__(
        self,
        end: Callable[[int], None],
        tell: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.end, self.tell, self.clock = end, tell, clock
        self.number: int | None = None  # the first signal, or ORPHANED
        self.patience: float | None = None  # None: nothing is lost by ending at once
        self.is_saving: Callable[[], bool] = lambda: False
        self.is_orphan = False
        self.deadline = float("inf")

    @property
    def is_asked(self) -> bool:
        return self.number is not None

    def hear(self, number: int) -> None:
        if number == ORPHANED:
            self.is_orphan = True
            self.deadline = self.clock() + ORPHAN_SECONDS
        if self.number is None:
            self.number = number
            self.deadline = min(self.deadline, self.clock() + (self.patience or 0.0))
            if self.patience is not None and number != ORPHANED:
                self.tell("stopping after this step; Ctrl-C again, or a second signal, stops now")
        self.look()

    def look(self) -> None:
        """A save that has begun may take its time, unless nobody is left to wait for it."""
        if self.number is None:
            return
        waits = self.is_saving() and not self.is_orphan
        if self.patience is None or (self.clock() >= self.deadline and not waits):
            self.end(self.number)

    def wait_for_boundary(self, step_timeout: float, is_saving: Callable[[], bool]) -> None:
        """From here on there is something to save."""
        self.is_saving = is_saving
        self.patience = min(STOP_SECONDS, 0.75 * step_timeout)

    def end_if_told(self) -> None:
        if self.number is not None:
            self.end(self.number)

    def end_at_once(self) -> None:
        """From here on there is nothing to save. One that was told to stop before ends here."""
        self.patience = None
        self.look()


def end_process(number: int, leave_failure_record: Callable[[], None]) -> None:
    """Whatever goes wrong with the words, the process ends."""
    code = 128 + (number or signal.SIGTERM)
    timer = threading.Timer(LAST_SECONDS, os._exit, (code,))
    timer.daemon = True
    timer.start()
    try:
        leave_failure_record()
    finally:
        os._exit(code)
