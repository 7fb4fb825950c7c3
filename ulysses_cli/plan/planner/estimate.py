"""One recipe on one kind of GPU: memory, time, money, the longest row, what to change when it does not fit, and
whether the GPU waits for the processor that launches its kernels, with the changes that help. Prints nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ulysses_cli.plan.hardware import GIB, Gpu, compute_cost
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.job import Job, is_indexable, make_job
from ulysses_cli.plan.ledger.ledger import Ledger, measure_ledger, weigh_ledger
from ulysses_cli.plan.ledger.machine import compute_node_disk_bytes
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.planner.candidates import Accuracy, judge_speed, write_levers
from ulysses_cli.plan.planner.fit import (
    ROW_MULTIPLE,
    Fit,
    confirm,
    confirm_length,
    find_max_length,
    judge,
    lower_stage,
)
from ulysses_cli.plan.planner.lever_choice import (
    COSTS,
    LeverChoice,
    choose_for_job,
    choose_levers,
    explain_given_stage,
    find_cheapest,
    find_longest,
    read_levers,
)
from ulysses_cli.plan.planner.rings import (
    BetterRing,
    LayoutInside,
    explain_own_ring,
    find_better_ring,
    find_layout_inside,
)
from ulysses_cli.plan.planner.spending import keep_spending, stop_spending
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.speed import Speed, compute_reference_seconds, compute_speed, explain_packed

MORE = 4  # times as many tokens in a micro-step
LEAST_GAIN = 1.05
MOST_NAMED = 3


@dataclass(frozen=True)
class HostRemedy:
    """A change that fits, and how many times as many tokens per second it gives."""

    change: str
    gain: float


@dataclass(frozen=True)
class HostBound:
    """Seconds of a micro-step on both sides, and what helps, the best first."""

    host_seconds: float
    device_seconds: float
    remedies: tuple[HostRemedy, ...]

    def explain(self) -> list[str]:
        """What it is, and what helps."""
        host, device = (format_milliseconds(each) for each in (self.host_seconds, self.device_seconds))
        times = [f"{each.change} ({each.gain:.1f} times the tokens/s)" for each in self.remedies[:MOST_NAMED]]
        helps = ", or ".join(times) or "no change of one key that fits; a faster processor"
        return [
            f"by the host: a processor takes about {host} to launch a micro-step, which the GPU computes in {device}",
            f"what helps: {helps}; longer packed rows help as a larger batch does; there are no CUDA graphs",
        ]


def format_milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


def find_host_bound(job: Job, gpu: Gpu) -> HostBound | None:
    """None where the GPU is the limit."""
    speed, found = compute_speed(job, gpu), list[HostRemedy]()
    if not speed.is_host_bound:
        return None
    for change, tried in _list_changes(job):
        gain = compute_speed(tried, gpu).tokens_per_second / speed.tokens_per_second
        if gain >= LEAST_GAIN and judge(tried, weigh_ledger(tried), gpu).verdict == "fits":
            found.append(HostRemedy(change, gain))
    found.sort(key=lambda remedy: -remedy.gain)
    best = {remedy.change.partition(":")[0]: remedy for remedy in reversed(found)}  # of each key
    return HostBound(speed.host_seconds, speed.device_seconds, tuple(each for each in found if each in best.values()))


def _list_changes(job: Job) -> Iterator[tuple[str, Job]]:
    levers, layout = job.levers, job.layout
    yield (
        f"train.per_device_train_batch_size: {MORE * job.batch}",
        replace(job, batch=MORE * job.batch, accumulation=max(1, job.accumulation // MORE)),
    )
    for size in dict.fromkeys((*job.shape.sp_sizes, 1)):
        if size < layout.sp_size and layout.sp_size % size == 0:
            yield f"parallel.sp_size: {size}", replace(job, layout=_share_rows(layout, size))
    if (whole := lower_stage(job)) is not None:
        yield f"parallel.zero_stage: {whole.zero_stage}", whole
    for words, changed in (
        ("memory.gradient_checkpointing: false", {"gradient_checkpointing": False, "offloaded_layers": 0}),
        ("memory.large_tiles: true", {"large_tiles": True}),
        ("memory.tiled_mlp: false", {"tiled_mlp": False}),
        ("memory.activation_offloading: false", {"offloaded_layers": 0}),
        ("memory.attention_head_chunks: 1", {"head_chunks": 1, "overlap_exchange": False}),
        ("memory.offload_param: none", {"offload_param": "none"}),
    ):
        if any(getattr(levers, name) != value for name, value in changed.items()):
            yield words, job.with_levers(replace(levers, **changed))


DISK = "/mnt/nvme"
LESS = 0.95  # of the ledger's peak, since memory ran out below the peak


MOST_DOUBLED = 8  # times that a row's length, or the rows of a micro-step, are doubled


def explain_gathers(job: Job, gpu: Gpu) -> str:
    """How ZeRO-3's gathers compare with the computation in a model with experts, which computes with few of the weights
    that it gathers, and what makes them short beside it; '' of any other job. Does not say whether that fits."""
    if job.zero_stage != 3 or job.world_size == 1 or not any(layer.num_experts for layer in job.shape.layers):
        return ""

    def measure(tried: Job) -> float:
        return compute_speed(tried, gpu).gather_over_compute

    said = f"gathering weights and summing gradients takes {measure(job):.2g} times as long as computing"
    if measure(job) <= 1:
        return f"{said}: it can be hidden"
    factors = [2**power for power in range(1, MOST_DOUBLED + 1)]
    changes = [
        *(
            (f"parallel.sp_size: {size}", replace(job, layout=_share_rows(job.layout, size)))
            for size in sorted(job.shape.sp_sizes, reverse=True)
            if size < job.layout.sp_size and job.layout.sp_size % size == 0
        ),
        *((f"train.per_device_train_batch_size: {n * job.batch}", replace(job, batch=n * job.batch)) for n in factors),
        *((f"data.max_length: {n * job.max_length}", replace(job, max_length=n * job.max_length)) for n in factors),
    ]
    helps: dict[str, str] = {}
    for change, tried in changes:
        kind = change.rpartition(" ")[0]
        if kind not in helps and measure(tried) <= 1:
            helps[kind] = change
    return f"{said}; it can be hidden with {', or '.join(helps.values())}" if helps else said


def _share_rows(layout: Layout, sp_size: int) -> Layout:
    """As many ranks, fewer for a row."""
    return Layout(layout.dp_replicate_size, layout.dp_shard_size * layout.sp_size // sp_size, sp_size)


@dataclass(frozen=True)
class Estimate:
    """Everything about one job on one GPU kind. `suggestion` is YAML, or '' where no change is needed or helps."""

    gpu: Gpu
    job: Job
    longer: Job  # as longer rows have it: with no lower stage of ZeRO than `auto` starts from
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
    has_reference: bool = False  # answers are compared with the model before step 1
    masks_tokens: bool = False  # prompts or users' turns are no targets

    @cached_property
    def slow_attention(self) -> str:
        """What a kernel costs that `auto` may have to take."""
        return explain_packed(self.job, self.gpu) if self.job.kernel == "auto" else ""

    @cached_property
    def gathers(self) -> str:
        return explain_gathers(self.job, self.gpu)

    @property
    def ends_at_index(self) -> bool:
        """Whether kernels' limit of 2^31 elements, and not memory, bounds the longest row with these levers."""
        longer = self.max_length + self.max_length // 256 + self.job.layout.sp_size * ROW_MULTIPLE
        return self.max_length > 0 and not is_indexable(replace(self.job, max_length=longer))

    @cached_property
    def accuracy(self) -> Accuracy:
        return judge_speed(self.job, self.gpu, self.speed)

    @property
    def reference_share(self) -> float | None:
        """Of the first epoch's steps, the time of the forward before them; None where there is none."""
        return compute_reference_seconds(self.job, self.gpu) / self.speed.step_seconds if self.has_reference else None

    @property
    def head_share(self) -> float | None:
        """Of a step, the time of the head on all tokens, where it runs on some alone: how many is known once the data
        is prepared. None where all are targets, or may be."""
        return self.speed.parts["head_loss"] / self.speed.step_seconds if self.masks_tokens else None

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
    choice, ledger = choose_for_job(job, gpu, open_names, explain_given_stage(recipe))
    settled = choice.make_job(recipe, shape, gpu)
    fit = judge(settled, ledger, gpu)
    # A longer row, or one that does not fit, leaves no memory for large tiles, early steps and whole weights.
    frugal = job.with_levers(stop_spending(choice.levers, open_names))
    own = job.max_length if fit.verdict == "fits" else 0  # which need not be a whole multiple
    return Estimate(
        gpu=gpu,
        job=settled,
        longer=job.with_levers(choice.levers),
        choice=choice,
        ledger=ledger,
        fit=fit,
        speed=compute_speed(settled, gpu),
        max_length=max(own, confirm_length(frugal, gpu, find_max_length(frugal, gpu), frugal.levers)),
        max_length_all_levers=max(own, confirm_length(frugal, gpu, *find_longest(frugal, gpu))),
        suggestion="" if fit.verdict == "fits" else suggest_levers(frugal, gpu),
        better_ring=find_better_ring(settled, gpu),
        host_bound=find_host_bound(settled, gpu),
        own_ring=explain_own_ring(settled, gpu),
        inside=find_layout_inside(settled, gpu, job, open_names),
        has_reference=recipe.preference is not None and recipe.preference.has_reference,
        masks_tokens=_masks_tokens(recipe),
    )


def _masks_tokens(recipe: Recipe) -> bool:
    """Whether it is certain before data is read."""
    types = {dataset.type for dataset in recipe.data.datasets}
    has_prompts = recipe.data.completion_only_loss and bool(types & {"completion", "answers", "instruction"})
    return recipe.preference is not None or recipe.data.assistant_only_loss or has_prompts


def find_rate(recipe: Recipe, shape: ModelShape, gpu: Gpu) -> float:
    """Tokens per second where the recipe fits for sure, else 0; a fraction of the work of an estimate."""
    choice = choose_levers(recipe, shape, gpu)
    if choice.fit is None or choice.fit.verdict != "fits":
        return 0.0
    return compute_speed(choice.make_job(recipe, shape, gpu), gpu).tokens_per_second


def suggest_levers(job: Job, gpu: Gpu) -> str:
    """The cheapest change of levers that makes a job fit, as YAML; '' when no lever does. What spends memory goes
    first, also where the recipe asks for it."""
    open_names = [name for name in COSTS if name != "offload_param"]
    for has_disk in dict.fromkeys((job.has_disk, True)):
        spending = replace(job, has_disk=has_disk)
        given = replace(spending, levers=stop_spending(job.levers))

        def propose(room: Gpu, given: Job = given, spending: Job = spending) -> Job:
            levers = find_cheapest(given, room, open_names) or find_cheapest(given, room, list(COSTS))
            return given if levers is None else replace(given, levers=keep_spending(spending, room, levers))

        found, ledger = confirm(propose, gpu)
        if judge(found, ledger, gpu).verdict == "fits":
            lines = write_levers(found.levers, job.levers)
            if has_disk and not job.has_disk:
                needed = compute_node_disk_bytes(found) / GIB
                lines.append(f"  nvme_path: {DISK}  # a folder on a local disk with {needed:,.0f} GiB free")
            return "\n".join(lines) + "\n"
    return ""


def explain_memory(recipe: Recipe, shape: ModelShape, levers: Levers, gpu: Gpu) -> str:
    """After memory ran out: the ledger's largest lines, and the cheapest change that needs less than this attempt."""
    job = make_job(recipe, shape, levers, gpus_per_node=gpu.gpus_per_node)
    ledger = measure_ledger(job)
    largest = sorted(ledger.peak.lines.items(), key=lambda line: -line[1])[:3]
    lines = ", ".join(f"{name} {num_bytes / GIB:.1f} GiB" for name, num_bytes in largest)
    tried = replace(gpu, memory_bytes=min(gpu.memory_bytes, int(LESS * ledger.gpu_peak_bytes)))
    change = suggest_levers(job, tried)
    if not change:
        length = find_max_length(job, tried)
        change = f"data:\n  max_length: {length}\n" if length else ""
    advice = f"; this needs less:\n{change}" if change else "; no lever and no shorter row helps: use more GPUs"
    return f"largest in {ledger.peak.phase}: {lines}{advice}"
