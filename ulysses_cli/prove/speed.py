"""Steps of the real loop on a rank, timed: the real meter and clock, rows of one document each."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ulysses_cli.data.batching import make_batching
from ulysses_cli.plan.flops import compute_model_flops
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.model_shape import ModelShape
from ulysses_cli.plan.recipe import Recipe
from ulysses_cli.plan.resolved import make_layout
from ulysses_cli.prove.observed import GROUP_TIMEOUT
from ulysses_cli.prove.rows import FullRows
from ulysses_cli.train.build import build
from ulysses_cli.train.groups import make_groups
from ulysses_cli.train.loop import Course, train
from ulysses_cli.train.metrics import Meter
from ulysses_cli.train.stop import StopWishes


@dataclass(frozen=True)
class Timed:
    """Medians over the timed steps; peaks are the worst rank's. `parts`: seconds of one clocked step."""

    step_seconds: float
    fastest_seconds: float
    slowest_seconds: float
    tokens_per_second: float
    tflops: float | None
    mfu: float | None
    peak_memory_bytes: int | None
    host_peak_memory_bytes: int
    loss: float
    parts: dict[str, float] = field(default_factory=dict)
    communication_share: float | None = None

    def describe(self) -> dict[str, Any]:
        total = sum(self.parts.values())
        found: dict[str, Any] = {
            "tokens_per_second": self.tokens_per_second,
            "step_seconds": self.step_seconds,
            "slowest_seconds": self.slowest_seconds,
            "tflops": self.tflops,
            "mfu": self.mfu,
            "peak_memory_bytes": self.peak_memory_bytes,
            "host_peak_memory_bytes": self.host_peak_memory_bytes,
            "communication_share": self.communication_share,
            "exchange_share": self.parts.get("exchange", 0.0) / total if total else None,
            "loss": self.loss,
            "offload_share": self.parts.get("offload", 0.0) / total if total else None,
        }
        return {name: value for name, value in found.items() if value is not None}


def time_steps(
    device: torch.device,
    recipe: Recipe,
    shape: ModelShape,
    levers: Levers,
    peak_tflops: float | None,
    num_warmup: int,
    num_steps: int,
) -> Timed:
    """Collective over all ranks."""
    groups = make_groups(make_layout(recipe), GROUP_TIMEOUT)
    torch.manual_seed(recipe.run.seed)
    total = num_warmup + num_steps
    built = build(recipe, shape, groups, device, total, levers)
    rows, batching = FullRows(recipe.data.max_length, shape.vocab_size), make_batching(recipe, shape)
    lines: list[dict[str, Any]] = []
    meter = Meter(partial(compute_model_flops, shape), peak_tflops, lines.append)
    end = total * batching.rows_per_step
    course = Course(built.engine, groups, rows, batching, total, end, StopWishes())
    course.before, course.after = (meter.start,), (meter.record,)
    train(course)
    timed = [line for line in lines[num_warmup:] if "step_parts" not in line]
    clocked = next((line for line in lines if "step_parts" in line), {})
    seconds = [line["step_seconds"] for line in timed]

    def take(name: str) -> Any:
        values = [line[name] for line in timed if line[name] is not None]
        return statistics.median(values) if values else None

    return Timed(
        step_seconds=statistics.median(seconds),
        fastest_seconds=min(seconds),
        slowest_seconds=max(seconds),
        tokens_per_second=take("tokens_per_second"),
        tflops=take("tflops"),
        mfu=take("mfu"),
        peak_memory_bytes=max((line["peak_memory_bytes"] or 0 for line in lines), default=0) or None,
        host_peak_memory_bytes=max(line["host_peak_memory_bytes"] for line in lines),
        loss=lines[-1]["loss"],
        parts=clocked.get("step_parts", {}),
        communication_share=clocked.get("communication_share"),
    )
