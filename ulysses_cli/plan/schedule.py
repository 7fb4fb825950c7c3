"""The learning rate of each step, as a share of the highest. Pure functions of the step: there is no state to save.

The schedules are those of transformers by its names, with its numbers, but for the first step of a warm-up. They stand
here because transformers' own import PEFT, bitsandbytes and a compiler, which adds more than a second to the start of
every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

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
