"""Memory against row length: a curve for each way to split the same GPUs, with the levers that a run of each length
would choose of those that the recipe leaves open, and one with all levers. What spends memory stays off.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.ledger import compute_ledger
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.planner.fit import Fit, is_indexable, is_tried, try_levers
from ulysses_cli.plan.planner.lever_choice import find_cheapest, list_ranked_levers, list_smallest
from ulysses_cli.plan.planner.search import list_sp_sizes
from ulysses_cli.plan.planner.spending import OFF, SPENDING, stop_spending
from ulysses_cli.plan.resolved import find_ring_size

SHORTEST, NUM_LENGTHS = 4096, 14
MAX_CURVES = 4
FAR_PAST = 1.2  # of a GPU, with the most levers: no other set saves that much more


@dataclass(frozen=True)
class Curve:
    """Peak bytes of a rank at each length, None where a kernel could not index it; whether GPU and host have room."""

    name: str
    peaks: tuple[int | None, ...]
    fits: tuple[bool, ...]


@dataclass(frozen=True)
class LengthSweep:
    """`closed`: tiles that the recipe forbids, and without which longer rows cannot be indexed."""

    lengths: tuple[int, ...]
    curves: tuple[Curve, ...]
    closed: tuple[str, ...] = ()


def compute_sweep(job: Job, gpu: Gpu, open_names: Collection[str] = ()) -> LengthSweep:
    """`open_names`: levers that the recipe leaves open. Those of them that spend memory are off, since a longer row has
    none left; where every lever is on, all that spend memory are off."""
    job = replace(job, levers=replace(job.levers, **{name: getattr(OFF, name) for name in open_names}))
    names = [name for name in open_names if name not in SPENDING]
    lengths = tuple(SHORTEST << power for power in range(NUM_LENGTHS))
    world = job.layout.replica_size
    sizes = [n for n in list_sp_sizes(job.shape, world, None) if job.row_tokens % n == 0]
    sizes = sorted({*sizes[-MAX_CURVES:], job.layout.sp_size})
    curves, closed = [], list[str]()
    for sp_size in sizes:
        ring_size = find_ring_size(job.shape, sp_size, job.gpus_per_node)
        layout = Layout(job.layout.dp_replicate_size, world // sp_size, sp_size, ring_size)
        heads = job.shape.num_heads // layout.ulysses_size
        levers = job.levers if heads % job.levers.head_chunks == 0 else replace(job.levers, head_chunks=1)
        split = replace(job, layout=layout, levers=levers)
        curves.append(_make_curve(f"sp {sp_size} x dp {layout.dp_size}", split, gpu, lengths, names))
        closed += _list_closed(split, curves[-1], lengths, names)
    ring_size = find_ring_size(job.shape, sizes[-1], job.gpus_per_node)
    layout = Layout(job.layout.dp_replicate_size, world // sizes[-1], sizes[-1], ring_size)
    widest = replace(job, layout=layout, levers=stop_spending(job.levers))
    peaks = {levers: compute_ledger(replace(widest, levers=levers)).gpu_peak_bytes for levers in list_smallest(widest)}
    best = min(peaks, key=lambda levers: peaks[levers])
    curves.append(_make_curve(f"sp {sizes[-1]}, every lever", replace(widest, levers=best), gpu, lengths, []))
    known = [index for index in range(len(lengths)) if any(curve.peaks[index] is not None for curve in curves)]
    shown = slice(0, max(known, default=0) + 1)
    curves = [Curve(curve.name, curve.peaks[shown], curve.fits[shown]) for curve in curves]
    return LengthSweep(lengths[shown], tuple(curves), tuple(dict.fromkeys(closed)))


def _make_curve(name: str, job: Job, gpu: Gpu, lengths: tuple[int, ...], open_names: list[str]) -> Curve:
    found = _choose_fits(job, gpu, lengths, open_names)
    peaks = tuple(None if fit is None else fit.gpu_peak_bytes for fit in found)
    return Curve(name, peaks, tuple(fit is not None and _has_room(fit) for fit in found))


def _choose_fits(job: Job, gpu: Gpu, lengths: tuple[int, ...], open_names: list[str]) -> list[Fit | None]:
    """The fit of each length with the levers of its own run; where none lets the row fit, nor any longer one, with the
    most levers. A length past what kernels index ends the list of those that they do."""
    found: list[Fit | None] = []
    has_room = True
    for length in lengths:
        row_job = replace(job, row_tokens=length)
        fit = try_levers(row_job, gpu, _find_most(row_job, open_names))
        if has_room and fit is not None and fit.gpu_peak_bytes < FAR_PAST * fit.gpu_capacity_bytes:
            cheapest = find_cheapest(row_job, gpu, open_names)
            fit = fit if cheapest is None else try_levers(row_job, gpu, cheapest)
        found.append(fit)
        if fit is None:
            break
        has_room = _has_room(fit)
    return found + [None] * (len(lengths) - len(found))


def _find_most(job: Job, open_names: list[str]) -> Levers:
    """The most of the open levers, among those with which kernels can index the job."""
    ranked = list_ranked_levers(job, open_names)
    return next((levers for levers in reversed(ranked) if is_tried(replace(job, levers=levers))), ranked[-1])


def _has_room(fit: Fit) -> bool:
    return fit.verdict != "does_not_fit" and fit.margin_bytes >= 0


def _list_closed(job: Job, curve: Curve, lengths: tuple[int, ...], open_names: list[str]) -> list[str]:
    """Tiles that would have to be open for the first length that the curve lacks."""
    missing = next((length for length, peak in zip(lengths, curve.peaks, strict=True) if peak is None), None)
    if missing is None or job.levers.tiled_mlp or "tiled_mlp" in open_names:
        return []
    tiled = replace(job, row_tokens=missing, levers=replace(job.levers, tiled_mlp=True))
    return ["tiled_mlp"] if is_indexable(replace(tiled, levers=_find_most(tiled, open_names))) else []
