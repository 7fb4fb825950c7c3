"""Sums up the results of single questions: scores by task and length, heat map, effective lengths, comparisons."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from ulysses_cli.evaluate.statistics import (
    RULER_TASKS,
    compare_pairs,
    estimate_mean,
    estimate_mean_of_tasks,
    find_effective_lengths,
    weigh_mean,
)

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
