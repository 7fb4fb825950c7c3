"""Says when the loss stays far above its own past. It says so on rank 0 alone and decides nothing: a run goes on.

A loss that rises for a few steps is ordinary. What counts as far is a number of nats: one nat more makes each token
2.7 times less likely, three nats 20 times.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

WINDOW = 16  # steps in a row that tell a lasting rise from noise
MARGIN = 1.0  # nats between all losses of a window and all losses of the best window before
WIDE_MARGIN = 3.0  # nats, where one number or a few stand on a side: the first loss, the last losses
LAST = 3  # losses at the end of a run; also those that show that the loss is back


class LossWatch:
    """`is_high`: whether the loss is far above its past right now."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.warn = warn
        self.last_step: int | None = None
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.num_losses = 0
        self.first = self.ceiling = math.inf  # the first loss; the highest one of the window where that was lowest
        self.ceiling_step = 0
        self.is_high = False

    def start(self, last_step: int, earlier_lines: Iterable[Mapping[str, Any]]) -> None:
        """Takes the run's last step, and the lines of metrics.jsonl of the steps before a resume."""
        self.last_step = last_step
        for line in earlier_lines:
            loss = line.get("loss")
            if isinstance(loss, int | float):
                self._add(line["step"], float(loss))
            self.is_high = bool(line.get("diverged", self.is_high))

    def mark(self, line: dict[str, Any]) -> None:
        """Adds `diverged` to a step's line where `is_high` changes, and says so. Losses that are not finite are left
        to BadSteps. Losses of pairs of answers have other scales: squares, or nats of whole answers."""
        step, loss = line["step"], line.get("loss", math.nan)
        if not math.isfinite(loss) or "rewards/margins" in line:
            return
        self._add(step, loss)
        last = list(self.recent)[-min(LAST, max(1, self.num_losses // 2)) :]
        limit = min(self.first + WIDE_MARGIN, self.ceiling + MARGIN)
        if self.is_high:
            if len(last) == LAST and max(last) <= limit:
                self.is_high = line["diverged"] = False
                self.warn(f"step {step}: the loss is back at {loss:.4g}, near its past ({self._describe_past()})")
            return
        stays = len(self.recent) == WINDOW and min(self.recent) > limit
        if stays or (step == self.last_step and min(last) > min(self.first, self.ceiling) + WIDE_MARGIN):
            self.is_high = line["diverged"] = True
            where, losses = (f"in the last {WINDOW} steps", self.recent) if stays else ("at the end", last)
            self.warn(
                f"step {step}: the loss is {loss:.4g}, far above its past: {min(losses):.4g} or more {where}; "
                f"{self._describe_past()}\n"
                "a learning rate that is too high does this: lower train.learning_rate, or add train.warmup_steps\n"
                "start anew, or resume from a checkpoint that was saved before the rise"
            )

    def _add(self, step: int, loss: float) -> None:
        self.recent.append(loss)
        self.num_losses += 1
        if self.num_losses == 1:
            self.first = loss
        if len(self.recent) == WINDOW and max(self.recent) < self.ceiling:
            self.ceiling, self.ceiling_step = max(self.recent), step

    def _describe_past(self) -> str:
        if self.ceiling <= self.first:
            return f"it was at most {self.ceiling:.4g} in {WINDOW} steps up to step {self.ceiling_step}"
        return f"it was {self.first:.4g} at first"
