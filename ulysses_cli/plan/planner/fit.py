"""Whether a job fits a GPU and its machine, by how much, and the longest row that would still fit. No money."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.ledger.job import Job, is_indexable
from ulysses_cli.plan.ledger.ledger import Ledger, measure_ledger, weigh_ledger
from ulysses_cli.plan.ledger.states import FLOAT_BYTES
from ulysses_cli.plan.ledger.weights import get_weights
from ulysses_cli.plan.levers import Levers, uses_disk
from ulysses_cli.plan.rows.indexing import has_untried
from ulysses_cli.plan.speed import compute_speed

Verdict = Literal["fits", "too_close", "does_not_fit"]
VERDICTS: tuple[Verdict, ...] = ("fits", "too_close", "does_not_fit")
ROW_MULTIPLE = 128


@dataclass(frozen=True)
class Fit:
    """Bytes of a rank on its GPU, and of a node on its host. Margins may be negative."""

    verdict: Verdict
    wall: str  # what is too small: "", "gpu" or "host"
    gpu_peak_bytes: int
    gpu_capacity_bytes: int
    host_peak_bytes: int
    host_capacity_bytes: int
    uncertainty_bytes: int
    host_uncertainty_bytes: int

    @property
    def spare_bytes(self) -> int:
        """The GPU's margin beyond the ledger's uncertainty."""
        return self.margin_bytes - self.uncertainty_bytes

    @property
    def spare_host_bytes(self) -> int:
        return self.host_margin_bytes - self.host_uncertainty_bytes

    @property
    def fits_host(self) -> bool:
        return self.spare_host_bytes >= 0

    @property
    def margin_bytes(self) -> int:
        return self.gpu_capacity_bytes - self.gpu_peak_bytes

    @property
    def host_margin_bytes(self) -> int:
        return self.host_capacity_bytes - self.host_peak_bytes


def judge(job: Job, ledger: Ledger, gpu: Gpu) -> Fit:
    """`fits` when both margins exceed the ledger's uncertainty, `too_close` when one lies within it, up or down. The
    wall is the worse of the two."""
    host_capacity = gpu.get_host_bytes(job.world_size)
    on_gpu = compare(gpu.memory_bytes - ledger.gpu_peak_bytes, ledger.uncertainty_bytes)
    on_host = compare(host_capacity - ledger.host_peak_bytes, ledger.host_uncertainty_bytes)
    verdict, wall = (on_host, "host") if VERDICTS.index(on_host) > VERDICTS.index(on_gpu) else (on_gpu, "gpu")
    return Fit(
        verdict=verdict,
        wall="" if verdict == "fits" else wall,
        gpu_peak_bytes=ledger.gpu_peak_bytes,
        gpu_capacity_bytes=gpu.memory_bytes,
        host_peak_bytes=ledger.host_peak_bytes,
        host_capacity_bytes=host_capacity,
        uncertainty_bytes=ledger.uncertainty_bytes,
        host_uncertainty_bytes=ledger.host_uncertainty_bytes,
    )


def compare(margin: int, uncertainty: int) -> Verdict:
    return "fits" if margin >= uncertainty else "too_close" if margin > -uncertainty else "does_not_fit"


def is_tried(job: Job) -> bool:
    """Nor does an operator outside tiles see one that tiles would spare it."""
    levers = job.levers
    is_wide = has_untried(job.shape, job.local_tokens, tiled_mlp=levers.tiled_mlp, tiled_loss=levers.tiled_loss)
    return is_indexable(job) and not is_wide


def judge_indexable(job: Job, gpu: Gpu) -> Fit | None:
    """None where no kernel can index it."""
    return judge(job, weigh_ledger(job), gpu) if is_indexable(job) else None


def fits(job: Job, gpu: Gpu) -> bool:
    fit = judge_indexable(job, gpu)
    return fit is not None and fit.verdict == "fits"


def try_levers(job: Job, gpu: Gpu, levers: Levers) -> Fit | None:
    """The job's fit with other levers."""
    return judge_indexable(job.with_levers(levers), gpu)


def lower_stage(job: Job) -> Job | None:
    """The same with all weights on each GPU: ZeRO-1 gathers none, and its hooks launch less. ZeRO-2 where micro-steps
    add up bfloat16 gradients, which stage 1 does not in float32 (plan/ds_config.py). None where stage 3 has what lower
    ones lack."""
    is_free = not uses_disk(job.levers) and job.levers.offload_param == "none" and job.layout.dp_replicate_size == 1
    if job.zero_stage != 3 or job.world_size == 1 or job.optim == "muon" or not is_free:
        return None
    stage: Literal[1, 2] = 2 if job.accumulation > 1 and job.dtype_bytes < FLOAT_BYTES else 1
    engine = replace(job.engine, communication_bytes=FLOAT_BYTES)
    levers = replace(job.levers, early_groups=0, leaf_layers=False)
    return replace(job, zero_stage=stage, levers=levers, engine=engine)


NOT_WHOLE = "not all weights and gradients would fit"
LEAST_GAIN = 0.01  # of a step


def choose_stage(job: Job, gpu: Gpu) -> tuple[Job, Ledger] | str:
    """The job with a lower stage, and its ledger, where the GPU waits for the processor, all weights fit, and a step is
    faster; else why not."""
    whole, speed = lower_stage(job), compute_speed(job, gpu)
    if job.world_size == 1:
        return "one process gathers nothing"
    if not speed.is_host_bound:
        return "the GPU does not wait for the processor"
    if not holds_whole(job, gpu):
        return NOT_WHOLE
    if whole is None:
        return "other settings need stage 3"
    if compute_speed(whole, gpu).step_seconds >= (1 - LEAST_GAIN) * speed.step_seconds:
        return "with a lower one a step would take about as long"
    ledger = measure_ledger(whole)  # a load may need most, which no search weighs
    return (whole, ledger) if judge(whole, ledger, gpu).verdict == "fits" else NOT_WHOLE


def holds_whole(job: Job, gpu: Gpu) -> bool:
    """A shortcut: whether all weights and their gradients alone fit."""
    return 2 * job.dtype_bytes * get_weights(job).num_elements < gpu.memory_bytes


LEAST_LESS = 512  # a share of a GPU: a smaller change of its room would propose the same again


def confirm(propose: Callable[[Gpu], Job], gpu: Gpu) -> tuple[Job, Ledger]:
    """What a search proposes for a GPU, and what it needs when it runs on sizes. Where that is more than the search
    weighed, and too much, it proposes for a GPU with as much less, until a proposal fits or nothing seems to."""
    room = gpu
    while True:
        job = propose(room)
        ledger, weighed = measure_ledger(job), weigh_ledger(job)
        if judge(job, ledger, gpu).verdict == "fits" or judge(job, weighed, room).verdict != "fits":
            return job, ledger
        excess = ledger.gpu_peak_bytes + ledger.uncertainty_bytes
        excess -= weighed.gpu_peak_bytes + weighed.uncertainty_bytes
        most = room.memory_bytes - gpu.memory_bytes // LEAST_LESS
        room = replace(gpu, memory_bytes=min(gpu.memory_bytes - excess, most))


def confirm_length(job: Job, gpu: Gpu, length: int, levers: Levers) -> int:
    """The longest row, up to the one that a search weighed, for which a run on sizes says that it fits; 0 where none
    does. What the row has to be shorter is found by a line, since memory grows nearly in one."""
    multiple = job.layout.sp_size * ROW_MULTIPLE
    while length:
        tried = replace(job, max_length=length, levers=levers)
        fit = judge(tried, measure_ledger(tried), gpu)
        if fit.verdict == "fits":
            return length
        shorter = max(1, length // multiple * 7 // 8) * multiple
        now, then = find_rooms(tried, gpu), find_rooms(replace(tried, max_length=shorter), gpu)
        falls = [(after - before) / max(1, length - shorter) for before, after in zip(now, then, strict=True)]
        lacks = zip((-fit.spare_bytes, -fit.spare_host_bytes), falls, strict=True)
        excess = max((lack / fall if fall > 0 else math.inf) for lack, fall in lacks if lack > 0)
        least = max(1, length // multiple // CLOSE) * multiple
        length = 0 if excess >= length else (length - max(least, math.ceil(excess))) // multiple * multiple
    return 0


CLOSE = 512  # a row's length is known to a share of it, which is less than the ledger is sure of


Rooms = tuple[float, float]  # bytes that are left on the GPU, and on a host
NO_ROOMS = -math.inf, -math.inf  # no kernel can index the row


def find_rooms(job: Job, gpu: Gpu) -> Rooms:
    fit = judge_indexable(job, gpu)
    return NO_ROOMS if fit is None else (fit.spare_bytes, fit.spare_host_bytes)


def find_max_length(job: Job, gpu: Gpu, find: Callable[[Job, Gpu], Rooms] = find_rooms) -> int:
    """The longest row that fits with these levers, in whole multiples; 0 when none does. Memory never falls with
    length, and that of a GPU and that of a host grow nearly in a line: most lengths that are tried are where the line
    through the two nearest ones ends."""
    multiple, rooms = job.layout.sp_size * ROW_MULTIPLE, dict[int, Rooms]()

    def fits_length(number: int) -> bool:
        rooms[number] = find(replace(job, max_length=number * multiple), gpu)
        return min(rooms[number]) >= 0

    def find_end(one: int, two: int) -> float:
        """Where the first of both lines through two lengths ends."""
        pairs = [(left, left - right) for left, right in zip(rooms[one], rooms[two], strict=True)]
        ends = [one + left * (two - one) / falls if falls * (two - one) > 0 else math.inf for left, falls in pairs]
        return min(ends) if math.isfinite(min(rooms[one])) and math.isfinite(min(rooms[two])) else math.inf

    limit = _find_largest(lambda number: is_indexable(replace(job, max_length=number * multiple)))
    low = min(limit, max(1, job.max_length // multiple))
    if not low or not (fits_length(low) or fits_length(low := 1)):
        return 0
    high = min((number for number in rooms if min(rooms[number]) < 0), default=limit + 1)
    if len(rooms) == 1 and low < limit:
        tried = min(limit, low + low // 4 + 1)
        low, high = (tried, high) if fits_length(tried) else (low, tried)
    num_slow = 0  # steps that halve nothing
    while high - low > (least := max(1, low // CLOSE)):
        near = sorted(rooms, key=lambda number: abs(min(rooms[number])))[:2]
        pair = (low, high) if num_slow == 1 and math.isfinite(min(rooms.get(high, NO_ROOMS))) else near
        end = find_end(*pair) if num_slow < 2 else math.inf
        middle = int(end) - least // 2 if math.isfinite(end) else (low + min(high, 64 * low)) // 2
        middle, width = min(max(middle, low + 1), high - 1), high - low
        low, high = (middle, high) if fits_length(middle) else (low, middle)
        if middle == low and find_end(low, near[0]) - low < least:
            break  # the longest row is hardly longer
        num_slow = 0 if 2 * (high - low) <= width else (num_slow + 1) % 3
    return multiple * low


def _find_largest(holds: Callable[[int], bool]) -> int:
    """The largest positive number for which `holds` is true, which is false from some number on; 0 if it never is."""
    high = 1
    while holds(high) and high < MOST_MULTIPLES:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


MOST_MULTIPLES = 1 << 30
