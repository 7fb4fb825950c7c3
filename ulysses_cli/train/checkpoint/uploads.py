"""Uploads checkpoints and the model to run.checkpoint_uri while steps go on. The layout is in
run_folder/remote_archive.py.

A thread of each machine's first rank uploads what the ranks of that machine wrote. No collective happens in a thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ulysses_cli.run_folder.archive import CheckpointError
from ulysses_cli.run_folder.bucket import Bucket, BucketError
from ulysses_cli.run_folder.manifest import MANIFEST, load_manifest, name_share
from ulysses_cli.run_folder.remote_archive import (
    CHECKPOINTS,
    MODEL,
    Sending,
    has_checkpoint,
    prune_remote,
    set_remote_aside,
)
from ulysses_cli.run_folder.transfers import format_transfer
from ulysses_cli.train.checkpoint.background import BackgroundSave
from ulysses_cli.train.checkpoint.format import CheckpointContext

WAIT_SECONDS = 1.0
POLL_SECONDS = 0.05


class NoUploads:
    """The uploads of a run without run.checkpoint_uri."""

    def begin(self, last_step: int) -> None:
        """Collective over all ranks. The run goes on from `last_step`, or starts anew where that is -1."""

    def start(self, folder: Path, save: BackgroundSave | None = None) -> None:
        """Called on every rank when a checkpoint is in its place, or while `save` is still writing it."""

    def start_missing(self, folder: Path) -> None:
        """Called on every rank with a checkpoint that an earlier process wrote: uploads it unless it is there."""

    def start_model(self, folder: Path) -> None:
        """Called on every rank when the model is complete on the first one's disk."""

    def wait(self, show: Callable[[str], None], is_over: Callable[[], bool] = lambda: False) -> str:
        """Collective over all ranks. Returns when no upload is in progress: what went wrong on any machine, or ''. When
        `is_over` of any rank says so it returns before; `is_behind` is True then."""
        return ""

    @property
    def is_behind(self) -> bool:
        """The same on all ranks, and False after a `wait` that was not cut short."""
        return False

    def cancel(self) -> None:
        """The checkpoint that is waited for will not be written."""

    def read_problem(self) -> str:
        """What has gone wrong on this rank so far; no collective."""
        return ""


class Uploads(NoUploads):
    """At most one upload is in progress; one that starts after a `wait` that was cut short follows it. `machines` names
    each rank's machine. `losses`: evaluation losses by step, as the run learns them; the checkpoint with the lowest one
    is kept."""

    def __init__(
        self, bucket: Bucket, context: CheckpointContext, machines: Sequence[str], keep: int | None,
        report: Callable[[str], None], losses: Mapping[int, float] | None = None,
    ) -> None:  # fmt: skip
        self.bucket, self.context, self.keep, self.report = bucket, context, keep, report
        self.losses = {} if losses is None else losses
        numbers = {name: number for number, name in enumerate(dict.fromkeys(machines))}
        self.machine_of = [numbers[name] for name in machines]
        self.machine = self.machine_of[context.rank]
        self.is_sender = self.machine_of.index(self.machine) == context.rank
        self.thread: threading.Thread | None = None
        self.is_cancelled = threading.Event()
        self.sending, self.problem, self.what, self.seconds = Sending(bucket), "", "", 0.0
        self.began = 0.0
        self.following: tuple[str, Callable[[], None]] | None = None

    @property
    def is_behind(self) -> bool:
        return bool(self.what)

    def begin(self, last_step: int) -> None:
        problem = ""
        if self.context.rank == 0:
            try:
                set_remote_aside(self.bucket, last_step, self.report)
            except (BucketError, OSError) as error:
                problem = str(error)
        if problem := self.context.gather(problem)[0]:
            raise CheckpointError(f"run.checkpoint_uri: {problem}")

    def start(self, folder: Path, save: BackgroundSave | None = None) -> None:
        def send() -> None:
            if self._is_complete(folder, save):
                self._send_checkpoint(folder)

        self._start(f"{CHECKPOINTS}/{folder.name}", send)

    def start_missing(self, folder: Path) -> None:
        def send() -> None:
            if not has_checkpoint(self.bucket, folder):
                self._send_checkpoint(folder)

        self._start(f"{CHECKPOINTS}/{folder.name}", send)

    def start_model(self, folder: Path) -> None:
        def send() -> None:
            if self.context.rank == 0:
                self.sending.send_model(folder)

        self._start(MODEL, send)

    def wait(self, show: Callable[[str], None], is_over: Callable[[], bool] = lambda: False) -> str:
        problem = self._wait_for_one(show, is_over)
        while self.following is not None and not self.is_behind:
            following, self.following = self.following, None
            self._start(*following)
            problem = self._wait_for_one(show, is_over) or problem
        return problem

    def _wait_for_one(self, show: Callable[[str], None], is_over: Callable[[], bool]) -> str:
        started = time.monotonic()
        while True:
            is_running = self.thread is not None and self.thread.is_alive()
            counted = self.sending.num_bytes, self.sending.total_bytes
            answers = self.context.gather((is_running, is_over(), self.problem, *counted))
            running, over, problems, counts, totals = zip(*answers, strict=True)
            problem = next(filter(None, problems), "")
            if not any(running):
                break
            if any(over):
                return ""
            if problem:
                self.is_cancelled.set()
            if self.thread is not None:
                self.thread.join(WAIT_SECONDS)
            done = format_transfer(sum(counts), sum(totals), time.monotonic() - self.began)
            show(f"{self.what}: {done}")
        if self.what and not problem:
            waited = f", {time.monotonic() - started:.1f} s of it waited for" if self.context.rank == 0 else ""
            self.report(f"uploaded {self.bucket.address}/{self.what} in {self.seconds:.1f} s{waited}")
        what, self.what, self.thread, self.problem = self.what, "", None, ""
        return f"{self.bucket.address}/{what} was not uploaded: {problem}" if problem else ""

    def cancel(self) -> None:
        self.is_cancelled.set()

    def read_problem(self) -> str:
        return self.problem

    def _start(self, what: str, send: Callable[[], None]) -> None:
        if self.is_behind:
            self.following = what, send
            return
        self.what, self.problem, self.began = what, "", time.monotonic()
        self.is_cancelled = threading.Event()
        self.sending = Sending(self.bucket, self.is_cancelled.is_set)
        if not self.is_sender:
            return

        def run() -> None:
            started = time.monotonic()
            try:
                send()
            except (BucketError, OSError, ValueError) as error:
                self.problem = str(error) or type(error).__name__
            self.seconds = time.monotonic() - started

        # a rank that fails does not wait for it: what it uploads is on its disk
        self.thread = threading.Thread(target=run, name="upload", daemon=True)
        self.thread.start()

    def _is_complete(self, folder: Path, save: BackgroundSave | None) -> bool:
        """Waits until the checkpoint has its name. Returns False where it will never have it."""
        if save is None:
            return True
        save.thread.join()
        while not (folder / MANIFEST).exists():
            if save.problem or self.is_cancelled.wait(POLL_SECONDS):
                return False
        return True

    def _send_checkpoint(self, folder: Path) -> None:
        shares = {rank: name_share(rank) for rank in range(len(load_manifest(folder)) - 1)}
        own = [name for rank, name in shares.items() if self._find_machine(rank) == self.machine]
        self.sending.send_checkpoint(folder, own, self.machine, len(set(self.machine_of)))
        if self.context.rank == 0:
            prune_remote(self.bucket, int(folder.name.removeprefix("step-")), self.keep, self.losses)

    def _find_machine(self, rank: int) -> int:
        """Another layout may have written the share."""
        return self.machine_of[rank] if rank < len(self.machine_of) else 0
