"""One recipe on one kind of GPU: memory, time, money, the longest row, and what to change when it does not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ulysses_cli.plan.hardware import GIB, Gpu, compute_cost
from ulysses_cli.plan.ledger.job import Job, make_job
from ulysses_cli.plan.ledger.ledger import Ledger, compute_ledger
from ulysses_cli.plan.ledger.zero.swapping import compute_node_disk_bytes
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.planner.accuracy import Accuracy, judge_speed
from ulysses_cli.plan.planner.draft import write_levers
from ulysses_cli.plan.planner.fit import ROW_MULTIPLE, Fit, find_max_length, is_indexable, judge
from ulysses_cli.plan.planner.host_bound import HostBound, find_host_bound
from ulysses_cli.plan.planner.lever_choice import (
    COSTS,
    LeverChoice,
    choose_for_job,
    choose_levers,
    find_cheapest,
    find_longest,
    read_levers,
)
from ulysses_cli.plan.planner.machines import LayoutInside, find_layout_inside
from ulysses_cli.plan.planner.rings import BetterRing, explain_own_ring, find_better_ring
from ulysses_cli.plan.planner.spending import keep_spending, stop_spending
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.speed import Speed, compute_speed, explain_packed

DISK = "/mnt/nvme"
LESS = 0.95  # of the ledger's peak, since memory ran out below the peak


@dataclass(frozen=True)
class Estimate:
    """Everything about one job on one GPU kind. `suggestion` is YAML, or '' where no change is needed or helps."""

    gpu: Gpu
    job: Job
    choice: LeverChoice
    ledger: Ledger
    fit: Fit
    speed: Speed
    max_length: int
    max_length_all_levers: int
    suggestion: str
    better_ring: BetterRing | None = None
    own_ring: str = ""  # what the job's ring gains, or why it is needed
    host_bound: HostBound | None = None  # where the GPU waits for the processor
    inside: LayoutInside | None = None  # where rows leave their machine though they need not

    @cached_property
    def slow_attention(self) -> str:
        """What a kernel costs that `auto` may have to take."""
        return explain_packed(self.job, self.gpu) if self.job.kernel == "auto" else ""

    @property
    def ends_at_index(self) -> bool:
        """Whether kernels' limit of 2^31 elements, and not memory, bounds the longest row with these levers."""
        longer = self.max_length + self.max_length // 256 + self.job.layout.sp_size * ROW_MULTIPLE
        return self.max_length > 0 and not is_indexable(replace(self.job, row_tokens=longer))

    @cached_property
    def accuracy(self) -> Accuracy:
        return judge_speed(self.job, self.gpu, self.speed)

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        """The least and the most that it may be."""
        rate = self.speed.tokens_per_second
        return rate * self.accuracy.low, rate * self.accuracy.high

    @property
    def usd_per_million_tokens(self) -> tuple[float, float] | None:
        """At the highest speed and the low price, and at the lowest speed and the high one."""
        slow, fast = self.tokens_per_second
        most, least = (compute_cost(1e6 / rate, self.job.world_size, self.gpu) for rate in (slow, fast))
        return None if least is None or most is None else (least[0], most[1])


def compute_estimate(recipe: Recipe, shape: ModelShape, gpu: Gpu) -> Estimate:
    """For a recipe that passed its checks. The recipe's price of a GPU goes before the table's."""
    price = recipe.run.price_per_gpu_hour
    if price is not None:
        gpu = replace(gpu, usd_low=price, usd_high=price, price_source="run.price_per_gpu_hour", price_date="")
    levers, open_names = read_levers(recipe, shape)
    job = make_job(recipe, shape, levers, gpus_per_node=gpu.gpus_per_node)
    choice = choose_for_job(job, gpu, open_names)
    settled = replace(job, levers=choice.levers)
    ledger = compute_ledger(settled)
    fit = judge(settled, ledger, gpu)
    # A longer row, or one that does not fit, leaves no memory for large tiles and early steps.
    frugal = replace(settled, levers=stop_spending(choice.levers, open_names))
    own = job.row_tokens if fit.verdict == "fits" else 0  # which need not be a whole multiple
    return Estimate(
        gpu=gpu,
        job=settled,
        choice=choice,
        ledger=ledger,
        fit=fit,
        speed=compute_speed(settled, gpu),
        max_length=max(own, find_max_length(frugal, gpu)),
        max_length_all_levers=max(own, find_longest(frugal, gpu)[0]),
        suggestion="" if fit.verdict == "fits" else suggest_levers(frugal, gpu),
        better_ring=find_better_ring(settled, gpu),
        host_bound=find_host_bound(settled, gpu),
        own_ring=explain_own_ring(settled, gpu),
        inside=find_layout_inside(settled, gpu, job, open_names),
    )


def find_rate(recipe: Recipe, shape: ModelShape, gpu: Gpu) -> float:
    """Tokens per second where the recipe fits for sure, else 0; a fraction of the work of an estimate."""
    choice = choose_levers(recipe, shape, gpu)
    if choice.fit is None or choice.fit.verdict != "fits":
        return 0.0
    return compute_speed(make_job(recipe, shape, choice.levers, gpus_per_node=gpu.gpus_per_node), gpu).tokens_per_second


def suggest_levers(job: Job, gpu: Gpu) -> str:
    """The cheapest change of levers that makes a job fit, as YAML; '' when no lever does. What spends memory goes
    first, also where the recipe asks for it."""
    open_names = [name for name in COSTS if name != "offload_param"]
    for has_disk in dict.fromkeys((job.has_disk, True)):
        tried = replace(job, levers=stop_spending(job.levers), has_disk=has_disk)
        levers = find_cheapest(tried, gpu, open_names) or find_cheapest(tried, gpu, list(COSTS))
        if levers is None:
            continue
        levers = keep_spending(replace(job, has_disk=has_disk), gpu, levers)
        tried = replace(tried, levers=levers)
        if judge(tried, compute_ledger(tried), gpu).verdict == "fits":
            lines = write_levers(levers, job.levers)
            if has_disk and not job.has_disk:
                needed = compute_node_disk_bytes(tried) / GIB
                lines.append(f"  nvme_path: {DISK}  # a folder on a local disk with {needed:,.0f} GiB free")
            return "\n".join(lines) + "\n"
    return ""


def explain_memory(recipe: Recipe, shape: ModelShape, levers: Levers, gpu: Gpu) -> str:
    """After memory ran out: the ledger's largest lines, and the cheapest change that needs less than this attempt."""
    job = make_job(recipe, shape, levers, gpus_per_node=gpu.gpus_per_node)
    ledger = compute_ledger(job)
    largest = sorted(ledger.peak.lines.items(), key=lambda line: -line[1])[:3]
    lines = ", ".join(f"{name} {num_bytes / GIB:.1f} GiB" for name, num_bytes in largest)
    tried = replace(gpu, memory_bytes=min(gpu.memory_bytes, int(LESS * ledger.gpu_peak_bytes)))
    change = suggest_levers(job, tried)
    if not change:
        length = find_max_length(job, tried)
        change = f"data:\n  max_length: {length}\n" if length else ""
    advice = f"; this needs less:\n{change}" if change else "; no lever and no shorter row helps: use more GPUs"
    return f"largest in {ledger.peak.phase}: {lines}{advice}"
