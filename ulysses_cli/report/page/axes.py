"""Maps values to places on a chart, and chooses round ticks for an axis. Knows numbers and units, not SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ulysses_cli.plan.units import BINARY_SUFFIXES, SI_SUFFIXES, format_bytes, pick_scale
from ulysses_cli.report.quantities import (
    LARGEST,
    format_binary,
    format_number,
    trim_zeros,
)

LONGEST_TICK = 11
SMALLEST = 1e-290  # the smallest value on a logarithmic axis: smaller floats are no longer exact


@dataclass(frozen=True)
class Axis:
    """Maps `low` to pixel `start` and `high` to pixel `end`. Ticks are (value, text), in rising order."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool
    ticks: tuple[tuple[float, str], ...]

    def place(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log2(value), math.log2(low), math.log2(high)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def make_axis(
    values: Iterable[float],
    start: float,
    end: float,
    unit: str = "",
    *,
    is_log: bool = False,
    num_ticks: int = 5,
    is_whole: bool = False,
    padding: float = 0.0,
    from_zero: bool = False,
) -> Axis:
    """`padding` is the free share at both ends. A linear axis with padding starts at zero if the lowest value is less
    than a quarter of the highest."""
    numbers = list(values)
    if not numbers:
        return Axis(1.0, 2.0, start, end, is_log, ())
    low, high = min(numbers), max(numbers)
    if is_log:
        low, high = (low / 1.5, high * 1.5) if high <= low * (1 + 1e-9) else (low, high)
        spread = 2.0 ** ((math.log2(high) - math.log2(low)) * padding)
        low, high = max(low / spread, SMALLEST / 1e9), min(high * spread, LARGEST)
        return Axis(low, high, start, end, True, _make_log_ticks(low, high, unit, num_ticks))
    if from_zero or (padding and 0 < low < high / 4):
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= max(abs(low), abs(high)) * 1e-9 or high - low < 1e-290:
        room = max(abs(high) * 1e-6, 1.0) if is_whole else max(abs(high) * 0.05, 1e-6) if high else 1.0
        low, high = (low if low == 0 else low - room), high + room
    room = (high - low) * padding
    low, high = (low if low == 0 else low - room), (high if high == 0 else high + room)
    return Axis(low, high, start, end, False, _make_linear_ticks(low, high, unit, num_ticks, is_whole))


def _make_linear_ticks(
    low: float, high: float, unit: str, num_ticks: int, is_whole: bool
) -> tuple[tuple[float, str], ...]:
    largest = max(abs(low), abs(high))
    scale, suffix = _pick_tick_scale(largest, unit)
    step = _round_step((high - low) / scale / num_ticks)
    if is_whole and scale == 1:
        step = max(1.0, step)
    first, last = math.ceil(low / scale / step - 1e-9), math.floor(high / scale / step + 1e-9)
    numbers = [index * step for index in range(first, last + 1)]
    texts = _format_ticks(numbers, step)
    return tuple(
        (number * scale, text + suffix if number else "0")
        for place, (number, text) in enumerate(zip(numbers, texts, strict=True))
        if text not in texts[:place]
    )


def _format_ticks(numbers: list[float], step: float) -> list[str]:
    """Formats ticks with as many decimals as the step has, or with powers of ten if that would be too long. Uses more
    digits if two ticks would have the same text."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    texts = [f"{number:,.{min(decimals, 20)}f}" for number in numbers]
    if max(map(len, texts), default=0) > LONGEST_TICK or max(map(abs, numbers), default=1) < 1e-3:
        texts = [format_number(number) for number in numbers]
    return texts if len(set(texts)) == len(texts) else [f"{number:.7g}" for number in numbers]


def _pick_tick_scale(largest: float, unit: str) -> tuple[float, str]:
    """One scale for all ticks of an axis, so that they are easy to compare."""
    if unit == "bytes":
        scale, suffix = pick_scale(largest, BINARY_SUFFIXES)
        return scale, f" {suffix}B"
    if unit == "seconds":
        return next(
            (scale, suffix)
            for least, scale, suffix in ((7200, 3600.0, " h"), (120, 60.0, " min"), (1, 1.0, " s"), (0, 1e-3, " ms"))
            if largest >= least
        )
    if unit == "share":
        return 0.01, "%"
    scale, suffix = pick_scale(largest, SI_SUFFIXES) if 9_999.5 <= largest < 1e15 else (1.0, "")
    return scale, suffix


def _round_step(rough: float) -> float:
    """Rounds up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))


def _make_log_ticks(low: float, high: float, unit: str, num_ticks: int) -> tuple[tuple[float, str], ...]:
    base = 2.0 if unit in ("tokens", "bytes") else 10.0
    first = math.ceil(math.log(low, base) - 1e-9)
    last = math.floor(math.log(high, base) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / (num_ticks + 1)))
    ticks = [base**power for power in range(first, last + 1, stride)]
    if base == 10 and len(ticks) < 3:
        powers = range(first - 1, last + 1)
        ticks = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
        ticks = [value for value in ticks if low <= value <= high]
    if len(ticks) < 2:
        return _make_linear_ticks(low, high, unit, num_ticks, False)
    return tuple((value, _format_log_tick(value, unit)) for value in ticks)


def _format_log_tick(value: float, unit: str) -> str:
    if unit == "tokens" and 1 <= value < 2.0**50:
        return format_binary(value)
    if unit == "bytes" and 1 <= value < 2.0**60:
        number, _, suffix = format_bytes(value).partition(" ")
        return f"{trim_zeros(number)} {suffix}"
    return format_number(value)
