"""Turns measured steps into the rates that the estimator then uses for this kind of GPU. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.speed import compute_speed
from ulysses_cli.prove.bench.speed import Timed

# The parts of a step that each rate is derived from; a rate is a share of the datasheet's number.
PARTS_OF_RATE = {
    "matmul": ("projections", "mlp", "head_loss"),
    "memory": ("other",),
    "link": ("exchange",),
}
LEAST_SHARE, LEAST_SECONDS = 0.02, 1e-4


def calibrate(measured: Sequence[tuple[Job, Timed]], gpu: Gpu) -> dict[str, Any]:
    """A table in the form of hardware.yaml that overrides the rates of this kind of GPU; {} when nothing was measured.
    Each rate is the median over the measured steps."""
    rates: dict[str, Any] = {}
    shares = {}
    for rate, parts in PARTS_OF_RATE.items():
        ratio = _find_ratio(measured, gpu, parts)
        if ratio is not None:
            shares[rate] = _bound(getattr(gpu.efficiency, rate) * ratio)
    if shares:
        rates["efficiency"] = shares
    ratio = _find_ratio(measured, gpu, ("attention",))
    if ratio is not None:
        rates["attention"] = [_bound(gpu.attention_forward * ratio), _bound(gpu.attention_backward * ratio)]
    return {"gpus": {gpu.key: rates}} if rates else {}


def _find_ratio(measured: Sequence[tuple[Job, Timed]], gpu: Gpu, parts: Sequence[str]) -> float | None:
    """Median of predicted / measured seconds; None where no step spent long enough in these parts."""
    ratios = []
    for job, timed in measured:
        predicted = compute_speed(job, gpu).parts
        expected, seconds = sum(predicted[part] for part in parts), sum(timed.parts.get(part, 0.0) for part in parts)
        if expected > LEAST_SECONDS and seconds > LEAST_SECONDS:
            ratios.append(expected / seconds)
    return statistics.median(ratios) if ratios else None


def _bound(share: float) -> float:
    return round(min(1.0, max(LEAST_SHARE, share)), 4)
