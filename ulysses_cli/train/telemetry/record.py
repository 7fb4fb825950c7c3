"""Writes a run's record: events for the user's display, lines for programs, numbers for trackers. Only rank 0 has any
of them; on every other rank the same calls write nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil

from ulysses_cli.plan.secrets import mask_text
from ulysses_cli.run_folder.line_files import LineFile, cut_lines, read_lines
from ulysses_cli.run_folder.run_lock import RunLock
from ulysses_cli.run_folder.told import note_told
from ulysses_cli.train.telemetry.loss_watch import LossWatch
from ulysses_cli.train.telemetry.trackers import Tracker

STARTING = "starting"


class Display(Protocol):
    """Shows events to the user."""

    def emit(self, event: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class PhaseClock:
    """Seconds of each phase, from the start of this process on."""

    def __init__(self) -> None:
        self.phase, self.since = STARTING, time.monotonic() - max(0.0, time.time() - psutil.Process().create_time())
        self.seconds: dict[str, float] = {}

    def enter(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self.since
        self.phase, self.since = phase, now

    def describe(self) -> str:
        """The phases so far, without those that took no time."""
        parts = [f"{phase} {seconds:.0f} s" for phase, seconds in self.seconds.items() if seconds >= 0.5]
        return f"ready after {sum(self.seconds.values()):.0f} s: {', '.join(parts)}" if parts else ""


class Record:
    """One rank's record of the run: its display, its files and its trackers."""

    def __init__(self, run_dir: Path, logging_steps: int = 1, lock: RunLock | None = None) -> None:
        self.run_dir, self.logging_steps, self.lock = run_dir, logging_steps, lock
        self.display: Display | None = None
        self.trackers: Sequence[Tracker] = ()
        self.files: dict[str, LineFile] = {}
        self.watch = LossWatch(self.warn)
        self.phase = STARTING
        self.clock = PhaseClock()
        self.describe_step: Callable[[], str] = lambda: ""

    def open(self, display: Display, trackers: Sequence[Tracker] = ()) -> None:
        """Called on rank 0 alone: the other ranks' records write nothing."""
        self.display, self.trackers = display, trackers

    def note_trackers(self, state: str) -> None:
        """Notes where the trackers write, once no result of an earlier run is in the folder any more."""
        for tracker in self.trackers:
            if tracker.place:
                note_told(self.run_dir, "tracker", type(tracker).__name__, f"{state} {tracker.place}")

    def describe_phase(self) -> str:
        """The phase, with the step that the loop is in."""
        return ", ".join(part for part in (self.phase, self.describe_step()) if part)

    def start_files(self, last_step: int, num_steps: int) -> None:
        """Opens the metrics files without the lines after `last_step`: those steps will run again."""
        if self.display is None:
            return
        for name in ("metrics", "eval", "samples", "quality"):
            cut_lines(self.run_dir / f"{name}.jsonl", last_step)
        for name in ("metrics", "eval"):
            self.files[name] = LineFile(self.run_dir / f"{name}.jsonl")
        self.watch.start(num_steps, read_lines(self.run_dir / "metrics.jsonl", last_step))
        self.note_trackers("writes to")

    def emit(self, **event: Any) -> None:
        if self.display is not None:
            self.display.emit(event)

    def report(self, text: str) -> None:
        self.emit(event="plan", text=text)

    def warn(self, text: str) -> None:
        """Lines after the first are details."""
        message, *details = text.splitlines() or [""]
        self.emit(event="warning", message=message, details=[line.strip() for line in details])

    def set_phase(self, phase: str) -> None:
        self.clock.enter(phase)
        self.phase = phase
        self.emit(event="phase", name=phase)

    def write_step(self, line: dict[str, Any]) -> None:
        """Every `logging_steps`-th step, every step that was not applied, and where the loss is far above its past from
        now on, or no longer."""
        if self.display is None:
            return
        self.watch.mark(line)
        if line["step"] % self.logging_steps == 0 or not line.get("applied", True) or "diverged" in line:
            self._write("metrics", "step", "train", line)

    def write_eval(self, line: dict[str, Any]) -> None:
        self._write("eval", "eval", "eval", line)

    def write_samples(self, line: dict[str, Any]) -> None:
        self._open("samples")
        self._write("samples", "samples", "samples", line)

    def write_quality(self, line: dict[str, Any]) -> None:
        self._open("quality")
        self._write("quality", "quality", "quality", line)

    def end(self, model_dir: Path) -> None:
        """All steps are done. A run whose loss is far above its past must not end like one that has learned."""
        self.emit(event="done", model_dir=str(model_dir), **({"diverged": True} if self.watch.is_high else {}))

    def _open(self, name: str) -> None:
        """Opens a file that most runs do not write."""
        if self.display is not None and name not in self.files:
            self.files[name] = LineFile(self.run_dir / f"{name}.jsonl")

    def _write(self, file: str, event: str, split: str, line: dict[str, Any]) -> None:
        if self.display is None:
            return
        if self.files[file].is_gone:
            if self.lock is not None:
                self.lock.put_back()
            self.files[file].begin_anew()
            self.warn(
                f"{self.files[file].path} was removed during the run: its content is lost, and a new file is started; "
                "checkpoints and logs in its folder may be gone too; no second run can start there"
            )
        self.files[file].write(line)
        self.emit(event=event, **line)
        for tracker in self.trackers:
            self._or_without(tracker, partial(tracker.write, split, line))

    def _or_without(self, tracker: Tracker, part: Callable[[], None]) -> None:
        try:
            part()
        except Exception as error:  # noqa: BLE001 - a service may raise anything, and the run goes on without it
            self.trackers = [other for other in self.trackers if other is not tracker]
            reason = mask_text((str(error).strip().splitlines() or [""])[0][:200])
            complaint = f"gets no more numbers: {type(error).__name__}: {reason}"
            self.warn(f"{type(tracker).__name__} {complaint}")
            if tracker.place:
                note_told(self.run_dir, "tracker", type(tracker).__name__, complaint)
            _close_quietly(tracker)

    def close(self) -> None:
        for tracker in self.trackers:
            self._or_without(tracker, tracker.close)
        self.note_trackers("closed")
        for part in (*self.files.values(), self.display):
            if part is not None:
                part.close()


def _close_quietly(tracker: Tracker) -> None:
    """A tracker that has failed once may fail again; what it has got is complete where it can be closed."""
    with contextlib.suppress(Exception):
        tracker.close()
