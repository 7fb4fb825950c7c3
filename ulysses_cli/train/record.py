"""What a run tells: events for the person's display, lines for programs, numbers for trackers. Only rank 0 has any of
them; on every other rank the same calls say nothing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ulysses_cli.plan.secrets import mask_text
from ulysses_cli.train.run_lock import RunLock


class Display(Protocol):
    """Where words for the person go."""

    def emit(self, event: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Tracker(Protocol):
    """A service that draws curves."""

    def write(self, split: str, line: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Record:
    """The voice of the run."""

    def __init__(
        self,
        run_dir: Path,
        display: Display | None,
        trackers: Sequence[Tracker],
        logging_steps: int,
        lock: RunLock | None = None,
    ) -> None:
        self.lock = lock
        self.run_dir, self.display, self.trackers = run_dir, display, trackers
        self.logging_steps = logging_steps
        self.files: dict[str, LineFile] = {}
        self.phase = "start"

    def start_files(self, last_step: int) -> None:
        """Lines after `last_step` are of steps that will be done again."""
        if self.display is None:
            return
        for name in ("metrics", "eval"):
            cut_lines(self.run_dir / f"{name}.jsonl", last_step)
            self.files[name] = LineFile(self.run_dir / f"{name}.jsonl")

    def tell(self, **event: Any) -> None:
        if self.display is not None:
            self.display.emit(event)

    def say(self, text: str) -> None:
        self.tell(event="plan", text=text)

    def warn(self, text: str) -> None:
        """Lines after the first are details."""
        message, *details = text.splitlines() or [""]
        self.tell(event="warning", message=message, details=[line.strip() for line in details])

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.tell(event="phase", name=phase)

    def write_step(self, line: dict[str, Any]) -> None:
        if line["step"] % self.logging_steps == 0:
            self._write("metrics", "step", "train", line)

    def write_eval(self, line: dict[str, Any]) -> None:
        self._write("eval", "eval", "eval", line)

    def _write(self, file: str, event: str, split: str, line: dict[str, Any]) -> None:
        if self.display is None:
            return
        if self.files[file].is_gone:
            if self.lock is not None:
                self.lock.put_back()
            self.files[file].begin_anew()
            self.warn(
                f"{self.files[file].path} was removed while the run goes on: what it held is lost, a new one is begun; "
                "checkpoints and logs in its folder may be gone too; no second run can begin there"
            )
        self.files[file].write(line)
        self.tell(event=event, **line)
        for tracker in self.trackers:
            tracker.write(split, line)

    def close(self) -> None:
        for part in (self.display, *self.files.values(), *self.trackers):
            if part is not None:
                part.close()


class LineFile:
    """One JSON object a line, on disk at once. NaN and infinity are null: they are no JSON. What a full disk does not
    take waits for the next line: a run that goes on without room for its checkpoints goes on here, too."""

    def __init__(self, path: Path) -> None:
        self.path, self.waiting = path, b""
        self._open()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    @property
    def is_gone(self) -> bool:
        """Somebody has removed it."""
        return not os.fstat(self.handle).st_nlink

    def begin_anew(self) -> None:
        os.close(self.handle)
        self._open()

    def write(self, line: dict[str, Any]) -> None:
        self.waiting += json.dumps(_clean(line)).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        try:
            while self.waiting:
                self.waiting = self.waiting[os.write(self.handle, self.waiting) :]
        except OSError:
            return

    def close(self) -> None:
        self._flush()
        os.close(self.handle)


def _clean(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    return value


def cut_lines(path: Path, last_step: int) -> None:
    """On resume: steps that will be done again are taken out, so that each appears once; so is a torn last line."""
    if not path.exists():
        return
    beside = path.with_suffix(".part")
    beside.write_text("".join(f"{line}\n" for _, line in _read_lines(path, last_step)), encoding="utf-8")
    os.replace(beside, path)


def find_last_step(path: Path, last_step: int) -> int:
    """The newest step up to `last_step` that has a line in the file, -1 for none."""
    return max((step for step, _ in _read_lines(path, last_step)), default=-1)


def _read_lines(path: Path, last_step: int) -> Iterator[tuple[int, str]]:
    """(step, line) of each whole line up to `last_step`."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if (step := int(json.loads(line)["step"])) <= last_step:
                yield step, line
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue


class MissingTrackerError(ValueError):
    """A tracker that the recipe names is not installed."""


def make_trackers(names: Sequence[str], run_dir: Path, run_name: str) -> list[Tracker]:
    makers: dict[str, Callable[[Path, str], Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
    trackers: list[Tracker] = []
    run_name = mask_text(run_name)  # services show it
    for name in names:
        try:
            trackers.append(makers[name](run_dir, run_name))
        except ImportError as error:
            raise MissingTrackerError(
                f"run.report_to: {name} is not installed ({error}): pip install ulysses-cli[{name}]"
            ) from error
    return trackers


def _pick_numbers(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if isinstance(value, int | float) and name != "step"}


class TensorBoard:
    def __init__(self, run_dir: Path, run_name: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run_dir / "tensorboard" / run_name))

    def write(self, split: str, line: dict[str, Any]) -> None:
        for name, value in _pick_numbers(line).items():
            self.writer.add_scalar(f"{split}/{name}", value, line["step"])

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    def __init__(self, run_dir: Path, run_name: str) -> None:
        import wandb

        self.run = wandb.init(project="ulysses", name=run_name, dir=str(run_dir))

    def write(self, split: str, line: dict[str, Any]) -> None:
        self.run.log({f"{split}/{name}": value for name, value in _pick_numbers(line).items()}, step=line["step"])

    def close(self) -> None:
        self.run.finish()
