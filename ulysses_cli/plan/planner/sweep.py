"""Memory against row length: a curve for each way to split the same GPUs, with the levers that a run of each length
would choose of those that the recipe leaves open, and one with all levers. What spends memory stays off.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import Job, is_indexable
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.planner.fit import Fit, is_tried, try_levers
from ulysses_cli.plan.planner.lever_choice import (
    find_cheapest,
    list_ranked_levers,
    list_smallest,
)
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
    """`closed`: levers, with the values that the recipe sets, without which longer rows could be indexed."""

    lengths: tuple[int, ...]
    curves: tuple[Curve, ...]
    closed: tuple[tuple[str, Any], ...] = ()


def compute_sweep(job: Job, gpu: Gpu, open_names: Collection[str] = ()) -> LengthSweep:
    """`open_names`: levers that the recipe leaves open. Those of them that spend memory are off, since a longer row has
    none left; where every lever is on, all that spend memory are off."""
    job = job.with_levers(replace(job.levers, **{name: getattr(OFF, name) for name in open_names}))
    names = [name for name in open_names if name not in SPENDING]
    lengths = tuple(SHORTEST << power for power in range(NUM_LENGTHS))
    world = job.layout.replica_size
    sizes = [n for n in list_sp_sizes(job.shape, world, None) if job.max_length % n == 0]
    sizes = sorted({*sizes[-MAX_CURVES:], job.layout.sp_size})
    curves, closed = [], list[tuple[str, Any]]()
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
    curves.append(_make_least(f"sp {sizes[-1]}, every lever", widest, gpu, lengths))
    known = [index for index in range(len(lengths)) if any(curve.peaks[index] is not None for curve in curves)]
    shown = slice(0, max(known, default=0) + 1)
    curves = [Curve(curve.name, curve.peaks[shown], curve.fits[shown]) for curve in curves]
    return LengthSweep(lengths[shown], tuple(curves), tuple(dict.fromkeys(closed)))


def _make_curve(name: str, job: Job, gpu: Gpu, lengths: tuple[int, ...], open_names: list[str]) -> Curve:
    return _draw(name, lengths, _choose_fits(job, gpu, lengths, open_names))


def _make_least(name: str, job: Job, gpu: Gpu, lengths: tuple[int, ...]) -> Curve:
    """At each length, the set that needs the least of those with which kernels can index the row."""
    jobs = (replace(job, max_length=length) for length in lengths)
    sets = ((each, list_smallest(each)) for each in jobs)
    found = ([fit for levers in smallest if (fit := try_levers(each, gpu, levers))] for each, smallest in sets)
    return _draw(name, lengths, [min(fits, key=lambda fit: fit.gpu_peak_bytes, default=None) for fits in found])


def _draw(name: str, lengths: tuple[int, ...], found: Sequence[Fit | None]) -> Curve:
    """A length past what kernels index ends a curve."""
    until = next((at for at, fit in enumerate(found) if fit is None), len(found))
    known, missing = [fit for fit in found[:until] if fit is not None], len(lengths) - until
    peaks, rooms = [fit.gpu_peak_bytes for fit in known], [_has_room(fit) for fit in known]
    return Curve(name, (*peaks, *[None] * missing), (*rooms, *[False] * missing))


def _choose_fits(job: Job, gpu: Gpu, lengths: tuple[int, ...], open_names: list[str]) -> list[Fit | None]:
    """The fit of each length with the levers of its own run; where none lets the row fit, nor any longer one, with the
    most levers. The list ends at a length past what kernels index."""
    found: list[Fit | None] = []
    has_room = True
    for length in lengths:
        row_job = replace(job, max_length=length)
        fit = try_levers(row_job, gpu, _find_most(row_job, open_names))
        if has_room and fit is not None and fit.gpu_peak_bytes < FAR_PAST * fit.gpu_capacity_bytes:
            cheapest = find_cheapest(row_job, gpu, open_names)
            fit = fit if cheapest is None else try_levers(row_job, gpu, cheapest)
        found.append(fit)
        if fit is None:
            break
        has_room = _has_room(fit)
    return found


def _find_most(job: Job, open_names: list[str]) -> Levers:
    """The most of the open levers, among those with which kernels can index the job."""
    ranked = list_ranked_levers(job, open_names)
    return next((levers for levers in reversed(ranked) if is_tried(job.with_levers(levers))), ranked[-1])


def _has_room(fit: Fit) -> bool:
    return fit.verdict != "does_not_fit" and fit.margin_bytes >= 0


def _list_closed(job: Job, curve: Curve, lengths: tuple[int, ...], open_names: list[str]) -> Iterator[tuple[str, Any]]:
    """Settings that would have to be open for the first length that the curve lacks: tiles, more chunks, or both."""
    missing = next((length for length, peak in zip(lengths, curve.peaks, strict=True) if peak is None), None)
    if missing is None:
        return
    most: dict[str, Any] = {"tiled_mlp": True, "head_chunks": job.shape.common_heads // job.layout.ulysses_size}
    given = {name for name, value in most.items() if name not in open_names and getattr(job.levers, name) != value}
    for names in [{name} for name in most if name in given] + ([given] if len(given) > 1 else []):
        opened = replace(job.levers, **{name: most[name] for name in names})
        longer = replace(job, max_length=missing, levers=opened)
        if is_indexable(replace(longer, levers=_find_most(longer, open_names))):
            yield from ((name, getattr(job.levers, name)) for name in most if name in names)
            return
