"""Sums up results: scores by task and length, heat map, effective lengths, loss by position in documents, each with
intervals and paired differences. Numbers in, numbers out.

Every document of a length is cut to exactly that length. So all buckets of positions hold the same documents, and a
difference between two buckets is one of position."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

from ulysses_cli.evaluate.sample import read_words

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
    """Returns t such that a variable of Student's distribution lies in [-t, t] with probability `share`. Computed
    here, since scipy would be a dependency for one number."""
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


TASK = "loss"
FIRST_BOUND = 256
Bucket = tuple[int, int, int]  # length of the documents, first position, one past the last
Line = Mapping[str, Any]


def list_bounds(length: int) -> list[int]:
    """Upper bounds of the buckets of positions: 256, 512, 1024, ...; the last one is the length."""
    bounds = [FIRST_BOUND]
    while bounds[-1] < length:
        bounds.append(bounds[-1] * 2)
    return [*bounds[:-1], length]


def describe_document(
    name: str, source: str, digest: str, length: int, index: int, sums: Sequence[Line]
) -> dict[str, Any]:
    """The line of one document in the results. `sums`: of each bucket the sum of losses and the number of targets."""
    bounds = list_bounds(length)
    total, count = sum(each["sum"] for each in sums), sum(each["tokens"] for each in sums)
    return {
        "id": name,
        "task": TASK,
        "length": length,
        "index": index,
        "prompt_tokens": length,
        "prompt_hash": digest,
        "source": source,
        "loss": total / count if count else None,
        "tokens": count,
        "by_position": [
            {"from": low, "to": high, "loss": each["sum"] / each["tokens"], "tokens": each["tokens"]}
            for low, high, each in zip([0, *bounds[:-1]], bounds, sums, strict=True)
            if each["tokens"]
        ],
    }


def summarize_losses(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """The mean over documents by length and bucket, with a 95 % interval over documents. The bucket of all positions
    comes first. Each document counts once, by the mean loss of its targets in the bucket."""
    return [
        _describe_losses(bucket, estimate_normal_mean(losses), len(losses))
        for bucket, by_name in sorted(_group(lines).items(), key=_order)
        for losses in [list(by_name.values())]
    ]


def compare_losses(before: Iterable[Line], after: Iterable[Line]) -> list[dict[str, Any]]:
    """Paired differences by length and bucket, of the same documents. A difference is `after` minus `before`: below 0,
    `after` is better."""
    old, rows = _group(before), []
    for bucket, by_name in sorted(_group(after).items(), key=_order):
        known = old.get(bucket, {})
        changes = [loss - known[name] for name, loss in by_name.items() if name in known]
        if changes:
            rows.append(_describe_losses(bucket, estimate_normal_mean(changes), len(changes)))
    return rows


def compare_models(losses: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Of models on the same texts: the mean loss of each, and the mean of its differences to the first one, each with
    Student's 95 % interval over texts. Below 0, it is better than the first. `losses`: a loss for each text."""
    first = next(iter(losses.values()))
    rows = []
    for name, own in losses.items():
        row: dict[str, Any] = {"model": name, **_describe_interval("loss", estimate_normal_mean(own))}
        changes = [new - old for old, new in zip(first, own, strict=True)]
        rows.append(row if own is first else row | _describe_interval("difference", estimate_normal_mean(changes)))
    return rows


def _describe_interval(name: str, interval: Interval) -> dict[str, float | None]:
    low, high = (value if math.isfinite(value) else None for value in interval[1:])
    return {name: interval.mean, f"{name}_low": low, f"{name}_high": high}


def _group(lines: Iterable[Line]) -> dict[Bucket, dict[str, float]]:
    """By bucket and document: the mean loss."""
    groups: dict[Bucket, dict[str, float]] = defaultdict(dict)
    for line in lines:
        if line["loss"] is None:
            continue
        groups[line["length"], 0, line["length"]][line["id"]] = line["loss"]
        for part in line["by_position"]:
            groups[line["length"], part["from"], part["to"]][line["id"]] = part["loss"]
    return groups


def _order(item: tuple[Bucket, Any]) -> tuple[int, bool, int]:
    (length, first, end), _ = item
    return length, (first, end) != (0, length), first


def _describe_losses(bucket: Bucket, interval: Interval, number: int) -> dict[str, Any]:
    length, first, end = bucket
    low, high = (value if math.isfinite(value) else None for value in interval[1:])
    return {
        "length": length, "from": first, "to": end, "n": number, "loss": interval.mean, "low": low, "high": high
    }  # fmt: skip


NUM_DEPTHS = 10
Result = Mapping[str, Any]
LENGTH_CLASSES = tuple(1024 << at for at in range(12))


def name_length(result: Result) -> int:
    """The length that was asked for; a sample of a file belongs to the next power of two, of the length that its file
    gives it, or of its tokens here."""
    if result["length"]:
        return int(result["length"])
    tokens = int((result.get("facts") or {}).get("file_length") or result["prompt_tokens"])
    return next((bound for bound in LENGTH_CLASSES if tokens <= bound), tokens)


def group_results(results: Iterable[Result]) -> dict[str, dict[int, list[Result]]]:
    groups: dict[str, dict[int, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        groups[result["task"]][name_length(result)].append(result)
    return {task: dict(sorted(by_length.items())) for task, by_length in groups.items()}


def summarize(results: Sequence[Result], too_long: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The JSON that a program reads. Questions that are too long for the model or the machine are counted, not
    scored."""
    groups = group_results(results)
    scores = []
    for task, by_length in groups.items():
        for length, own in by_length.items():
            interval = estimate_mean([result["score"] for result in own])
            greedy = [result["is_greedy"] for result in own if result["is_greedy"] is not None]
            scores.append(
                {
                    "task": task,
                    "length": length,
                    "n": len(own),
                    "score": interval.mean,
                    "low": interval.low,
                    "high": interval.high,
                    "teacher_forced": fmean(greedy) if greedy else None,
                    "names": fmean(names) if (names := [each["names"] for each in own if "names" in each]) else None,
                    "empty": sum(not result["answer"].strip() for result in own),
                    "seconds": sum(result["seconds"] for result in own),
                }
            )
    curve: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for row in scores:
        curve[row["length"]].append((row["score"], row["n"]))
    mean = [_describe_mean(length, rows) for length, rows in sorted(curve.items())]
    return {
        "scores": scores,
        "mean": mean,
        "weighted_mean": weigh_mean({row["length"]: row["score"] for row in mean}) if mean else None,
        "effective_length": find_effective_lengths(_list_seeded_means(groups)),
        "has_all_ruler_tasks": set(RULER_TASKS) <= groups.keys(),
        "groups": list_groups(results),
        "heat_map": map_depths(results),
        "too_long": list(too_long),
    }


def _describe_mean(length: int, rows: Sequence[tuple[float, int]]) -> dict[str, Any]:
    interval = estimate_mean_of_tasks([score for score, _ in rows], [number for _, number in rows])
    return {
        "length": length, "score": interval.mean, "low": interval.low, "high": interval.high, "tasks": len(rows)
    }  # fmt: skip


def _list_seeded_means(groups: Mapping[str, Mapping[int, Sequence[Result]]]) -> dict[str, dict[int, float]]:
    """By task and length, of questions from a seed and of RULER's own files. Lengths of other files are classes of
    sizes that hold other questions each."""
    means: dict[str, dict[int, float]] = defaultdict(dict)
    for task, by_length in groups.items():
        for length, own in by_length.items():
            if all(result["length"] or (result.get("facts") or {}).get("file_length") for result in own):
                means[task][length] = fmean(result["score"] for result in own)
    return dict(means)


def list_groups(results: Iterable[Result]) -> list[dict[str, Any]]:
    """The mean score of each task by what its files say of a question, such as its difficulty."""
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for result in results:
        for name, value in (result.get("groups") or {}).items():
            groups[result["task"], name, value].append(result["score"])
    rows = []
    for (task, name, value), own in sorted(groups.items()):
        interval = estimate_mean(own)
        ends = {"score": interval.mean, "low": interval.low, "high": interval.high}
        rows.append({"task": task, "by": name, "group": value, "n": len(own), **ends})
    return rows


def map_depths(results: Iterable[Result]) -> list[dict[str, Any]]:
    """The mean score by length and tenth of the prompt in which the evidence lies. A question with evidence at several
    places counts at each."""
    cells: dict[tuple[int, int], list[float]] = defaultdict(list)
    for result in results:
        for depth in {min(NUM_DEPTHS - 1, int(depth * NUM_DEPTHS)) for depth in result["depths"]}:
            cells[name_length(result), depth].append(result["score"])
    return [
        {"length": length, "depth": depth / NUM_DEPTHS, "n": len(own), "score": fmean(own)}
        for (length, depth), own in sorted(cells.items())
    ]


def compare_results(before: Sequence[Result], after: Sequence[Result]) -> list[dict[str, Any]]:
    """Paired differences by task and length: the same questions, by their names."""
    return [
        {"task": task, "length": length, **_compare(pairs)}
        for task, by_length in _pair_results(before, after).items()
        for length, pairs in by_length.items()
    ]


def compare_all(before: Sequence[Result], after: Sequence[Result]) -> dict[str, Any] | None:
    """The paired difference over all questions of all tasks and lengths. Each question counts once. None without
    any."""
    paired = _pair_results(before, after)
    pairs = [pair for by_length in paired.values() for own in by_length.values() for pair in own]
    return _compare(pairs) if pairs else None


def _pair_results(before: Sequence[Result], after: Sequence[Result]) -> dict[str, dict[int, list[tuple[float, float]]]]:
    """By task and length: scores of both models. A question belongs to the length that `after` gives it."""
    old = {result["id"]: result["score"] for result in before}
    groups = group_results(result for result in after if result["id"] in old)
    return {
        task: {length: [(old[each["id"]], each["score"]) for each in own] for length, own in by_length.items()}
        for task, by_length in groups.items()
    }


def _compare(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    old, new = [first for first, _ in pairs], [second for _, second in pairs]
    interval = compare_pairs(old, new)
    own = {"before": sum(old) / len(old), "after": sum(new) / len(new)}
    return {"n": len(pairs), **own, "difference": interval.mean, "low": interval.low, "high": interval.high}
