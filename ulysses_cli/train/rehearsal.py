"""One step, evaluation and save at the heaviest rows before anything counts, without effect: an out-of-memory error or
a disk that is full comes in minute one.

The learning rate is 0; moments, step count and random numbers are put back: losses are bitwise those without it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ulysses_cli.data.steps import Batching, Rows, plan_longest
from ulysses_cli.train.checkpoint import Owner, save_checkpoint
from ulysses_cli.train.evaluation import evaluate
from ulysses_cli.train.loop import Course, agree, run_step
from ulysses_cli.train.randomness import keep_all, restore_all


class FirstRows:
    """The heaviest row of a split, alone: what evaluation needs most memory for."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.row = max(range(len(rows)), key=lambda row: sum(rows.get_lengths(row)))

    def __len__(self) -> int:
        return 1

    def get_lengths(self, row: int) -> tuple[int, ...]:
        return self.rows.get_lengths(self.row)

    def count_targets(self, row: int) -> int:
        return self.rows.count_targets(self.row)

    def read(self, row: int, start: int, stop: int) -> Any:
        return self.rows.read(self.row, start, stop)


def rehearse(
    course: Course, eval_rows: Rows | None, eval_batching: Batching, owner: Owner, scratch: Path,
    tell: Callable[[str], None],
) -> int:  # fmt: skip
    """Collective over all ranks -> tokens of the longest row that was tried."""
    device = course.engine.device
    kept = keep_all(device)
    wishes, course.wishes = course.wishes, replace_wishes(course)
    plan = plan_longest(course.rows, course.batching)
    longest = max(max(part) for part in plan.row_tokens)
    try:
        tell(f"a step at {longest:,} tokens per row")
        course.phase = "rehearsal: step"
        agree(course, plan)
        run_step(course, plan, learning_rate=0.0)
        if eval_rows is not None and len(eval_rows):
            course.phase = "rehearsal: evaluation"
            evaluate(course.engine, course.groups, FirstRows(eval_rows), replace(eval_batching, seed=0))
        course.phase = "rehearsal: save"
        path = save_checkpoint(owner, scratch, 0, {"rehearsal": True})
        if owner.rank == 0:
            shutil.rmtree(path.parent.parent, ignore_errors=True)
    finally:
        course.wishes = wishes
    course.engine.forget()
    restore_all(kept, device)
    course.phase = ""
    return longest


def replace_wishes(course: Course) -> Any:
    """Nobody stops in a rehearsal: what was wished for counts from the first step."""
    return type(course.wishes)()
