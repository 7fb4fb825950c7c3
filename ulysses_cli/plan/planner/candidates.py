"""Values of a search: the request, GPUs on offer with their prices, candidates with their cost, and the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ulysses_cli.plan.hardware import Gpu, compute_cost, compute_price
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.planner.accuracy import Accuracy, judge_speed
from ulysses_cli.plan.planner.fit import Fit
from ulysses_cli.plan.speed import Speed

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
    `tokens_per_step`: None chooses them."""

    shape: ModelShape
    max_length: int
    num_tokens: int
    is_lora: bool = False
    budget_usd: float | None = None
    deadline_seconds: float | None = None
    quantize_base: str | None = None
    nvme_path: str | None = None
    tokens_per_step: int | None = None

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
        weights, disk_bytes_per_second = self.job.weights, GIGA * self.gpu.efficiency.disk_gb_s
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
