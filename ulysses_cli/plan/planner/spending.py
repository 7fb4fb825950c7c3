"""Spends the memory that a job has left to save time: layers that are not computed again, large tiles, layers as leaf
modules, early steps of the optimizer, exchanges that overlap with attention; with a reason for each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from ulysses_cli.plan.hardware import GIB, Gpu
from ulysses_cli.plan.layout import list_divisors
from ulysses_cli.plan.ledger.job import Job, is_indexable
from ulysses_cli.plan.ledger.ledger import weigh_ledger
from ulysses_cli.plan.ledger.states import list_sub_groups
from ulysses_cli.plan.ledger.weights import get_weights
from ulysses_cli.plan.levers import Levers, explain_no_leaves, explain_no_overlap
from ulysses_cli.plan.planner.fit import Fit, is_tried, judge, try_levers
from ulysses_cli.plan.speed import compute_speed
from ulysses_cli.plan.units import format_count

RECOMPUTING = "gradient_checkpointing"
# What costs memory and no time, if there is some left.
SPENDING = ("saved_layers", "large_tiles", "leaf_layers", "early_groups", "overlap_exchange")
NO_ROOM = "the GPU has no room for them"
OFF = Levers()


def spend_what_is_left(job: Job, gpu: Gpu, levers: Levers, open_names: Collection[str]) -> Levers:
    """Turns on what spends memory and saves time, as far as the job still fits. It is decided after all that frees
    memory."""
    levers = _stop_recomputing(job, gpu, levers, open_names)
    levers = _save_layers(job, gpu, levers, open_names)
    most: dict[str, Any] = {
        "large_tiles": int(levers.tiled_mlp or levers.tiled_loss),
        "leaf_layers": 0,
        "early_groups": 0 if _find_no_overlap(job.with_levers(levers)) else count_groups(job) - 1,
    }
    for name in open_names:
        if name == "leaf_layers":  # of which tiles change the gain
            most[name] = int(_explain_no_leaves(job.with_levers(levers), gpu) == "")
        if name in most:
            levers = _spend_most(job, gpu, levers, name, most[name])
    return _overlap_exchange(job, gpu, levers, open_names)


# Of a step: what the exchange takes, and what chunks must save. What four cost is predicted within 0.6 % of a step of
# published rows (benchmarks/published.py: UPipe).
LEAST_EXCHANGE, LEAST_GAIN = 0.03, 0.01
# Queries of all heads in a chunk. A kernel takes 128 of them at a time on each of an H100's 132 processors, with these
# eight times over: what is idle at the end costs little.
EFFICIENT_CHUNK = 128 * 1024


def _overlap_exchange(job: Job, gpu: Gpu, levers: Levers, open_names: Collection[str]) -> Levers:
    """Exchanges a chunk of heads while another attends: in as many chunks as are predicted to take least time, of those
    with which the job fits."""
    job = job.with_levers(levers)
    if "overlap_exchange" in open_names:
        overlaps, _ = _find_gains(job, gpu, open_names)
    else:
        overlaps = _list_overlaps(job, gpu, open_names) if levers.overlap_exchange else []
    fitting = (tried.levers for tried in overlaps if judge(tried, weigh_ledger(tried), gpu).verdict == "fits")
    return next(fitting, levers)


def _find_gains(job: Job, gpu: Gpu, open_names: Collection[str]) -> tuple[list[Job], str]:
    """The job with overlapped chunks that are worth it, the fastest first, or why there is none."""
    if why := explain_no_overlap(job.shape, job.layout.ulysses_size):
        return [], why
    speed = compute_speed(job, gpu)
    if (share := speed.parts["exchange"] / speed.step_seconds) <= LEAST_EXCHANGE:
        return [], f"the exchange takes {share:.1%} of a step"
    overlaps = _list_overlaps(job, gpu, open_names)
    if not overlaps:
        return [], "chunks would be too small" if "head_chunks" in open_names else "all heads are exchanged at once"
    most = (1 - LEAST_GAIN) * speed.step_seconds
    gains = [each for each in overlaps if compute_speed(each, gpu).step_seconds <= most]
    return gains, "" if gains else "a step would take about as long with chunks"


def _list_overlaps(job: Job, gpu: Gpu, open_names: Collection[str]) -> list[Job]:
    """The job with overlapped chunks: as many as it has or, where that is open, more that are large enough for kernels,
    or any number if the recipe asks for overlap. The fastest first."""
    own, heads = job.levers.head_chunks, job.shape.common_heads // job.layout.ulysses_size
    numbers = [own]
    if "head_chunks" in open_names:
        queries = job.micro_step_tokens // job.layout.ring_size
        least = 1 if job.levers.overlap_exchange else EFFICIENT_CHUNK / queries
        numbers += [n for n in list_divisors(heads) if n > own and heads // n >= least]
    tried = [job.with_levers(replace(job.levers, head_chunks=n, overlap_exchange=True)) for n in numbers if n > 1]
    return sorted(filter(is_indexable, tried), key=lambda each: compute_speed(each, gpu).step_seconds)


def _explain_no_leaves(job: Job, gpu: Gpu) -> str:
    levers = job.levers
    if why := explain_no_leaves(job.shape, job.zero_stage, levers.offload_param):
        return why
    if job.world_size == 1:
        return "one rank gathers nothing"
    tried = (job.with_levers(replace(levers, leaf_layers=each)) for each in (True, False))
    with_them, without = (compute_speed(each, gpu).step_seconds for each in tried)
    return "" if with_them < without else "the GPU does not wait for the processor"


def _explain_overlap(job: Job, gpu: Gpu, open_names: Collection[str]) -> str:
    in_turn = job.with_levers(replace(job.levers, overlap_exchange=False))
    if not job.levers.overlap_exchange:
        return _find_gains(job, gpu, open_names)[1] or NO_ROOM
    now, before = compute_speed(job, gpu), compute_speed(in_turn, gpu)
    share, left = before.parts["exchange"] / before.step_seconds, now.parts["exchange"] / before.parts["exchange"]
    return f"the exchange would take {share:.1%} of a step; attention hides {1 - left:.0%} of it"


def has_chunks_for_speed(job: Job, gpu: Gpu) -> bool:
    """Whether the job would fit with all heads exchanged at once."""
    at_once = job.with_levers(replace(job.levers, head_chunks=1, overlap_exchange=False))
    return job.levers.overlap_exchange and judge(at_once, weigh_ledger(at_once), gpu).verdict == "fits"


def _stop_recomputing(job: Job, gpu: Gpu, levers: Levers, open_names: Collection[str]) -> Levers:
    """Computes no layer twice, where the GPU has room for all that layers save; if need be with the loss in tiles,
    which takes less time than a second forward."""
    if RECOMPUTING not in open_names or levers.gradient_checkpointing is not True or levers.offloaded_layers:
        return levers
    for tiled_loss in (False, True) if "tiled_loss" in open_names and not levers.tiled_loss else (levers.tiled_loss,):
        saving = replace(levers, gradient_checkpointing=False, saved_layers=0, tiled_loss=tiled_loss)
        fit = try_levers(job, gpu, saving)
        if fit is not None and fit.verdict == "fits" and is_tried(job.with_levers(saving)):
            seconds = [compute_speed(job.with_levers(each), gpu).step_seconds for each in (saving, levers)]
            return saving if seconds[0] < seconds[1] else levers
    return levers


LEAST_SAVED = 0.02  # of a step: what the rest of a GPU's memory is worth


def _save_layers(job: Job, gpu: Gpu, levers: Levers, open_names: Collection[str]) -> Levers:
    """Computes as many of the last layers once as the GPU has room for, where that is worth it; with the loss in tiles
    if a step is faster."""
    if "saved_layers" not in open_names or _explain_no_saving(levers, open_names):
        return levers
    tiles = dict.fromkeys((levers.tiled_loss, levers.tiled_loss or "tiled_loss" in open_names))
    sets = [replace(levers, tiled_loss=tiled_loss) for tiled_loss in tiles]
    sets = [each for each in sets if is_tried(job.with_levers(each))]
    tried = [_spend_most(job, gpu, each, "saved_layers", job.shape.num_layers - 1) for each in sets]
    seconds = {each: compute_speed(job.with_levers(each), gpu).step_seconds for each in (levers, *tried)}
    best = min(seconds, key=lambda each: seconds[each])
    return best if seconds[best] <= (1 - LEAST_SAVED) * seconds[levers] else levers


def stop_spending(levers: Levers, open_names: Collection[str] = (RECOMPUTING, *SPENDING)) -> Levers:
    """Turns off what spends memory, of `open_names`."""
    spent: dict[str, Any] = {name: getattr(OFF, name) for name in SPENDING if name in open_names}
    if RECOMPUTING in open_names and not levers.gradient_checkpointing:
        spent[RECOMPUTING] = True
    return replace(levers, **spent)


def keep_spending(job: Job, gpu: Gpu, levers: Levers) -> Levers:
    """`levers` with what the job spends, as far as it then still fits."""
    saves_all = not job.levers.gradient_checkpointing and not levers.offloaded_layers
    for name in ([RECOMPUTING] if saves_all else []) + [*SPENDING]:
        if name == "saved_layers" and levers.offloaded_layers:
            continue
        given: dict[str, Any] = {name: getattr(job.levers, name)}
        fit = try_levers(job, gpu, replace(levers, **given))
        levers = replace(levers, **given) if fit is not None and fit.verdict == "fits" else levers
    return levers


def _spend_most(job: Job, gpu: Gpu, levers: Levers, name: str, most: int) -> Levers:
    """The largest value of a lever, up to `most`, with which the job fits."""

    def spend(value: int) -> Levers:
        spent: dict[str, Any] = {name: type(getattr(OFF, name))(value)}
        return replace(levers, **spent)

    def holds(value: int) -> bool:
        fit = try_levers(job, gpu, spend(value))
        return fit is not None and fit.verdict == "fits"

    if not most or holds(most):
        return spend(most)
    low, high = 0, most  # of which `low` is as it was
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return spend(low)


def count_groups(job: Job) -> int:
    return len(list_sub_groups(get_weights(job), job.world_size, job.engine.sub_group))


def _explain_no_saving(levers: Levers, open_names: Collection[str]) -> str:
    """Why no layers save all that others compute again, or ''."""
    if RECOMPUTING not in open_names:
        return "memory.gradient_checkpointing is given"
    if levers.gradient_checkpointing is not True:
        return "no layer is computed again" if not levers.gradient_checkpointing else "the host has no room for results"
    return "what layers save leaves the GPU" if levers.offloaded_layers else ""


def _find_no_overlap(job: Job) -> str:
    """Why no group of the optimizer could step early, or ''."""
    if job.levers.offload_optimizer != "cpu":
        return "the optimizer is not in host memory"
    if job.zero_stage != 3:
        return f"stage {job.zero_stage} steps all weights at once"
    return "a rank's weights are one group" if count_groups(job) == 1 else ""


def explain_spending(job: Job, gpu: Gpu, name: str, fit: Fit, open_names: Collection[str]) -> str:
    value, levers = getattr(job.levers, name), job.levers
    if name == "overlap_exchange":
        return _explain_overlap(job, gpu, open_names)
    if name == "saved_layers":
        room = f"of {format_count(job.shape.num_layers, 'layer')}; the peak is {fit.gpu_peak_bytes / GIB:.1f} of"
        why = _explain_no_saving(levers, open_names) or "what fits would hardly save time"
        return f"{value} {room} {gpu.memory_bytes / GIB:.1f} GiB" if value else why
    if name == "large_tiles":
        if not levers.tiled_mlp and not levers.tiled_loss:
            return "nothing is tiled"
        return f"the peak is {fit.gpu_peak_bytes / GIB:.1f} of {gpu.memory_bytes / GIB:.1f} GiB" if value else NO_ROOM
    if name == "leaf_layers":
        if value:
            return "the GPU would wait for the processor"
        off = job.with_levers(replace(levers, leaf_layers=False))
        return _explain_no_leaves(off, gpu) or NO_ROOM
    if reason := _find_no_overlap(job):
        return reason
    room = f"of {format_count(count_groups(job), 'group')}; the host has room for copies, from which they are undone"
    return f"{value} {room}" if value else "the host has no room for copies"
