"""When a run writes and reads checkpoints, and what of the run goes into them. The format is checkpoint.py's."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ulysses_cli.train.archive import prune_checkpoints, set_aside
from ulysses_cli.train.bad_steps import BadSteps
from ulysses_cli.train.checkpoint import Owner, load_checkpoint, save_checkpoint
from ulysses_cli.train.loop import Course
from ulysses_cli.train.record import Record


class Saves:
    """The checkpoints of one run. `facts` are the parts of a checkpoint's state that never change."""

    def __init__(
        self, owner: Owner, record: Record, keep: int | None, facts: Mapping[str, Any], bad_steps: BadSteps
    ) -> None:
        self.owner, self.record, self.keep, self.facts, self.bad_steps = owner, record, keep, facts, bad_steps
        self.last_step: int | None = None

    def save(self, course: Course) -> None:
        """A chore. Collective over all ranks; nothing where this step is saved already."""
        if self.last_step == course.step:
            return
        course.phase = "saving"
        started = time.perf_counter()
        state = {
            "step": course.step,
            "position": course.position,
            "optimizer_steps": course.optimizer_steps,
            "bad_steps": self.bad_steps.count,
            "hours": course.wishes.hours,
            **self.facts,
        }
        path = save_checkpoint(self.owner, self.record.run_dir, course.step, state)
        if self.owner.rank == 0:
            prune_checkpoints(self.record.run_dir, self.keep)
        self.last_step = course.step
        self.record.tell(event="saved", path=str(path), seconds=time.perf_counter() - started)

    def resume(self, course: Course, path: Path) -> None:
        """Collective over all ranks."""
        state = load_checkpoint(self.owner, path)
        if self.owner.rank == 0:
            set_aside(self.record.run_dir, path, self.record.warn)
        course.step, course.position = int(state["step"]), int(state["position"])
        course.optimizer_steps = int(state["optimizer_steps"])
        self.bad_steps.count = int(state["bad_steps"])
        course.wishes.hours_before = float(state["hours"])
        self.last_step = course.step
        self.record.say(f"resumed from {path} after step {course.step}")

    def get_last_path(self) -> Path:
        return self.record.run_dir / "checkpoints" / f"step-{self.last_step}"
