"""What the planner is asked, offered and finds: plain values, and money as it is written. Searches nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.planner.fit import Fit
from ulysses_cli.plan.speed import Speed, compute_cost


@dataclass(frozen=True)
class Wish:
    """What is asked: rows of that length, so many tokens in all. Bounds of None are none."""

    shape: ModelShape
    max_length: int
    num_tokens: int
    is_lora: bool = False
    budget_usd: float | None = None
    deadline_seconds: float | None = None


@dataclass(frozen=True)
class Offer:
    """GPUs of one kind that could be had, at most."""

    gpu: Gpu
    max_gpus: int


@dataclass(frozen=True)
class Candidate:
    """One way to do it."""

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
        return float("inf") if price is None else self.seconds / 3600 * self.job.world_size * price


@dataclass(frozen=True)
class Wall:
    """What stands in the way, how far away the nearest candidate is, and what would help."""

    kind: str  # gpu, host, heads, price, deadline
    message: str
    hint: str


@dataclass(frozen=True)
class SearchResult:
    """Candidates inside all bounds, best first by cost and by time, or the walls. `left_out`: kind of GPU -> why none
    of its candidates is among them."""

    by_cost: tuple[Candidate, ...]
    by_time: tuple[Candidate, ...]
    walls: tuple[Wall, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)


def round_cost(usd: float) -> float:
    """To two digits: less is no difference."""
    return float(f"{usd:.2g}")


def format_usd(usd: float) -> str:
    return f"USD {round_cost(usd):,.0f}" if usd >= 10 else f"USD {usd:.2g}"
