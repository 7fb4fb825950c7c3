"""Intervals, effective lengths and paired differences of scores. Numbers in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import NamedTuple

from ulysses_cli.evaluate.words import read_words

Z = 1.959964  # 95 % of a normal distribution
RULER_THRESHOLD = 0.856  # the mean of RULER's 13 tasks that a length must exceed
OWN_SHARE = 0.85  # of the score at the shortest length
RULER_TASKS = read_words(
    "niah_single_1 niah_single_2 niah_single_3 niah_multikey_1 niah_multikey_2 niah_multikey_3 niah_multivalue "
    "niah_multiquery vt cwe fwe qa_1 qa_2"
)


class Interval(NamedTuple):
    mean: float
    low: float
    high: float


def estimate_mean(scores: Sequence[float]) -> Interval:
    """Returns the mean of scores in [0, 1] with Wilson's 95 % interval, which holds for few samples and at the ends.
    For scores between 0 and 1 it is too wide rather than too narrow."""
    return _compute_wilson(fmean(scores), len(scores))


def _compute_wilson(mean: float, number: float) -> Interval:
    spread = Z * math.sqrt(mean * (1 - mean) / number + Z * Z / (4 * number * number))
    centre, scale = mean + Z * Z / (2 * number), 1 + Z * Z / number
    return Interval(mean, max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale))


def compare_pairs(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Returns the mean of the differences of the same questions with a 95 % interval: Agresti and Min's, which counts
    half a question that got better and half a one that got worse on top. It holds where few answers differ, or none."""
    differences = [new - old for old, new in zip(before, after, strict=True)]
    mean, number = fmean(differences), len(differences) + 2
    centre = sum(differences) / number
    spread = Z * math.sqrt(((math.fsum(each * each for each in differences) + 1) / number - centre * centre) / number)
    return Interval(mean, max(-1.0, min(mean, centre - spread)), min(1.0, max(mean, centre + spread)))


def estimate_normal_mean(values: Sequence[float]) -> Interval:
    """Returns the mean of values without bounds, with Student's 95 % interval. One value has no interval: its ends are
    infinite."""
    number, mean = len(values), fmean(values)
    if number == 1:
        return Interval(mean, -math.inf, math.inf)
    variance = math.fsum((value - mean) ** 2 for value in values) / (number - 1)
    spread = find_student_quantile(number - 1) * math.sqrt(variance / number)
    return Interval(mean, mean - spread, mean + spread)


@cache
def find_student_quantile(freedom: int, share: float = 0.95) -> float:
    """Returns t such that a variable of Student's distribution lies in [-t, t] with probability `share`."""
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / sqrt(freedom)
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if _compute_student_share(middle, freedom) < share else (low, middle)
    return math.tan(high) * math.sqrt(freedom)


def _compute_student_share(angle: float, freedom: int) -> float:
    """The probability of [-t, t], by the finite sum for whole degrees of freedom (Abramowitz and Stegun 26.7.3, 4)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (cosine if freedom % 2 else 1.0), 0.0
    for step in range(freedom // 2):
        total += term
        term *= cosine * cosine * (2 * step + 1 + freedom % 2) / (2 * step + 2 + freedom % 2)
    return 2 / math.pi * (angle + sine * total) if freedom % 2 else sine * total


def estimate_mean_of_tasks(means: Sequence[float], numbers: Sequence[int]) -> Interval:
    """Returns the unweighted mean over tasks with a 95 % interval, from each task's mean and number of samples:
    Wilson's for as many samples as give a mean of such weights the same variance. Tasks differ, so that it is rather
    too wide."""
    weight = sum(1 / number for number in numbers)
    return _compute_wilson(fmean(means), len(means) ** 2 / weight)


def find_effective_lengths(means: Mapping[str, Mapping[int, float]]) -> dict[str, int | None]:
    """Takes the mean score of tasks from a seed by task and length. Returns `ruler`, where all of RULER's thirteen
    tasks were run: the longest length up to which their mean exceeds 85.6 %; and `own`: the longest up to which the
    mean of all tasks is 85 % of that at the shortest length. None where no length qualifies. Other tasks do not matter
    for RULER's rule; lengths that some task lacks do not count for the rule that needs it."""
    result: dict[str, int | None] = {}
    if set(RULER_TASKS) <= means.keys() and (curve := _average({name: means[name] for name in RULER_TASKS})):
        result["ruler"] = _find_longest(curve, RULER_THRESHOLD)
    if curve := _average(means):
        first = next(iter(curve.values()))
        result["own"] = _find_longest(curve, OWN_SHARE * first) if first else None
    return result


def _average(means: Mapping[str, Mapping[int, float]]) -> dict[int, float]:
    """The mean over tasks by length, for the lengths that all of them have, the shortest first."""
    common = set.intersection(*(set(by_length) for by_length in means.values())) if means else set[int]()
    return {length: fmean(by_length[length] for by_length in means.values()) for length in sorted(common)}


def _find_longest(curve: Mapping[int, float], threshold: float) -> int | None:
    longest = None
    for length, mean in curve.items():
        if mean <= threshold:
            break
        longest = length
    return longest


def weigh_mean(curve: Mapping[int, float]) -> float:
    """The mean over lengths with weights 1, 2, 3, ...: longer lengths count more."""
    weights = range(1, len(curve) + 1)
    return sum(weight * curve[length] for weight, length in zip(weights, sorted(curve), strict=True)) / sum(weights)
