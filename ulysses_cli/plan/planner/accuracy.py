"""How far a predicted speed may be from the truth: by its errors for published runs, and by the host, which the speed
model leaves out. No GPU has measured a prediction of this tool.
"""

from __future__ import annotations

from dataclasses import dataclass

from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.speed import Speed

# The worst errors of predicted tokens/s for published runs of other programs (benchmarks/published.py), too low and
# too high: on one machine of H100 or A100, and on several machines or with another exchange.
NEAR, FAR = (-0.15, 0.09), (-0.15, 0.56)
COMPARED = ("h100-80gb", "a100-80gb")
# Seconds that a processor takes to launch the kernels of a layer in a micro-step, by ZeRO stage: 24 layers took 266 ms
# at stage 3 and 143 ms at stage 1 on one server.
HOST_LAYER_SECONDS = {1: 0.006, 2: 0.006, 3: 0.011}


@dataclass(frozen=True)
class Accuracy:
    """`low` and `high`: what tokens per second may be, as shares of the predicted. `host_seconds`: of a micro-step,
    where the host launches kernels for longer than the GPU computes; else 0."""

    low: float
    high: float
    reason: str
    host_seconds: float = 0.0
    device_seconds: float = 0.0

    @property
    def is_host_bound(self) -> bool:
        return self.host_seconds > 0


def judge_speed(job: Job, gpu: Gpu, speed: Speed) -> Accuracy:
    """Where the host is the limit, the slow end is its time."""
    on_one = job.world_size <= gpu.gpus_per_node
    too_low, too_high = NEAR if gpu.key in COMPARED and on_one else FAR
    of_what = "published runs on several machines"
    if gpu.key in COMPARED and on_one:
        of_what = "published runs on one machine of this kind"
    elif gpu.key not in COMPARED:
        of_what = "no published run on this kind was compared; those on several machines of others"
    reason = f"{of_what} were predicted {-too_low:.0%} too low to {too_high:.0%} too high"
    low, high = 1 / (1 + too_high), 1 / (1 + too_low)
    in_device = (speed.step_seconds - speed.parts["optimizer"]) / job.accumulation
    on_host = HOST_LAYER_SECONDS[job.zero_stage] * job.shape.num_layers
    if on_host <= in_device:
        return Accuracy(low, high, reason)
    slowest = speed.parts["optimizer"] + on_host * job.accumulation
    return Accuracy(min(low, speed.step_seconds / slowest), high, reason, on_host, in_device)
