"""Which layout of an sp group is faster than the one that is asked for: the legal rings and what a ring gains, and
the layout that keeps rows inside machines. Changes no recipe and settles no levers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ulysses_cli.plan.attention import BACK_ENDS
from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.layout import Layout, count_near_ranks, list_divisors
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.planner.candidates import Candidate
from ulysses_cli.plan.planner.fit import fits
from ulysses_cli.plan.planner.lever_choice import choose_for_job
from ulysses_cli.plan.resolved import explain_heads, find_ring_size
from ulysses_cli.plan.speed import compute_speed

MAX_RING = 8  # shares of a row's queries in a plan
RING_GAIN = 0.01  # of the time: what another ring than that of ring_size: auto must gain


def list_sp_layouts(shape: ModelShape, num_gpus: int, sp_size: int) -> list[Layout]:
    """One replica, with each ring that leaves ranks which divide the heads, the smallest first."""
    rings = [size for size in shape.list_ring_sizes(sp_size) if size <= MAX_RING]
    return [Layout(1, num_gpus // sp_size, sp_size, size) for size in rings or [1]]


def keep_rings_that_win(plans: Sequence[Candidate]) -> list[Candidate]:
    """Of layouts that differ in their ring alone, that of `auto` if it is about as fast as the fastest, else the
    smallest that is."""
    kept: dict[tuple[str, Layout], list[Candidate]] = {}
    for plan in plans:
        kept.setdefault((plan.gpu.key, forget_ring(plan.job.layout)), []).append(plan)
    best = []
    for alike in kept.values():
        fastest = min(alike, key=lambda plan: plan.speed.step_seconds)
        best.append(min((plan for plan in alike if not is_slower(plan, fastest)), key=rank_ring))
    return best


def is_slower(plan: Candidate, other: Candidate) -> bool:
    """By as much as a ring must gain."""
    return plan.speed.step_seconds * (1 - RING_GAIN) > other.speed.step_seconds


def may_win(layout: Layout, plan: Candidate) -> bool:
    """Whether another ring gains enough with the plan's levers. What layers save, and what of it leaves the GPU, is the
    same on any ring."""
    own = plan.job.with_levers(replace(plan.job.levers, offloaded_layers=0))
    mine, other = (compute_speed(job, plan.gpu).step_seconds for job in (own, change_ring(own, layout)))
    return other <= (1 - RING_GAIN) * mine


def change_ring(job: Job, layout: Layout) -> Job:
    """With no more chunks of heads than its ranks have."""
    heads = job.shape.num_heads // layout.ulysses_size
    chunks = max(each for each in list_divisors(heads) if each <= job.levers.head_chunks)
    return replace(job, layout=layout, levers=replace(job.levers, head_chunks=chunks))


def forget_ring(layout: Layout) -> Layout:
    return replace(layout, ring_size=1)


def rank_ring(plan: Candidate) -> tuple[bool, int]:
    layout = plan.job.layout
    usual = find_ring_size(plan.job.shape, layout.sp_size, plan.job.gpus_per_node)
    return layout.ring_size != usual, layout.ring_size


def explain_rings(shown: Iterable[Candidate], tried: Sequence[Candidate]) -> list[str]:
    """What each ring that is shown gains over heads alone and over the best other ring of the same ranks. Where no
    ring is shown, none gains enough."""
    lines = list[str]()
    for plan in shown:
        layout = plan.job.layout
        if layout.ring_size == 1:
            continue
        alike = (each for each in tried if each.gpu.key == plan.gpu.key and each.job.layout != layout)
        rivals = [each for each in alike if forget_ring(each.job.layout) == forget_ring(layout)]
        lines.append(f"{plan.job.world_size} x {plan.gpu.key}: {_explain_gains(plan, rivals)}")
    return list(dict.fromkeys(lines))


def _explain_gains(plan: Candidate, rivals: Sequence[Candidate]) -> str:
    alone = next((each for each in rivals if each.job.layout.ring_size == 1), None)
    fitting = [each for each in rivals if each.fit.verdict == "fits"]
    if alone is None:
        gains = [explain_heads(plan.job.shape, plan.job.layout)]
    else:
        gains = [_compare(plan, alone) if alone in fitting else f"{_name_ring(alone.job.layout)} does not fit"]
    others = [each for each in fitting if each is not alone]
    nearest = min(others, key=lambda each: each.speed.step_seconds, default=None)
    if nearest is not None and plan.speed.step_seconds <= (1 - RING_GAIN) * nearest.speed.step_seconds:
        gains.append(_compare(plan, nearest))
    return f"{_name_ring(plan.job.layout)}: {'; '.join(gains)}"


def _compare(plan: Candidate, rival: Candidate) -> str:
    return _compare_seconds(plan.speed.step_seconds, rival.speed.step_seconds, rival.job.layout)


def _compare_seconds(own: float, other: float, layout: Layout) -> str:
    change = own / other - 1
    return f"{abs(change):.1%} {'less' if change <= 0 else 'more'} time than {_name_ring(layout)}"


def explain_own_ring(job: Job, gpu: Gpu) -> str:
    """What the ring of a job gains over heads alone with the same levers, or why it is needed; '' without a ring."""
    layout = forget_ring(job.layout)
    if layout == job.layout:
        return ""
    if needed := explain_heads(job.shape, job.layout):
        return needed
    alone = replace(job, layout=layout)
    if (job.shape.num_heads // layout.ulysses_size) % job.levers.head_chunks:
        return f"{_name_ring(layout)} has too few heads on a rank for {job.levers.head_chunks} chunks"
    if not fits(alone, gpu):
        return f"{_name_ring(layout)} does not fit with these levers"
    return _compare_seconds(compute_speed(job, gpu).step_seconds, compute_speed(alone, gpu).step_seconds, layout)


def _name_ring(layout: Layout) -> str:
    return f"ring {layout.ring_size} x {layout.ulysses_size}" if layout.ring_size > 1 else f"ulysses {layout.sp_size}"


@dataclass(frozen=True)
class BetterRing:
    """Another ring for the ranks of a job, with the same levers but for `head_chunks`, where its ranks have too few
    heads for those of the job. `gain`: the share of the time that it saves; None: the job does not fit, and with this
    ring it does."""

    size: int
    gain: float | None
    head_chunks: int | None = None


def find_better_ring(job: Job, gpu: Gpu) -> BetterRing | None:
    """The fastest other ring that fits and that the recipe's attention kernel serves, if it gains enough or the job's
    own does not fit."""
    own, found = compute_speed(job, gpu).step_seconds, list[tuple[float, int, int]]()
    takes_rings = job.kernel == "auto" or BACK_ENDS[job.kernel].takes_more_keys
    for size in job.shape.list_ring_sizes(job.layout.sp_size):
        layout = replace(job.layout, ring_size=size)
        if size > (MAX_RING if takes_rings else 1) or layout == job.layout:
            continue
        tried = change_ring(job, layout)
        if fits(tried, gpu):
            found.append((compute_speed(tried, gpu).step_seconds, size, tried.levers.head_chunks))
    if not found:
        return None
    seconds, size, chunks = min(found)
    fewer = chunks if chunks != job.levers.head_chunks else None
    if not fits(job, gpu):
        return BetterRing(size, None, fewer)
    return BetterRing(size, 1 - seconds / own, fewer) if seconds <= (1 - RING_GAIN) * own else None


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
    choice, _ = choose_for_job(tried, gpu, open_names)
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
        if size >= own.sp_size or rest or job.max_length % size or not job.shape.list_ring_sizes(size):
            continue
        ring = find_ring_size(job.shape, size, per_node)
        if ring == 1 or takes_rings:
            return Layout(own.dp_replicate_size, shards, size, ring)
    return None
