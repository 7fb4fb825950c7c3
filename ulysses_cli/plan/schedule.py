"""What a run decides by its step and its evaluations: the learning rate of each step, which checkpoint is the best,
and whether a run that no longer gets better ends. Pure functions: there is no state to save. The schedules are
those of transformers by its names, with its numbers, but for the first step of a warm-up."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ulysses_cli.plan.units import format_count

FIRST = 0.5  # where in a warm-up its first step stands; transformers' stands at 0, and changes no weight
Share = Callable[[int], float]  # from a step (0, 1, ...) to a share of the highest rate


def make_share(name: str, num_steps: int, warmup: int, numbers: Mapping[str, float], peak: float) -> Share:
    """`numbers` are those that the recipe gives for the schedule; some are rates. `peak` is the highest."""
    after = _AFTER_WARMUP[name](num_steps, warmup, numbers, peak)
    if name == "constant":
        return after
    lowest = numbers.get("min_lr_ratio", 0.0)  # a warm-up of warmup_stable_decay begins there

    def share(step: int) -> float:
        if step < warmup:
            return max(step, FIRST) / warmup * (1.0 - lowest) + lowest
        return after(step)

    return share


def _make_constant(num_steps: int, warmup: int, numbers: Mapping[str, float], peak: float) -> Share:
    return lambda step: 1.0


def _make_linear(num_steps: int, warmup: int, numbers: Mapping[str, float], peak: float) -> Share:
    return lambda step: max(0.0, (num_steps - step) / max(1, num_steps - warmup))


def _make_cosine(num_steps: int, warmup: int, numbers: Mapping[str, float], peak: float) -> Share:
    """Cosine, with or without a lowest rate."""
    lowest = numbers["min_lr"] / peak if "min_lr" in numbers and peak else numbers.get("min_lr_rate", 0.0)
    wave = _make_wave(numbers)
    return lambda step: max(0.0, wave((step - warmup) / max(1, num_steps - warmup)) * (1.0 - lowest) + lowest)


def _make_polynomial(num_steps: int, warmup: int, numbers: Mapping[str, float], peak: float) -> Share:
    lowest = numbers.get("lr_end", POLYNOMIAL_END) / peak if peak else 0.0
    power, num_falling = numbers.get("power", 1.0), max(1, num_steps - warmup)

    def share(step: int) -> float:
        left = max(0.0, 1 - (step - warmup) / num_falling)
        return (1.0 - lowest) * math.pow(left, power) + lowest

    return share


def _make_inverse_sqrt(num_steps: int, warmup: int, numbers: Mapping[str, float], peak: float) -> Share:
    timescale = int(numbers.get("timescale", 0)) or warmup or 10_000
    return lambda step: 1.0 / math.sqrt((step + timescale - warmup) / timescale)


def _make_warmup_stable_decay(num_steps: int, warmup: int, numbers: Mapping[str, float], peak: float) -> Share:
    num_falling = int(numbers["num_decay_steps"])
    num_stable = int(numbers.get("num_stable_steps", num_steps - warmup - num_falling))
    lowest, wave = numbers.get("min_lr_ratio", 0.0), _make_wave(numbers)
    start = warmup + num_stable

    def share(step: int) -> float:
        if step < start:
            return 1.0
        if step < start + num_falling:
            return max(0.0, wave((step - start) / max(1, num_falling)) * (1.0 - lowest) + lowest)
        return lowest

    return share


def _make_wave(numbers: Mapping[str, float]) -> Callable[[float], float]:
    """A cosine from 1 to 0; more than half a cycle makes it rise again."""
    num_cycles = numbers.get("num_cycles", 0.5)
    return lambda progress: 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))


POLYNOMIAL_END = 1e-7
_AFTER_WARMUP: dict[str, Callable[[int, int, Mapping[str, float], float], Share]] = {
    "constant": _make_constant,
    "constant_with_warmup": _make_constant,
    "linear": _make_linear,
    "cosine": _make_cosine,
    "cosine_with_min_lr": _make_cosine,
    "polynomial": _make_polynomial,
    "inverse_sqrt": _make_inverse_sqrt,
    "warmup_stable_decay": _make_warmup_stable_decay,
}


LOSS_MEASURE, SCORE_MEASURE, ACCURACY_MEASURE = "eval_loss", "eval_suite", "eval_rewards/accuracies"
Measured = Mapping[str, Mapping[int, float]]  # by measure and step; lower is better


@dataclass(frozen=True)
class Measure:
    """What run.keep_best may name: `key` of the lines of a run's `file`, kept in a checkpoint's state under
    `state_key`. Of a score the highest is the best."""

    title: str
    key: str
    state_key: str
    file: str = "eval.jsonl"
    is_score: bool = True

    def order(self, value: float) -> float:
        """Turns a score around, so that lower is better, as with a loss, and turns it back."""
        return -value if self.is_score else value

    def read(self, line: Mapping[str, Any]) -> float | None:
        """What a line says, so that lower is better; infinity where that is no finite number. None: nothing."""
        if self.key not in line:
            return None
        value = line[self.key]
        is_known = isinstance(value, int | float) and abs(value) <= sys.float_info.max
        return self.order(float(value)) if is_known else math.inf


MEASURES: Mapping[str, Measure] = {
    LOSS_MEASURE: Measure("evaluation loss", "loss", "eval_losses", is_score=False),
    SCORE_MEASURE: Measure("eval_suite score", "score", "eval_scores", "quality.jsonl"),
    ACCURACY_MEASURE: Measure(ACCURACY_MEASURE, "rewards/accuracies", "eval_accuracies"),
    "eval_rewards/margins": Measure("eval_rewards/margins", "rewards/margins", "eval_margins"),
}


def name_measure(measure: str | None) -> str:
    return "the score of eval_suite" if measure == SCORE_MEASURE else MEASURES[measure or LOSS_MEASURE].title


def describe_measure(measure: str | None, value: float) -> str:
    """`evaluation loss 1.5` or `eval_suite score 0.75`."""
    known = MEASURES[measure or LOSS_MEASURE]
    return f"{known.title} {known.order(value):.4g}"


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
