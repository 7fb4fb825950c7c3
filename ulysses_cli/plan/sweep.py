"""Memory against length: one curve for each way to split the same GPUs, with the levers as settled, and with all."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ulysses_cli.plan.fit import is_indexable
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.lever_choice import list_smallest
from ulysses_cli.plan.memory import compute_ledger
from ulysses_cli.plan.search import list_sp_sizes

SHORTEST, NUM_LENGTHS = 4096, 14
MAX_CURVES = 4


@dataclass(frozen=True)
class Curve:
    """Peak bytes of a rank at each length; None where a kernel could not index it, or the row does not divide."""

    name: str
    peaks: tuple[int | None, ...]


@dataclass(frozen=True)
class Sweep:
    lengths: tuple[int, ...]
    curves: tuple[Curve, ...]


def compute_sweep(job: Job) -> Sweep:
    lengths = tuple(SHORTEST << power for power in range(NUM_LENGTHS))
    world = job.layout.replica_size
    sizes = [n for n in list_sp_sizes(job.shape, world, None) if job.row_tokens % n == 0]
    sizes = sorted({*sizes[-MAX_CURVES:], job.layout.sp_size})
    curves = []
    for sp_size in sizes:
        layout = Layout(job.layout.dp_replicate_size, world // sp_size, sp_size)
        heads = job.shape.num_heads // sp_size
        levers = job.levers if heads % job.levers.head_chunks == 0 else replace(job.levers, head_chunks=1)
        split = replace(job, layout=layout, levers=levers)
        curves.append(Curve(f"sp {sp_size} x dp {layout.dp_size}", _list_peaks(split, lengths)))
    widest = replace(job, layout=Layout(job.layout.dp_replicate_size, world // sizes[-1], sizes[-1]))
    best = min(list_smallest(widest), key=lambda each: compute_ledger(replace(widest, levers=each)).gpu_peak_bytes)
    curves.append(Curve(f"sp {sizes[-1]}, every lever", _list_peaks(replace(widest, levers=best), lengths)))
    known = [index for index in range(len(lengths)) if any(curve.peaks[index] is not None for curve in curves)]
    shown = slice(0, max(known, default=0) + 1)
    return Sweep(lengths[shown], tuple(Curve(curve.name, curve.peaks[shown]) for curve in curves))


def _list_peaks(job: Job, lengths: tuple[int, ...]) -> tuple[int | None, ...]:
    tried = [replace(job, row_tokens=length) for length in lengths]
    return tuple(compute_ledger(each).gpu_peak_bytes if is_indexable(each) else None for each in tried)
