"""Which levers a job needs: every combination of those left open is held against the ledger, and the cheapest that fits
is taken. Says why for each. Training and validate-config call `choose_levers`; nothing here guesses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ulysses_cli.plan.fit import ROW_MULTIPLE, Fit, find_max_length, fits, is_indexable, judge
from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.layout import list_divisors
from ulysses_cli.plan.ledger.job import Job, make_job
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.memory import compute_ledger
from ulysses_cli.plan.model_shape import ModelShape
from ulysses_cli.plan.recipe import Recipe

# What each lever costs against the others: the sum of all before it is less. Tiles cost next to nothing, recomputing a
# layer a third of its time, the optimizer on the host seconds in every step.
COSTS = {
    "tiled_loss": 1,
    "tiled_mlp": 2,
    "activation_offloading": 4,
    "head_chunks": 8,
    "gradient_checkpointing": 32,
    "offload_optimizer": 64,
    "offload_param": 128,
}
KEYS = {name: f"memory.{name}" for name in COSTS} | {"head_chunks": "memory.attention_head_chunks"}
OFF = Levers()
FEW_CHUNKS = (1, 2, 4)  # and as many as there are heads: those between save little more


@dataclass(frozen=True)
class Choice:
    """Settled levers, a reason for each that the recipe left open, and whether the job fits with them."""

    levers: Levers
    reasons: dict[str, str]
    fit: Fit | None


def read_levers(recipe: Recipe) -> tuple[Levers, list[str]]:
    """What the recipe says, with `auto` as off, and the names that it left open."""
    memory = recipe.memory
    written: dict[str, Any] = {
        "head_chunks": memory.attention_head_chunks,
        "activation_offloading": memory.activation_offloading,
        "tiled_mlp": memory.tiled_mlp,
        "tiled_loss": memory.tiled_loss,
        "offload_optimizer": memory.offload_optimizer,
        "offload_param": memory.offload_param,
    }
    open_names = [name for name, value in written.items() if value == "auto"]
    settled = {name: value for name, value in written.items() if value != "auto"}
    return replace(OFF, gradient_checkpointing=memory.gradient_checkpointing, **settled), open_names


def choose_levers(recipe: Recipe, shape: ModelShape, gpu: Gpu | None) -> Choice:
    """For a recipe that passed its checks. Without a GPU (a run on the CPU) levers stay off."""
    levers, open_names = read_levers(recipe)
    if gpu is None:
        return Choice(levers, dict.fromkeys(open_names, "off: no GPU is named"), None)
    return choose_for_job(make_job(recipe, shape, levers, gpus_per_node=gpu.gpus_per_node), gpu, open_names)


def choose_for_job(job: Job, gpu: Gpu, open_names: list[str]) -> Choice:
    chosen = find_cheapest(job, gpu, open_names)
    if chosen is None:  # nothing fits: everything that helps
        chosen = min(_walk_levers(job, open_names), key=lambda each: _count_peak(replace(job, levers=each)))
    settled = replace(job, levers=chosen)
    fit = judge(settled, compute_ledger(settled), gpu)
    return Choice(chosen, {name: _explain(settled, gpu, name, fit) for name in open_names}, fit)


def find_cheapest(job: Job, gpu: Gpu, open_names: list[str]) -> Levers | None:
    """The cheapest combination of the open levers that fits: surely if there is one, otherwise closely."""
    close = None
    for levers in list_ranked_levers(job, open_names):
        tried = replace(job, levers=levers)
        if not is_indexable(tried):
            continue
        verdict = judge(tried, compute_ledger(tried), gpu).verdict
        if verdict == "fits":
            return levers
        if verdict == "too_close" and close is None:
            close = levers
    return close


def list_ranked_levers(job: Job, open_names: list[str]) -> list[Levers]:
    """Every combination of the open levers, the cheapest first."""
    return sorted(_walk_levers(job, open_names), key=lambda each: _count_cost(each, job.levers))


def list_strongest(job: Job) -> list[Levers]:
    """What may let the longest row fit: most levers first, the given ones at the end. No set is the smallest for every
    job: the host has no room for all that could go there, tiles of an MLP add float32 sums of its gradients, on one GPU
    weights in host memory are gathered, and a result of attention that is kept spares an exchange its buffers."""
    most = job.shape.num_heads // job.layout.sp_size
    walked = [each for each in _walk_levers(job, list(COSTS)) if each.head_chunks in (1, most)]
    walked = [each for each in walked if each.gradient_checkpointing is not False]
    return [*sorted(dict.fromkeys(walked), key=lambda each: -_count_cost(each, OFF)), job.levers]


def list_smallest(job: Job) -> list[Levers]:
    """Those of them among which the least GPU memory is: what may only spare the host is left out."""
    optimizer = "cpu" if job.optim == "adamw" else "none"
    strongest = list_strongest(job)
    return [each for each in strongest if each.activation_offloading and each.offload_optimizer == optimizer]


def find_longest(job: Job, gpu: Gpu) -> tuple[int, Levers]:
    """The longest row with whatever levers, never shorter than with the given ones; and the levers. Each set is asked
    for a row that is longer than the best so far, and only if it fits is its own longest row looked for."""
    best, chosen = find_max_length(job, gpu), job.levers
    multiple = job.layout.sp_size * ROW_MULTIPLE
    for levers in list_strongest(job):
        tried = replace(job, levers=levers)
        longer = best + max(1, best // multiple // 256) * multiple
        if fits(replace(tried, row_tokens=longer), gpu):
            best, chosen = max(longer, find_max_length(tried, gpu)), levers
    return best, chosen


def _walk_levers(job: Job, open_names: list[str]) -> Iterator[Levers]:
    """The given value of each is among its values."""
    given, chunks = job.levers, list_divisors(job.shape.num_heads // job.layout.sp_size)
    options: dict[str, list[Any]] = {
        "head_chunks": [n for n in chunks if n in (*FEW_CHUNKS, chunks[-1])],
        "activation_offloading": [False, True],
        "tiled_mlp": [False, True],
        "tiled_loss": [False, True],
        "offload_optimizer": ["none", "cpu"] if job.optim == "adamw" else ["none"],
        "gradient_checkpointing": [given.gradient_checkpointing, True, "full"],
        "offload_param": ["none", "cpu"] if job.zero_stage == 3 else ["none"],
    }
    for values in product(*(dict.fromkeys((*options[name], getattr(given, name))) for name in open_names)):
        levers = replace(given, **dict(zip(open_names, values, strict=True)))
        if not levers.activation_offloading or levers.gradient_checkpointing is not False:
            yield levers


def _count_cost(levers: Levers, base: Levers) -> float:
    """Sum of what is changed; more chunks cost a little more than few."""
    changed = sum(cost for name, cost in COSTS.items() if getattr(levers, name) != getattr(base, name))
    return changed + levers.head_chunks / 4096 + 8 * (levers.gradient_checkpointing == "full")


def _count_peak(job: Job) -> tuple[bool, int]:
    return not is_indexable(job), compute_ledger(job).gpu_peak_bytes


def _explain(job: Job, gpu: Gpu, name: str, fit: Fit) -> str:
    """On: what would be without it. Off: that it is not needed."""
    gib = 1 << 30
    off = getattr(OFF, name)
    value = getattr(job.levers, name)
    room = f"{gpu.memory_bytes / gib:.1f} GiB"
    if value == off:
        if fit.verdict == "fits":
            return f"not needed: the peak is {fit.gpu_peak_bytes / gib:.1f} of {room}"
        return "would not help" if fit.wall != "host" else "the host has no room for it"
    without = replace(job, levers=replace(job.levers, **{name: off}))
    if not is_indexable(without):
        return "without it a kernel would see 2^31 elements"
    peak = compute_ledger(without).gpu_peak_bytes
    return f"without it the peak would be {peak / gib:.1f} of {room}, with it {fit.gpu_peak_bytes / gib:.1f}"
