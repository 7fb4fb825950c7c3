"""What was measured -> the rates that the estimator takes for this kind of GPU from then on. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.speed import compute_speed
from ulysses_cli.prove.bench.speed import Timed

# Which parts of a step tell which rate; the rate is a share of a datasheet's number.
PARTS_OF_RATE = {
    "matmul": ("projections", "mlp", "head_loss"),
    "memory": ("other",),
    "link": ("exchange",),
}
LEAST_SHARE, LEAST_SECONDS = 0.02, 1e-4


def calibrate(measured: Sequence[tuple[Job, Timed]], gpu: Gpu) -> dict[str, Any]:
    """A table to be laid over the shipped hardware.yaml, about this kind of GPU alone; {} when nothing was measured.
    The median over the rows."""
    found: dict[str, Any] = {}
    shares = {}
    for rate, parts in PARTS_OF_RATE.items():
        ratio = _find_ratio(measured, gpu, parts)
        if ratio is not None:
            shares[rate] = _bound(getattr(gpu.efficiency, rate) * ratio)
    if shares:
        found["efficiency"] = shares
    ratio = _find_ratio(measured, gpu, ("attention",))
    if ratio is not None:
        found["attention"] = [_bound(gpu.attention_forward * ratio), _bound(gpu.attention_backward * ratio)]
    return {"gpus": {gpu.key: found}} if found else {}


def _find_ratio(measured: Sequence[tuple[Job, Timed]], gpu: Gpu, parts: Sequence[str]) -> float | None:
    """Predicted by measured seconds."""
    ratios = []
    for job, timed in measured:
        predicted = compute_speed(job, gpu).parts
        wanted, found = sum(predicted[part] for part in parts), sum(timed.parts.get(part, 0.0) for part in parts)
        if wanted > LEAST_SECONDS and found > LEAST_SECONDS:
            ratios.append(wanted / found)
    return statistics.median(ratios) if ratios else None


def _bound(share: float) -> float:
    return round(min(1.0, max(LEAST_SHARE, share)), 4)
