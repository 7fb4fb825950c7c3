"""Files with one JSON object per line: metrics.jsonl, eval.jsonl.

Each line is written to disk at once. After a crash, readers take the complete lines, and a resumed run cuts the rest.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ulysses_cli.plan.files.regular_files import open_own, open_regular
from ulysses_cli.plan.files.whole_files import write_whole
from ulysses_cli.plan.models.model_choice import invert_score


class LineFile:
    """Writes one JSON object per line, at once. NaN and infinity become null, because JSON has neither. Bytes that a
    full disk refuses wait for the next line: a run that continues without room for its checkpoints continues here too.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.waiting = path, b""
        self._open()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.handle = open_own(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    @property
    def is_gone(self) -> bool:
        """Whether the file was removed."""
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
    """On resume: removes steps that will be done again, so that each appears once, and a torn last line."""
    if not path.exists():
        return
    write_whole(path, "".join(f"{line}\n" for _, line in _read_lines(path, last_step)))


def read_lines(path: Path, last_step: int) -> Iterator[dict[str, Any]]:
    """The lines of the steps up to `last_step`."""
    return (json.loads(line) | {"step": step} for step, line in _read_lines(path, last_step))


def has_diverged(path: Path) -> bool:
    """Whether the loss was far above its past when the run ended, as its metrics say."""
    return next(
        (bool(line["diverged"]) for line in reversed([*read_lines(path, sys.maxsize)]) if "diverged" in line), False
    )


def find_last_step(path: Path, last_step: int) -> int:
    """The newest step up to `last_step` that has a line in the file, -1 for none."""
    return max((step for step, _ in _read_lines(path, last_step)), default=-1)


def read_eval_losses(path: Path, last_step: int) -> dict[int, float]:
    """The evaluation losses by step up to `last_step`; infinity stands for one that was not finite. The base model's,
    of step 0, is left out: the run has not trained it."""
    lines = {step: json.loads(line).get("loss") for step, line in _read_lines(path, last_step) if step}
    return {step: float(loss) if isinstance(loss, int | float) else math.inf for step, loss in lines.items()}


def read_eval_lacks(path: Path, last_step: int) -> dict[int, float]:
    """What the scores of quality.jsonl lack to 1, by step up to `last_step`."""
    scores = {step: json.loads(line).get("score") for step, line in _read_lines(path, last_step)}
    return {step: invert_score(score) for step, score in scores.items() if isinstance(score, int | float)}


def _read_lines(path: Path, last_step: int) -> Iterator[tuple[int, str]]:
    """(step, line) of each complete line up to `last_step`."""
    if not path.exists():
        return
    with open_regular(path) as stream:
        text = stream.read().decode("utf-8", errors="replace")
    for line in text.splitlines():
        try:
            if (step := int(json.loads(line)["step"])) <= last_step:
                yield step, line
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
