"""Receives signals and detects the parent process's death in a thread of its own: a main thread that waits in a
collective runs no Python handler. Decides when a rank that was asked to stop ends. Imports nothing heavy."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable

from ulysses_cli.plan.problem import get_signal_code

ORPHANED = 0  # used like a signal's number: the parent process is dead
STOP_SHARE = 0.75  # of the time to stop is for the ranks; their agent needs up to 10 s more
UPLOAD_SHARE = 0.67  # of the ranks' time; the rest is for leaving in order
ORPHAN_SECONDS = 10.0
RECORD_SECONDS = 3.0  # to write the failure record
CHECK_SECONDS = 0.5
PR_SET_PDEATHSIG = 1
STARTED_BY = "ULYSSES_STARTED_BY"  # the process whose death ends this one
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SignalListener:
    """Calls `receive` in its thread with each signal, and once with ORPHANED; calls `check` twice a second. Sets the
    environment variable that names this process as the one whose death ends its children."""

    def __init__(self, receive: Callable[[int], None], check: Callable[[], None] = lambda: None) -> None:
        self.receive, self.check = receive, check
        self.parents = os.getppid(), int(os.environ.get(STARTED_BY, os.getppid()))
        os.environ[STARTED_BY] = str(os.getpid())

    def start(self) -> None:
        """Call on the main thread. Python writes each signal into a pipe, also while the main thread is inside C."""
        source, target = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(target, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        threading.Thread(target=self._listen, args=(source,), name="signal listener", daemon=True).start()

    def _listen(self, source: int) -> None:
        is_orphan = False
        while True:
            has_signals = select.select([source], [], [], CHECK_SECONDS)[0]
            if not is_orphan and self.is_orphan():
                is_orphan = True
                self.receive(ORPHANED)
            for number in os.read(source, 1 << 10) if has_signals else b"":
                if number in SIGNALS:
                    self.receive(number)
            self.check()

    def is_orphan(self) -> bool:
        """Checks both the direct parent and the process that started the run: a shell may be between them."""
        parent, starter = self.parents
        try:
            os.kill(starter, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # it runs, and belongs to another user
        return os.getppid() != parent


class Interruption:
    """The request to stop that this rank has received, and when it ends the rank.

    Before the first step and after the last save nothing can be lost: the rank ends at once. Between them the loop
    reads `is_asked` and stops at a step boundary, with a checkpoint if a step was made. A rank that is not there in
    time ends, also in a save: no reader takes an unfinished checkpoint, so the last complete one counts.
    """

    def __init__(
        self,
        end: Callable[[int], None],
        warn: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.end, self.warn, self.clock = end, warn, clock
        self.number: int | None = None  # the first signal, or ORPHANED
        self.grace_seconds: float | None = None  # None: nothing is lost by ending at once
        self.deadline = float("inf")

    @property
    def is_asked(self) -> bool:
        return self.number is not None

    @property
    def is_hurried(self) -> bool:
        """What can be done later must not be waited for any more."""
        left = (1 - UPLOAD_SHARE) * (self.grace_seconds or 0.0)
        return self.number is not None and self.clock() >= self.deadline - left

    def receive(self, number: int) -> None:
        if number == ORPHANED:
            self.deadline = self.clock() + ORPHAN_SECONDS
        if self.number is None:
            self.number = number
            self.deadline = min(self.deadline, self.clock() + (self.grace_seconds or 0.0))
            if self.grace_seconds is not None and number != ORPHANED:
                self.warn("stopping after this step; Ctrl-C again, or a second signal, stops now")
        self.check()

    def check(self) -> None:
        """Ends the rank when its time is over."""
        if self.number is not None and (self.grace_seconds is None or self.clock() >= self.deadline):
            self.end(self.number)

    def wait_for_boundary(self, stop_seconds: float) -> None:
        """Call before the first step: from then on there is something to save. `stop_seconds`: from a signal to the end
        of the run."""
        self.grace_seconds = STOP_SHARE * stop_seconds

    def end_with_others(self) -> None:
        """Call where all ranks know that one of them was asked to stop, and that nothing is to be saved."""
        self.end(self.number or ORPHANED)

    def end_if_asked(self) -> None:
        if self.number is not None:
            self.end(self.number)

    def end_at_once(self) -> None:
        """Call after the last save: from then on there is nothing to save. A rank already asked to stop ends here."""
        self.grace_seconds = None
        self.check()


def end_process(number: int, write_failure_record: Callable[[], None]) -> None:
    """Ends the process even if writing the record fails or hangs."""
    code = get_signal_code(number or signal.SIGTERM)
    timer = threading.Timer(RECORD_SECONDS, os._exit, (code,))
    timer.daemon = True
    timer.start()
    try:
        write_failure_record()
    finally:
        os._exit(code)
