"""Values of a search: the request, a recipe drafted from a few facts (also for estimates without a recipe), GPUs on
offer with their prices, candidates with their cost, and the result; how far a predicted speed may be off; and the
walls that keep plans from fitting, with how far away the nearest plan is. Accuracy comes from errors for published
runs and from how processors differ: docs/benchmarks.md. Searches nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ulysses_cli.plan.hardware import GIB, Gpu, compute_cost, compute_price
from ulysses_cli.plan.layout import GPUS_PER_NODE, Layout
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.weights import get_weights
from ulysses_cli.plan.levers import Levers, get_key
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.planner.fit import Fit
from ulysses_cli.plan.rules.model import REPLACEABLE
from ulysses_cli.plan.speed import HOST, Speed
from ulysses_cli.plan.units import format_count, format_usd

PLAIN = re.compile(r"[A-Za-z][\w./-]*", re.ASCII)


@dataclass(frozen=True)
class Draft:
    """What decides a recipe's memory and speed. `levers` None leaves them to be chosen."""

    model: str
    max_length: int
    layout: Layout
    is_lora: bool = False
    lora_targets: tuple[str, ...] = ()  # none: all linear layers
    quantize_base: str | None = None
    levers: Levers | None = None
    accumulation: int = 1
    needs_stretch: bool = False
    dataset: str = "owner/texts"
    max_steps: int = 1
    zero_stage: int = 3
    is_packed: bool = True
    nvme_path: str | None = None
    gpu: str | None = None  # its kind


def find_obstacle(shape: ModelShape) -> str:
    """Why a row of this model cannot be split over ranks, or ''."""
    return shape.inexact


def find_sp_size(shape: ModelShape, num_processes: int, max_length: int, gpus_per_node: int = GPUS_PER_NODE) -> int:
    """The largest legal sp_size inside a node: it divides the processes and the row; a ring serves heads that it does
    not divide."""
    if find_obstacle(shape):
        return 1
    legal = [
        size
        for size in range(1, gpus_per_node + 1)
        if num_processes % size == 0 and max_length % size == 0 and shape.list_ring_sizes(size)
    ]
    return max(legal)


def needs_stretch(shape: ModelShape, max_length: int) -> bool:
    """Whether rows exceed the pretrained positions of a model whose positions can be stretched."""
    return max_length > shape.max_position_embeddings and shape.rope_type in REPLACEABLE


def write_draft(draft: Draft, header: tuple[str, ...] = ()) -> str:
    """The recipe as YAML; settings at their default are left out."""
    layout = draft.layout
    lines = [f"# {line}".rstrip() for line in header] + ([""] if header else [])
    lines += ["model:", f"  name_or_path: {quote(draft.model)}"]
    if draft.needs_stretch:
        lines += ["  rope_scaling:", "    type: yarn"]
    sizes = {
        "sp_size": layout.sp_size,
        "dp_shard_size": layout.dp_shard_size,
        "dp_replicate_size": layout.dp_replicate_size,
    }
    parallel = [f"  {name}: {size}" for name, size in sizes.items() if size > 1]
    if layout.ring_size > 1 or layout.sp_size > GPUS_PER_NODE:  # auto may choose another
        parallel.append(f"  ring_size: {layout.ring_size}")
    parallel += [f"  zero_stage: {draft.zero_stage}"] if draft.zero_stage != 3 else []
    lines += ["", "parallel:", *parallel] if parallel else []
    lines += ["", "data:", "  datasets:", f"    - path: {draft.dataset}", f"  max_length: {draft.max_length}"]
    lines += [] if draft.is_packed else ["  packing: off"]
    lines += ["", "train:", f"  max_steps: {draft.max_steps}"]
    if draft.accumulation > 1:
        lines.append(f"  gradient_accumulation_steps: {draft.accumulation}")
    if draft.levers is not None:
        lines += ["", *write_levers(draft.levers)]
        lines += [f"  nvme_path: {quote(draft.nvme_path)}"] if draft.nvme_path is not None else []
    if draft.is_lora:
        lines += ["", "lora:", "  r: 16", "  alpha: 32"]
        lines += [f"  target_modules: [{', '.join(draft.lora_targets)}]"] if draft.lora_targets else []
        lines += [f"  quantize_base: {draft.quantize_base}"] if draft.quantize_base is not None else []
    lines += ["", "run:", f"  gpu: {quote(draft.gpu)}"] if draft.gpu is not None else []
    return "\n".join(lines) + "\n"


def quote(text: str) -> str:
    """As YAML reads it: plain where that is safe, otherwise in JSON's quotes."""
    return text if PLAIN.fullmatch(text) else json.dumps(text)


def write_levers(levers: Levers, base: Levers | None = None) -> list[str]:
    """The memory section; only what differs from `base`, if given."""
    before = vars(base) if base is not None else {}
    values = vars(levers).items()
    changed = {get_key(name): value for name, value in values if name not in before or before[name] != value}
    spelled = {name: str(value).lower() if isinstance(value, bool) else value for name, value in changed.items()}
    return ["memory:", *(f"  {name}: {value}" for name, value in spelled.items())] if changed else []


# The worst errors of predicted tokens/s for published runs of other programs (benchmarks/published.py), too low and
# too high: on one machine of H100 or A100, and on several machines or with another exchange.
NEAR, FAR = (-0.15, 0.08), (-0.15, 0.55)
COMPARED = ("h100-80gb", "a100-80gb")
# How far a processor's time may be from the costs of hardware.yaml, which are a GPU's: cores of servers, and a busy one
# from an idle one, differ by about this factor.
HOST_FACTOR = 1.5


@dataclass(frozen=True)
class Accuracy:
    """`low` and `high`: what tokens per second may be, as shares of the predicted."""

    low: float
    high: float
    reason: str


def judge_speed(job: Job, gpu: Gpu, speed: Speed) -> Accuracy:
    on_one = job.world_size <= gpu.gpus_per_node
    too_low, too_high = NEAR if gpu.key in COMPARED and on_one else FAR
    of_what = "published runs on several machines"
    if gpu.key in COMPARED and on_one:
        of_what = "published runs on one machine of this kind"
    elif gpu.key not in COMPARED:
        of_what = "no published run on this kind was compared; those on several machines of others"
    reason = f"{of_what} were predicted {-too_low:.0%} too low to {too_high:.0%} too high"
    low, high = 1 / (1 + too_high), 1 / (1 + too_low)
    slow, fast = (_exchange_host(job, speed, factor) / speed.step_seconds for factor in (HOST_FACTOR, 1 / HOST_FACTOR))
    return Accuracy(min(low, 1 / slow), max(high, 1 / fast), reason)


def _exchange_host(job: Job, speed: Speed, factor: float) -> float:
    """Seconds of a step on a processor that takes `factor` times as long."""
    waits = job.accumulation * max(0.0, factor * speed.host_seconds - speed.device_seconds)
    return speed.step_seconds - speed.parts[HOST] + waits + (factor - 1) * speed.optimizer_host_seconds


GIGA = 1e9
TOKENS_PER_STEP = 1 << 20  # published fine-tunings on long rows take 0.5 to 4 million
MIN_STEPS = 100  # that a plan has, unless its tokens are too few rows

# What each method trains: adapters instead of all weights, and the format of the base under them.
METHODS: dict[str, tuple[bool, str | None]] = {"full": (False, None), "lora": (True, None), "qlora": (True, "nf4")}

# A start: docs/estimating.md has the reasons. No GPU has measured it.
PROCESS_SECONDS = 120.0  # processes, imports, groups of ranks, kernels that are compiled or chosen
DOWNLOAD_GB_S = 0.5  # of a machine, for the weights: 4 Gbit/s
MOST_STARTUP = 0.2  # of a plan's hours: each start of the run costs it again
STATE_BYTES = 14  # of a trained weight in a checkpoint: bfloat16, and three float32 numbers of Adam


@dataclass(frozen=True)
class PlanRequest:
    """What a plan must do: train rows of `max_length` tokens, `num_tokens` in all. None means no bound.
    `quantize_base`: the format of the base under adapters. `nvme_path`: a folder on a local disk of each machine.
    `tokens_per_step`: None chooses them. `has_pairs`: answers are compared, which read one copy of their prompt."""

    shape: ModelShape
    max_length: int
    num_tokens: int
    is_lora: bool = False
    budget_usd: float | None = None
    deadline_seconds: float | None = None
    quantize_base: str | None = None
    nvme_path: str | None = None
    tokens_per_step: int | None = None
    has_pairs: bool = False

    @property
    def method(self) -> str:
        return next(name for name, what in METHODS.items() if what == (self.is_lora, self.quantize_base))

    @property
    def rows_per_step(self) -> int:
        """The same for every candidate, whatever its layout: another number would be another training. A given number
        of tokens is rounded up to whole rows; otherwise a power of two, which most numbers of GPUs divide."""
        if self.tokens_per_step is not None:
            return -(-self.tokens_per_step // self.max_length)
        most = min(TOKENS_PER_STEP, self.num_tokens // MIN_STEPS) // self.max_length
        return 1 << max(0, most.bit_length() - 1)

    @property
    def zero_stage(self) -> int:
        """A quantized base is whole on each GPU."""
        return 3 if self.quantize_base is None else 2


@dataclass(frozen=True)
class Offer:
    """GPUs of one kind that are available, and at most how many."""

    gpu: Gpu
    max_gpus: int


@dataclass(frozen=True)
class Candidate:
    """One plan: a job on GPUs of one kind, whether it fits, and how fast it is."""

    gpu: Gpu
    job: Job
    fit: Fit
    speed: Speed
    num_tokens: int

    @property
    def training_seconds(self) -> float:
        return self.num_tokens / self.speed.tokens_per_second

    @property
    def startup_seconds(self) -> float:
        """Until the first step: processes, weights to every machine and from its disk, the rehearsal of a step and a
        save."""
        weights, disk_bytes_per_second = get_weights(self.job), GIGA * self.gpu.efficiency.disk_gb_s
        loaded = weights.num_elements * self.job.dtype_bytes
        saved = STATE_BYTES * weights.num_trained / self.job.num_nodes
        seconds = loaded / (GIGA * DOWNLOAD_GB_S) + (loaded + saved) / disk_bytes_per_second
        return PROCESS_SECONDS + seconds + self.speed.step_seconds

    @cached_property
    def accuracy(self) -> Accuracy:
        return judge_speed(self.job, self.gpu, self.speed)

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        """The least and the most that it may be."""
        rate = self.speed.tokens_per_second
        return rate * self.accuracy.low, rate * self.accuracy.high

    @property
    def seconds_range(self) -> tuple[float, float]:
        """At the highest and at the lowest speed. Every order and bound takes `seconds`, between them."""
        fast, slow = (self.training_seconds / share for share in (self.accuracy.high, self.accuracy.low))
        return self.startup_seconds + fast, self.startup_seconds + slow

    @property
    def limit(self) -> str:
        return self.speed.limit

    @property
    def seconds(self) -> float:
        return self.startup_seconds + self.training_seconds

    @property
    def gpu_seconds(self) -> float:
        return self.seconds * self.job.world_size

    @property
    def is_justified(self) -> bool:
        """GPUs that spend much of their time on starting are more than the work needs."""
        return self.startup_seconds <= MOST_STARTUP * self.seconds

    @property
    def usd(self) -> tuple[float, float] | None:
        """The shortest time at the low price, and the longest at the high one."""
        least, most = (compute_cost(seconds, self.job.world_size, self.gpu) for seconds in self.seconds_range)
        return None if least is None or most is None else (least[0], most[1])

    @property
    def usd_middle(self) -> float:
        price = self.gpu.usd_middle
        return float("inf") if price is None else compute_price(self.seconds, self.job.world_size, price)


@dataclass(frozen=True)
class Wall:
    """Why no candidate is inside the bounds, how far away the nearest one is, and what would help."""

    kind: str  # gpu, host, heads, price, deadline
    message: str
    hint: str


@dataclass(frozen=True)
class SearchResult:
    """Candidates inside all bounds, best first by cost and by time; or the walls. `left_out`: kind of GPU -> why none
    of its candidates is listed. `rings`: what the ring of each listed candidate gains over another."""

    by_cost: tuple[Candidate, ...]
    by_time: tuple[Candidate, ...]
    walls: tuple[Wall, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    rings: tuple[str, ...] = ()


def round_cost(usd: float) -> float:
    """To two digits; smaller differences do not count."""
    return float(f"{usd:.2g}")


MOST_TIMES_CHEAPER = 3  # farther over the budget, adapters are no way out


def count_distance(fit: Fit) -> tuple[bool, float]:
    """The distance from fitting, as a sort key: what fits the GPU comes before what does not."""
    if fit.wall == "host":
        return False, fit.host_peak_bytes / fit.host_capacity_bytes
    return True, fit.gpu_peak_bytes / fit.gpu_capacity_bytes


def find_excess(request: PlanRequest, candidate: Candidate) -> str:
    """The bound that a fitting candidate breaks, or ''."""
    if request.deadline_seconds is not None and candidate.seconds > request.deadline_seconds:
        return "deadline"
    if request.budget_usd is not None and candidate.usd_middle > request.budget_usd:
        return "price"
    return ""


BEHIND = "fits, behind the others"


def explain_absence(request: PlanRequest, gpu: Gpu, tried: Sequence[Candidate]) -> str:
    """Why a kind of GPU is not among the best, though others are."""
    own = [plan for plan in tried if plan.gpu.key == gpu.key]
    fitting = [plan for plan in own if plan.fit.verdict == "fits"]
    if not own:
        return "no kernel can index a row on so few of them"
    if not fitting:
        near = min(own, key=lambda plan: count_distance(plan.fit))
        fit = near.fit
        needs, has, what = fit.gpu_peak_bytes, fit.gpu_capacity_bytes, "on each GPU"
        if fit.wall == "host":
            needs, has, what = fit.host_peak_bytes, fit.host_capacity_bytes, "of host memory"
        verb = "needs" if near.job.world_size == 1 else "need"
        return f"does not fit: {near.job.world_size} of them {verb} {needs / GIB:,.1f} GiB {what}, of {has / GIB:,.1f}"
    cheapest, fastest = min(plan.usd_middle for plan in fitting), min(plan.seconds for plan in fitting)
    if request.budget_usd is not None and gpu.usd_middle is None:
        return "no price is known for it, so --budget cannot be checked: add usd_per_hour to hardware.yaml"
    if request.budget_usd is not None and cheapest > request.budget_usd:
        return f"the cheapest that fits costs about {format_usd(cheapest, digits=2)}"
    if request.deadline_seconds is not None and fastest > request.deadline_seconds:
        return f"the fastest that fits takes {fastest / 3600:.3g} h"
    return BEHIND if any(not find_excess(request, plan) for plan in fitting) else "misses either --deadline or --budget"


def list_walls(
    request: PlanRequest,
    offers: Sequence[Offer],
    layouts: Sequence[tuple[Job, list[Gpu]]],
    tried: Sequence[Candidate],
    fitting: Sequence[Candidate],
) -> list[Wall]:
    """For candidates that fit, the bounds of time and money; otherwise the memory, host and heads that are too
    small."""
    if fitting:
        walls = [_find_deadline_wall(request, fitting), _find_price_wall(request, fitting)]
    elif not tried:
        walls = [_find_index_wall(request, offers)]
    else:
        on_host = _find_host_wall(request, tried)
        walls = [_find_gpu_wall(request, tried), on_host, _find_heads_wall(request, offers, layouts)]
    return [wall for wall in walls if wall is not None]


def _format_ratio(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"


def _find_deadline_wall(request: PlanRequest, fitting: Sequence[Candidate]) -> Wall | None:
    if request.deadline_seconds is None:
        return None
    hours, most = min(plan.seconds for plan in fitting) / 3600, request.deadline_seconds / 3600
    message = (
        f"the fastest that fits takes {hours:.3g} h, {_format_ratio(hours / most)} times the deadline of {most:.3g} h"
    )
    if hours <= most:
        message = f"what meets the deadline of {most:.3g} h costs more than the budget"
    return Wall("deadline", message, "offer more GPUs, allow more time, or train on fewer tokens")


def _find_price_wall(request: PlanRequest, fitting: Sequence[Candidate]) -> Wall | None:
    if request.budget_usd is None:
        return None
    cheapest = min(fitting, key=lambda plan: plan.usd_middle)
    usd = cheapest.usd_middle
    if usd == float("inf"):
        return Wall("price", "no price is known for any kind that fits", "add usd_per_hour to hardware.yaml")
    cost = format_usd(usd, digits=2)
    ratio = usd / request.budget_usd
    times = f"{float(f'{ratio:.2g}'):,g}"  # as many digits as the price
    message = f"the cheapest that fits costs about {cost}, {times} times the budget"
    if usd <= request.budget_usd:
        hours = cheapest.seconds / 3600
        message = f"the cheapest, about {cost}, is inside the budget but takes {hours:.3g} h"
    other = _suggest_lora(request) if ratio < MOST_TIMES_CHEAPER else ""
    return Wall("price", message, f"raise --budget, or train on fewer tokens{other}")


def _find_index_wall(request: PlanRequest, offers: Sequence[Offer]) -> Wall:
    widest = max((offer.max_gpus for offer in offers), default=0)
    message = (
        f"rows of {request.max_length:,} tokens are longer than kernels can index on {format_count(widest, 'GPU')}"
    )
    hint = "use shorter rows, or let more GPUs share a row, as far as the number of heads allows"
    if widest > 1 and request.max_length % 8:
        hint = f"{request.max_length:,} divides by few sp_sizes: use {request.max_length // 8 * 8:,}, or shorter rows"
    return Wall("heads", message, hint)


def _find_gpu_wall(request: PlanRequest, tried: Sequence[Candidate]) -> Wall | None:
    on_gpu = [plan for plan in tried if plan.fit.wall == "gpu"]
    if not on_gpu:
        return None
    near = min(on_gpu, key=lambda plan: plan.fit.gpu_peak_bytes / plan.fit.gpu_capacity_bytes)
    needs, spare, has = (
        size / GIB for size in (near.fit.gpu_peak_bytes, near.fit.uncertainty_bytes, near.fit.gpu_capacity_bytes)
    )
    how = f"{near.job.world_size} x {near.gpu.key} with sp_size {near.job.layout.sp_size} and the smallest levers"
    message = f"nearest is {how}: {needs:.1f} GiB and {spare:.1f} for safety, of {has:.1f}"
    return Wall("gpu", message, f"offer GPUs with more memory, more of them, or shorter rows{_suggest_lora(request)}")


def _find_host_wall(request: PlanRequest, tried: Sequence[Candidate]) -> Wall | None:
    on_host = [plan for plan in tried if plan.fit.wall == "host"]
    if not on_host:
        return None
    near = min(on_host, key=lambda plan: plan.fit.host_peak_bytes / plan.fit.host_capacity_bytes)
    needs, has = near.fit.host_peak_bytes / GIB, near.fit.host_capacity_bytes / GIB
    message = (
        f"{near.job.world_size} x {near.gpu.key} need {needs:,.0f} GiB of host memory, "
        f"{near.fit.host_uncertainty_bytes / GIB:,.0f} for safety, on a node of about {has:,.0f}"
    )
    hint = "offer machines with more memory (host_gib_per_gpu in hardware.yaml)"
    if request.nvme_path is None:
        hint += ", or name a folder on their local disks for states and activations: --nvme-path"
    return Wall("host", message, hint)


def _find_heads_wall(
    request: PlanRequest, offers: Sequence[Offer], layouts: Sequence[tuple[Job, list[Gpu]]]
) -> Wall | None:
    most = max(job.layout.sp_size for job, _ in layouts)
    if most >= max(offer.max_gpus for offer in offers):
        return None
    limit = find_obstacle(request.shape) or format_count(request.shape.num_heads, "head")
    message = f"a row is shared by at most {format_count(most, 'GPU')} here: {limit}"
    return Wall("heads", message, "sp_size divides the heads")


def _suggest_lora(request: PlanRequest) -> str:
    if request.quantize_base is not None:
        return ""
    return ", or try --method qlora" if request.is_lora else ", or try --method lora"
