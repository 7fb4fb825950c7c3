"""Which ring an sp group takes: the layouts that are legal, those that are faster, and what a ring gains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ulysses_cli.plan.attention import BACK_ENDS
from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.planner.candidates import Candidate
from ulysses_cli.plan.planner.fit import fits
from ulysses_cli.plan.resolved import find_ring_size
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
        kept.setdefault((plan.gpu.key, _forget_ring(plan.job.layout)), []).append(plan)
    best = []
    for alike in kept.values():
        fastest = min(plan.seconds for plan in alike)
        near = (plan for plan in alike if plan.seconds * (1 - RING_GAIN) <= fastest)
        best.append(min(near, key=_rank_ring))
    return best


def _forget_ring(layout: Layout) -> Layout:
    return replace(layout, ring_size=1)


def _rank_ring(plan: Candidate) -> tuple[bool, int]:
    layout = plan.job.layout
    usual = find_ring_size(plan.job.shape, layout.sp_size, plan.job.gpus_per_node)
    return layout.ring_size != usual, layout.ring_size


def explain_rings(shown: Iterable[Candidate], tried: Sequence[Candidate]) -> list[str]:
    """What each ring that is shown gains over the best other layout of the same ranks."""
    lines = list[str]()
    for plan in shown:
        layout = plan.job.layout
        if layout.ring_size == 1:
            continue
        alike = (each for each in tried if each.gpu.key == plan.gpu.key and each.job.layout != layout)
        rivals = [each for each in alike if _forget_ring(each.job.layout) == _forget_ring(layout)]
        fitting = [each for each in rivals if each.fit.verdict == "fits"]
        gain = "no other ring of these ranks fits" if rivals else "no other ring of these ranks divides the heads"
        if fitting:
            rival = min(fitting, key=lambda each: each.seconds)
            change = plan.seconds / rival.seconds - 1
            gain = f"{abs(change):.1%} {'less' if change <= 0 else 'more'} time than {_name_ring(rival)}"
        lines.append(f"{plan.job.world_size} x {plan.gpu.key}: {_name_ring(plan)}: {gain}")
    return list(dict.fromkeys(lines))


def _name_ring(plan: Candidate) -> str:
    layout = plan.job.layout
    return f"ring {layout.ring_size} x {layout.ulysses_size}"


@dataclass(frozen=True)
class BetterRing:
    """Another ring for the ranks of a job, with the same levers. `gain`: the share of the time that it saves; None:
    the job does not fit, and with this ring it does."""

    size: int
    gain: float | None


def find_better_ring(job: Job, gpu: Gpu) -> BetterRing | None:
    """The fastest other ring that fits and that the recipe's attention kernel serves, if it gains enough or the job's
    own does not fit."""
    own, found = compute_speed(job, gpu).step_seconds, list[tuple[float, int]]()
    takes_rings = job.kernel == "auto" or BACK_ENDS[job.kernel].takes_more_keys
    for size in job.shape.list_ring_sizes(job.layout.sp_size):
        layout = replace(job.layout, ring_size=size)
        heads = job.shape.num_heads // layout.ulysses_size
        if size > (MAX_RING if takes_rings else 1) or layout == job.layout or heads % job.levers.head_chunks:
            continue
        tried = replace(job, layout=layout)
        if fits(tried, gpu):
            found.append((compute_speed(tried, gpu).step_seconds, size))
    if not found:
        return None
    seconds, size = min(found)
    if not fits(job, gpu):
        return BetterRing(size, None)
    return BetterRing(size, 1 - seconds / own) if seconds <= (1 - RING_GAIN) * own else None
