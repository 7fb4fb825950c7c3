"""Whether a GPU waits for the processor that launches its kernels, and which changes of a recipe help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.ledger import compute_ledger
from ulysses_cli.plan.levers import uses_disk
from ulysses_cli.plan.planner.fit import judge
from ulysses_cli.plan.speed import compute_speed

MORE = 4  # times as many tokens in a micro-step
LEAST_GAIN = 1.05
MOST_NAMED = 3


@dataclass(frozen=True)
class HostRemedy:
    """A change that fits, and how many times as many tokens per second it gives."""

    change: str
    gain: float


@dataclass(frozen=True)
class HostBound:
    """Seconds of a micro-step on both sides, and what helps, the best first."""

    host_seconds: float
    device_seconds: float
    remedies: tuple[HostRemedy, ...]

    def explain(self) -> list[str]:
        """What it is, and what helps."""
        host, device = (format_milliseconds(each) for each in (self.host_seconds, self.device_seconds))
        times = [f"{each.change} ({each.gain:.1f} times the tokens/s)" for each in self.remedies[:MOST_NAMED]]
        helps = ", or ".join(times) or "no change of one key that fits; a faster processor"
        return [
            f"by the host: a processor takes about {host} to launch a micro-step, which the GPU computes in {device}",
            f"what helps: {helps}; longer packed rows help as a larger batch does; there are no CUDA graphs",
        ]


def format_milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


def find_host_bound(job: Job, gpu: Gpu) -> HostBound | None:
    """None where the GPU is the limit."""
    speed, found = compute_speed(job, gpu), list[HostRemedy]()
    if not speed.is_host_bound:
        return None
    for change, tried in _list_changes(job):
        gain = compute_speed(tried, gpu).tokens_per_second / speed.tokens_per_second
        if gain >= LEAST_GAIN and judge(tried, compute_ledger(tried), gpu).verdict == "fits":
            found.append(HostRemedy(change, gain))
    found.sort(key=lambda remedy: -remedy.gain)
    best = {remedy.change.partition(":")[0]: remedy for remedy in reversed(found)}  # of each key
    return HostBound(speed.host_seconds, speed.device_seconds, tuple(each for each in found if each in best.values()))


def _list_changes(job: Job) -> Iterator[tuple[str, Job]]:
    levers, layout = job.levers, job.layout
    yield (
        f"train.per_device_train_batch_size: {MORE * job.batch}",
        replace(job, batch=MORE * job.batch, accumulation=max(1, job.accumulation // MORE)),
    )
    for size in dict.fromkeys((*job.shape.sp_sizes, 1)):
        if size < layout.sp_size and layout.sp_size % size == 0:
            fewer = Layout(layout.dp_replicate_size, layout.dp_shard_size * layout.sp_size // size, size)
            yield f"parallel.sp_size: {size}", replace(job, layout=fewer)
    if (
        job.zero_stage == 3
        and not uses_disk(levers)
        and levers.offload_param == "none"
        and layout.dp_replicate_size == 1
    ):
        yield "parallel.zero_stage: 1", replace(job, zero_stage=1, levers=replace(levers, early_groups=0))
    for words, changed in (
        ("memory.gradient_checkpointing: false", {"gradient_checkpointing": False, "offloaded_layers": 0}),
        ("memory.large_tiles: true", {"large_tiles": True}),
        ("memory.tiled_mlp: false", {"tiled_mlp": False}),
        ("memory.activation_offloading: false", {"offloaded_layers": 0}),
        ("memory.attention_head_chunks: 1", {"head_chunks": 1}),
        ("memory.offload_param: none", {"offload_param": "none"}),
    ):
        if any(getattr(levers, name) != value for name, value in changed.items()):
            yield words, replace(job, levers=replace(levers, **changed))
