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
    find_effective_lengths,
    weigh_mean,
)

NUM_DEPTHS = 10
Result = Mapping[str, Any]
LENGTH_CLASSES = tuple(1024 << at for at in range(12))


def name_length(result: Result) -> int:
    """The length that was asked for; a sample of a file belongs to the next power of two."""
    if result["length"]:
        return int(result["length"])
    tokens = int(result["prompt_tokens"])
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
    scores, means = [], dict[str, dict[int, float]]()
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
                    "empty": sum(not result["answer"].strip() for result in own),
                    "seconds": sum(result["seconds"] for result in own),
                }
            )
            means.setdefault(task, {})[length] = interval.mean
    curve: dict[int, list[float]] = defaultdict(list)
    for scores_by_length in means.values():
        for length, score in scores_by_length.items():
            curve[length].append(score)
    mean_curve = {length: fmean(values) for length, values in sorted(curve.items())}
    is_whole = set(RULER_TASKS) <= means.keys()
    return {
        "scores": scores,
        "mean": [{"length": length, "score": mean, "tasks": len(curve[length])} for length, mean in mean_curve.items()],
        "weighted_mean": weigh_mean(mean_curve) if mean_curve else None,
        "effective_length": find_effective_lengths(means) if means else {},
        "has_all_ruler_tasks": is_whole,
        "heat_map": map_depths(results),
        "too_long": list(too_long),
    }


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
    old = {result["id"]: result for result in before}
    rows = []
    for task, by_length in group_results(result for result in after if result["id"] in old).items():
        for length, own in by_length.items():
            pairs = [(old[result["id"]]["score"], result["score"]) for result in own]
            interval = compare_pairs([first for first, _ in pairs], [second for _, second in pairs])
            rows.append(
                {
                    "task": task,
                    "length": length,
                    "n": len(pairs),
                    "difference": interval.mean,
                    "low": interval.low,
                    "high": interval.high,
                }
            )
    return rows
