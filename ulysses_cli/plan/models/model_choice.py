"""Decides which checkpoint of a run is its best, by evaluations, and when a run that no longer gets better ends.

`losses` holds by step what run.keep_best names: the evaluation loss, or 1 minus the score of run.eval_suite.
Lower is better in both.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from ulysses_cli.plan.nouns import format_count

SCORE = "eval_suite"


def invert_score(score: float) -> float:
    """Returns 1 - score, so that lower is better, as with a loss. The same call turns it back into the score."""
    return 1.0 - score


def name_measure(measure: str | None) -> str:
    return "the score of eval_suite" if measure == SCORE else "evaluation loss"


def describe_measure(measure: str | None, loss: float) -> str:
    """`evaluation loss 1.5` or `eval_suite score 0.75`."""
    return f"eval_suite score {invert_score(loss):.4g}" if measure == SCORE else f"evaluation loss {loss:.4g}"


def describe_stall(measure: str | None, losses: Mapping[int, float], threshold: float, verb: str = "has") -> str:
    """`evaluation loss has not improved by more than 0.1 for 2 evaluations`."""
    margin = f" by more than {threshold:g}" if threshold else ""
    count = format_count(count_without_progress(losses, threshold), "evaluation")
    return f"{name_measure(measure)} {verb} not improved{margin} for {count}"


def choose_best(losses: Mapping[int, float], steps: Collection[int]) -> int | None:
    """Returns the one of `steps` with the lowest loss, the earliest of equal ones. None: no finite loss is known."""
    known = [(losses[step], step) for step in steps if math.isfinite(losses.get(step, math.nan))]
    return min(known)[1] if known else None


def count_without_progress(losses: Mapping[int, float], threshold: float = 0.0) -> int:
    """Returns the number of evaluations since one was lower than all before it by more than `threshold`."""
    lowest, count = math.nan, 0
    for step in sorted(losses):
        loss = losses[step]
        has_progress = math.isfinite(loss) and not loss >= lowest - threshold
        count = 0 if has_progress else count + 1
        lowest = loss if math.isfinite(loss) and not loss >= lowest else lowest
    return count


def has_stalled(losses: Mapping[int, float], patience: int | None, threshold: float) -> bool:
    """Whether a run with these settings of early stopping ends after the last of these evaluations."""
    return patience is not None and count_without_progress(losses, threshold) >= patience
