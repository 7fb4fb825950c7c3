"""Values of a search: the request, GPUs on offer with their prices, candidates with their cost, and the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ulysses_cli.plan.hardware import Gpu, compute_cost, compute_price
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.planner.fit import Fit
from ulysses_cli.plan.speed import Speed


@dataclass(frozen=True)
class PlanRequest:
    """What a plan must do: train rows of `max_length` tokens, `num_tokens` in all. None means no bound.
    `quantize_base`: the format of the base under adapters. `nvme_path`: a folder on a local disk of each machine."""

    shape: ModelShape
    max_length: int
    num_tokens: int
    is_lora: bool = False
    budget_usd: float | None = None
    deadline_seconds: float | None = None
    quantize_base: str | None = None
    nvme_path: str | None = None

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
    def seconds(self) -> float:
        return self.num_tokens / self.speed.tokens_per_second

    @property
    def usd(self) -> tuple[float, float] | None:
        return compute_cost(self.seconds, self.job.world_size, self.gpu)

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
