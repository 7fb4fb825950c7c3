"""Memory against row length: a curve for each way to split the same GPUs with the settled levers, and one with all.

Tiles that a recipe leaves open are turned on along a curve where kernels could not index a row without them, as in a
run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.ledger import compute_ledger
from ulysses_cli.plan.planner.fit import is_indexable, is_tried
from ulysses_cli.plan.planner.lever_choice import list_smallest
from ulysses_cli.plan.planner.search import list_sp_sizes
from ulysses_cli.plan.planner.spending import stop_spending
from ulysses_cli.plan.resolved import find_ring_size

SHORTEST, NUM_LENGTHS = 4096, 14
MAX_CURVES = 4


@dataclass(frozen=True)
class Curve:
    """Peak bytes of a rank at each length; None where a kernel could not index it."""

    name: str
    peaks: tuple[int | None, ...]


@dataclass(frozen=True)
class LengthSweep:
    """`closed`: tiles that the recipe forbids, and without which longer rows cannot be indexed."""

    lengths: tuple[int, ...]
    curves: tuple[Curve, ...]
    closed: tuple[str, ...] = ()


def compute_sweep(job: Job, open_names: Collection[str] = ()) -> LengthSweep:
    """`open_names`: levers that the recipe leaves open. Those of them that spend memory are off, since a longer row has
    none left; where every lever is on, all that spend memory are off."""
    job = replace(job, levers=stop_spending(job.levers, open_names))
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
        curves.append(Curve(f"sp {sp_size} x dp {layout.dp_size}", _list_peaks(split, lengths, open_names)))
        closed += _list_closed(split, curves[-1], lengths, open_names)
    ring_size = find_ring_size(job.shape, sizes[-1], job.gpus_per_node)
    layout = Layout(job.layout.dp_replicate_size, world // sizes[-1], sizes[-1], ring_size)
    widest = replace(job, layout=layout, levers=stop_spending(job.levers))
    peaks = {levers: compute_ledger(replace(widest, levers=levers)).gpu_peak_bytes for levers in list_smallest(widest)}
    best = min(peaks, key=lambda levers: peaks[levers])
    curves.append(Curve(f"sp {sizes[-1]}, every lever", _list_peaks(replace(widest, levers=best), lengths, ())))
    known = [index for index in range(len(lengths)) if any(curve.peaks[index] is not None for curve in curves)]
    shown = slice(0, max(known, default=0) + 1)
    curves = [Curve(curve.name, curve.peaks[shown]) for curve in curves]
    return LengthSweep(lengths[shown], tuple(curves), tuple(dict.fromkeys(closed)))


def _list_peaks(job: Job, lengths: tuple[int, ...], open_names: Collection[str]) -> tuple[int | None, ...]:
    tried = [_open_tiles(replace(job, row_tokens=length), open_names) for length in lengths]
    return tuple(compute_ledger(row_job).gpu_peak_bytes if is_indexable(row_job) else None for row_job in tried)


def _open_tiles(job: Job, open_names: Collection[str]) -> Job:
    """Turns on the tiles that a run of this row would have, of those that the recipe leaves open."""
    levers = job.levers
    if "tiled_loss" in open_names and not is_tried(job):
        levers = replace(levers, tiled_loss=True)
    if "tiled_mlp" in open_names and not is_tried(replace(job, levers=levers)):
        levers = replace(levers, tiled_mlp=True)
    return replace(job, levers=levers)


def _list_closed(job: Job, curve: Curve, lengths: tuple[int, ...], open_names: Collection[str]) -> list[str]:
    """Tiles that would have to be open for the first length that the curve lacks."""
    missing = next((length for length, peak in zip(lengths, curve.peaks, strict=True) if peak is None), None)
    if missing is None or job.levers.tiled_mlp or "tiled_mlp" in open_names:
        return []
    return ["tiled_mlp"] if is_indexable(_open_tiles(replace(job, row_tokens=missing), ("tiled_mlp",))) else []
