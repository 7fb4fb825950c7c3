"""The layout that keeps rows inside machines, for a job whose rows leave them, and what it is predicted to take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ulysses_cli.plan.attention import BACK_ENDS
from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.layout import Layout, count_near_ranks, list_divisors
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.planner.lever_choice import choose_for_job
from ulysses_cli.plan.resolved import find_ring_size
from ulysses_cli.plan.speed import compute_speed


@dataclass(frozen=True)
class LayoutInside:
    """`seconds`: for as many tokens as a step of the job has, which takes `own_seconds`. `rows_per_step`: of this
    layout and of the job's own."""

    layout: Layout
    accumulation: int
    seconds: float
    own_seconds: float
    rows_per_step: tuple[int, int]


def find_layout_inside(job: Job, gpu: Gpu, base: Job, open_names: list[str]) -> LayoutInside | None:
    """The layout whose rows stay inside machines, if it fits; None where no row of the job leaves its machine. `base`:
    the job before its levers were chosen. Accumulation shrinks, where it can, so that a step keeps its rows."""
    own, per_node = job.layout, gpu.gpus_per_node
    if own.world_size <= per_node or count_near_ranks(own.sp_size, per_node) == own.sp_size:
        return None
    layout = _find_largest(job, per_node)
    if layout is None:
        return None
    kept, rest = divmod(job.accumulation * own.dp_size, layout.dp_size)
    tried = replace(base, layout=layout, accumulation=kept if kept and not rest else job.accumulation)
    choice = choose_for_job(tried, gpu, open_names)
    if choice.fit is None or choice.fit.verdict != "fits":
        return None
    rows, own_rows = tried.accumulation * layout.dp_size, job.accumulation * own.dp_size
    seconds = compute_speed(replace(tried, levers=choice.levers), gpu).step_seconds * own_rows / rows
    own_seconds = compute_speed(job, gpu).step_seconds
    return LayoutInside(layout, tried.accumulation, seconds, own_seconds, (rows, own_rows))


def _find_largest(job: Job, per_node: int) -> Layout | None:
    """Of the layouts of the same ranks and replicas whose rows stay inside machines, that with the most ranks for each
    row; with fewer, a rank holds more tokens and needs more memory."""
    own, takes_rings = job.layout, job.kernel == "auto" or BACK_ENDS[job.kernel].takes_more_keys
    for size in reversed(list_divisors(per_node)):
        shards, rest = divmod(own.world_size, own.dp_replicate_size * size)
        if size >= own.sp_size or rest or job.row_tokens % size or not job.shape.list_ring_sizes(size):
            continue
        ring = find_ring_size(job.shape, size, per_node)
        if ring == 1 or takes_rings:
            return Layout(own.dp_replicate_size, shards, size, ring)
    return None
