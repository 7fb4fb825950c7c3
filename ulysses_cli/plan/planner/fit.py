"""Whether a job fits a GPU and its machine, by how much, and the longest row that would still fit. No money."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.ledger import Ledger, compute_ledger
from ulysses_cli.plan.ledger.sized.moments import measure_ledger
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.rows.indexing import RowSizes, has_untried, list_excess

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
    def fits_host(self) -> bool:
        return self.host_margin_bytes >= self.host_uncertainty_bytes

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


def is_indexable(job: Job) -> bool:
    """No call of an operator that counts in 32 bits sees a tensor of 2^31 elements (plan/rows/indexing.py)."""
    sizes = RowSizes(
        tokens=job.micro_step_tokens,
        sp_size=job.layout.sp_size,
        ring_size=job.layout.ring_size,
        head_chunks=job.levers.head_chunks,
        tiled_mlp=job.levers.tiled_mlp,
        is_quantized=job.quantized is not None,
        uses_dora=job.adapters is not None and job.adapters.has_magnitudes,
        num_rows=job.batch,
        kernel=job.kernel,
    )
    return not list_excess(job.shape, sizes)


def is_tried(job: Job) -> bool:
    """Nor does an operator outside tiles see one that tiles would spare it."""
    levers = job.levers
    is_wide = has_untried(job.shape, job.local_tokens, tiled_mlp=levers.tiled_mlp, tiled_loss=levers.tiled_loss)
    return is_indexable(job) and not is_wide


def fits(job: Job, gpu: Gpu) -> bool:
    return is_indexable(job) and judge(job, compute_ledger(job), gpu).verdict == "fits"


def try_levers(job: Job, gpu: Gpu, levers: Levers) -> Fit | None:
    """The job's fit with other levers; None where no kernel can index it."""
    tried = replace(job, levers=levers)
    return judge(tried, compute_ledger(tried), gpu) if is_indexable(tried) else None


LEAST_LESS = 512  # a share of a GPU: a smaller change of its room would propose the same again


def confirm(propose: Callable[[Gpu], Job], gpu: Gpu) -> tuple[Job, Ledger]:
    """What formulas propose for a GPU, and what it needs when it runs on sizes. Where that is more than formulas said,
    and too much, they propose for a GPU with as much less, until a proposal fits or formulas know of none."""
    room = gpu
    while True:
        job = propose(room)
        ledger, by_formula = measure_ledger(job), compute_ledger(job)
        if judge(job, ledger, gpu).verdict == "fits" or judge(job, by_formula, room).verdict != "fits":
            return job, ledger
        excess = ledger.gpu_peak_bytes + ledger.uncertainty_bytes
        excess -= by_formula.gpu_peak_bytes + by_formula.uncertainty_bytes
        most = room.memory_bytes - gpu.memory_bytes // LEAST_LESS
        room = replace(gpu, memory_bytes=min(gpu.memory_bytes - excess, most))


def confirm_length(job: Job, gpu: Gpu, propose: Callable[[Gpu], tuple[int, Levers]]) -> int:
    """The longest row, of those that are proposed with their levers; 0 where none fits."""
    multiple = job.layout.sp_size * ROW_MULTIPLE

    def propose_job(room: Gpu) -> Job:
        length, levers = propose(room)
        return replace(job, max_length=length or multiple, levers=levers)

    longest, ledger = confirm(propose_job, gpu)
    return longest.max_length if judge(longest, ledger, gpu).verdict == "fits" else 0


def find_max_length(job: Job, gpu: Gpu, holds: Callable[[Job, Gpu], bool] = fits) -> int:
    """The longest row that fits with these levers, in whole multiples; 0 when none does. Bisection works because memory
    never falls with length."""
    multiple = job.layout.sp_size * ROW_MULTIPLE
    return multiple * find_largest(lambda count: holds(replace(job, max_length=count * multiple), gpu))


def find_largest(holds: Callable[[int], bool]) -> int:
    """The largest positive number for which `holds` is true, which is false from some number on; 0 if it never is."""
    if not holds(1):
        return 0
    high = 2
    while holds(high):
        high *= 2
    low = high // 2
    while high - low > max(1, low // 512):  # a fifth of a percent is less than the ledger's uncertainty
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
