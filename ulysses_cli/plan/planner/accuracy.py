"""How far a predicted speed may be from the truth: by its errors for published runs, and by how processors differ. One
GPU has measured predictions of this tool, for minutes: docs/benchmarks.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.speed import Speed
from ulysses_cli.plan.step_parts import HOST

# The worst errors of predicted tokens/s for published runs of other programs (benchmarks/published.py), too low and
# too high: on one machine of H100 or A100, and on several machines or with another exchange.
NEAR, FAR = (-0.15, 0.08), (-0.15, 0.55)
COMPARED = ("h100-80gb", "a100-80gb")
# How far a processor's time may be from the costs of hardware.yaml, which are a GPU's: cores of servers, and a busy one
# from an idle one, differ by about this factor.
HOST_FACTOR = 1.5


@dataclass(frozen=True)
class Accuracy:
    """`low` and `high`: what tokens per second may be, as shares of the predicted."""

    low: float
    high: float
    reason: str


def judge_speed(job: Job, gpu: Gpu, speed: Speed) -> Accuracy:
    on_one = job.world_size <= gpu.gpus_per_node
    too_low, too_high = NEAR if gpu.key in COMPARED and on_one else FAR
    of_what = "published runs on several machines"
    if gpu.key in COMPARED and on_one:
        of_what = "published runs on one machine of this kind"
    elif gpu.key not in COMPARED:
        of_what = "no published run on this kind was compared; those on several machines of others"
    reason = f"{of_what} were predicted {-too_low:.0%} too low to {too_high:.0%} too high"
    low, high = 1 / (1 + too_high), 1 / (1 + too_low)
    slow, fast = (_exchange_host(job, speed, factor) / speed.step_seconds for factor in (HOST_FACTOR, 1 / HOST_FACTOR))
    return Accuracy(min(low, 1 / slow), max(high, 1 / fast), reason)


def _exchange_host(job: Job, speed: Speed, factor: float) -> float:
    """Seconds of a step on a processor that takes `factor` times as long."""
    waits = job.accumulation * max(0.0, factor * speed.host_seconds - speed.device_seconds)
    return speed.step_seconds - speed.parts[HOST] + waits + (factor - 1) * speed.optimizer_host_seconds
