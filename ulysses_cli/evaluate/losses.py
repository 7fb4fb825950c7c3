"""Loss by position on documents: buckets of positions, means over documents with intervals, paired differences.

Every document of a length is cut to exactly that length. So all buckets hold the same documents, and a difference
between two buckets is one of position.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ulysses_cli.evaluate.statistics import Interval, estimate_normal_mean

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
        _describe(bucket, estimate_normal_mean(losses), len(losses))
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
            rows.append(_describe(bucket, estimate_normal_mean(changes), len(changes)))
    return rows


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


def _describe(bucket: Bucket, interval: Interval, number: int) -> dict[str, Any]:
    length, first, end = bucket
    low, high = (value if math.isfinite(value) else None for value in interval[1:])
    return {
        "length": length, "from": first, "to": end, "n": number, "loss": interval.mean, "low": low, "high": high
    }  # fmt: skip
