"""Which levers a job needs: every combination of those left open is held against the ledger, and the cheapest that fits
is taken, with no more layers offloaded than needed. Says why for each. Training and validate-config call
`choose_levers`; nothing here guesses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from ulysses_cli.plan.hardware import GIB, Gpu
from ulysses_cli.plan.layout import list_divisors
from ulysses_cli.plan.ledger.host import compute_saved_pinned
from ulysses_cli.plan.ledger.job import Job, make_job
from ulysses_cli.plan.ledger.ledger import compute_ledger
from ulysses_cli.plan.levers import Levers, count_most_offloaded
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.planner.fit import ROW_MULTIPLE, Fit, find_max_length, is_indexable, judge
from ulysses_cli.plan.recipe.recipe import Recipe

# What each lever costs against the others: the sum of all before it is less. Tiles cost next to nothing, recomputing a
# layer a third of its time, the optimizer on the host seconds in every step.
COSTS = {
    "tiled_loss": 1,
    "tiled_mlp": 2,
    "offloaded_layers": 4,
    "head_chunks": 8,
    "gradient_checkpointing": 32,
    "offload_optimizer": 64,
    "offload_param": 128,
}
OFF = Levers()
# What a kept byte that leaves spares at most, with the allocator's and the safety's share beside it: 1.05 as these are.
MOST_SPARED = 1.2
FEW_CHUNKS = (1, 2, 4)  # and as many as there are heads: those between save little more


@dataclass(frozen=True)
class LeverChoice:
    """Settled levers, a reason for each that the recipe left open, and whether the job fits with them."""

    levers: Levers
    reasons: dict[str, str]
    fit: Fit | None


Tell = Callable[[Levers], Fit | None]  # what the ledger says with these levers; None: no kernel can index it


def read_levers(recipe: Recipe, shape: ModelShape) -> tuple[Levers, list[str]]:
    """What the recipe says, with `auto` as off, and the names that it left open."""
    memory = recipe.memory
    offloaded = memory.activation_offloading
    if isinstance(offloaded, bool):
        offloaded = count_most_offloaded(shape) if offloaded else 0
    written: dict[str, Any] = {
        "head_chunks": memory.attention_head_chunks,
        "offloaded_layers": offloaded,
        "tiled_mlp": memory.tiled_mlp,
        "tiled_loss": memory.tiled_loss,
        "offload_optimizer": memory.offload_optimizer,
        "offload_param": memory.offload_param,
    }
    open_names = [name for name, value in written.items() if value == "auto"]
    settled = {name: value for name, value in written.items() if value != "auto"}
    return replace(OFF, gradient_checkpointing=memory.gradient_checkpointing, **settled), open_names


def choose_levers(recipe: Recipe, shape: ModelShape, gpu: Gpu | None) -> LeverChoice:
    """For a recipe that passed its checks. Without a GPU (a run on the CPU) levers stay off."""
    levers, open_names = read_levers(recipe, shape)
    if gpu is None:
        return LeverChoice(levers, dict.fromkeys(open_names, "off: no GPU is named"), None)
    return choose_for_job(make_job(recipe, shape, levers, gpus_per_node=gpu.gpus_per_node), gpu, open_names)


def choose_for_job(job: Job, gpu: Gpu, open_names: list[str]) -> LeverChoice:
    chosen = find_cheapest(job, gpu, open_names)
    if chosen is None:  # nothing fits: everything that helps
        chosen = min(_walk_levers(job, open_names), key=lambda each: _count_peak(replace(job, levers=each)))
        tell = partial(_tell, job, gpu)
        least = tell(chosen)
        if least is not None and least.spare_bytes >= 0 and "offloaded_layers" in open_names:  # the host is the wall
            chosen, _ = offload_least(chosen, least, tell)
    settled = replace(job, levers=chosen)
    fit = judge(settled, compute_ledger(settled), gpu)
    return LeverChoice(chosen, {name: _explain(settled, gpu, name, fit) for name in open_names}, fit)


def find_cheapest(job: Job, gpu: Gpu, open_names: list[str]) -> Levers | None:
    """The cheapest combination of the open levers that fits: surely if there is one, otherwise closely."""
    ranked, close = list_ranked_levers(job, open_names), None
    for levers, fit in walk_fits(job, ranked, partial(_tell, job, gpu), is_open="offloaded_layers" in open_names):
        if fit.verdict == "fits":
            return levers
        if fit.verdict == "too_close" and close is None:
            close = levers
    return close


def _tell(job: Job, gpu: Gpu, levers: Levers) -> Fit | None:
    tried = replace(job, levers=levers)
    return judge(tried, compute_ledger(tried), gpu) if is_indexable(tried) else None


def walk_fits(job: Job, sets: Iterable[Levers], tell: Tell, *, is_open: bool) -> Iterator[tuple[Levers, Fit]]:
    """What is said of each set. Where the number of offloaded layers is open, a set that fits offloads no more of them
    than it must, and one for which the host is too small is tried with so many. A given number that fits stays."""
    for levers in sets:
        fit = tell(levers)
        if fit is None:
            continue
        is_given = levers.offloaded_layers == job.levers.offloaded_layers and fit.verdict == "fits"
        may_spare = is_open and levers.offloaded_layers and not is_given and fit.spare_bytes >= 0
        is_spared = may_spare and not _lacks_host(job, levers, fit, tell)
        yield offload_least(levers, fit, tell) if is_spared else (levers, fit)


def _lacks_host(job: Job, levers: Levers, most: Fit, tell: Tell) -> bool:
    """Whether the host is too small for as many layers as the GPU must be spared at least: a shortcut."""
    if most.fits_host:
        return False
    none = tell(replace(levers, offloaded_layers=0))
    if none is None or none.spare_bytes >= 0 or not none.fits_host:
        return none is None or not none.fits_host
    a_layer = compute_saved_pinned(replace(job, levers=levers)) / levers.offloaded_layers
    num_needed = -none.spare_bytes / (MOST_SPARED * a_layer)
    num_too_many = (most.host_uncertainty_bytes - most.host_margin_bytes) / (MOST_SPARED * a_layer * job.ranks_per_node)
    return num_needed > levers.offloaded_layers - num_too_many


def offload_least(levers: Levers, most: Fit, tell: Tell) -> tuple[Levers, Fit]:
    """The fewest layers with which a set fits the GPU, as it does with all it has. Each spares about as much, so that a
    straight line comes close; where it does not, halving goes on."""

    def ask(num_layers: int) -> Fit:
        fit = tell(replace(levers, offloaded_layers=num_layers))
        if fit is None:
            raise AssertionError("what kernels can index does not depend on offloaded layers")
        return fit

    few, many, with_few, with_many = 0, levers.offloaded_layers, ask(0), most
    if with_few.spare_bytes >= 0:
        return replace(levers, offloaded_layers=0), with_few
    is_line = True
    while (width := many - few) > 1:
        share = with_few.spare_bytes / (with_few.spare_bytes - with_many.spare_bytes) if is_line else 0.5
        middle = few + min(max(1, int(share * width)), width - 1)
        fit = ask(middle)
        if fit.spare_bytes >= 0:
            many, with_many = middle, fit
        else:
            few, with_few = middle, fit
        is_line = 2 * (many - few) <= width
    return replace(levers, offloaded_layers=many), with_many


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
    return [each for each in strongest if each.offloaded_layers and each.offload_optimizer == optimizer]


def find_longest(job: Job, gpu: Gpu) -> tuple[int, Levers]:
    """The longest row with whatever levers, never shorter than with the given ones; and the levers, with which fewer
    layers may have to be offloaded than they say. Each set is asked for a row that is longer than the best so far, and
    only if it fits is its own longest row looked for."""
    best, chosen = find_max_length(job, gpu), job.levers
    multiple = job.layout.sp_size * ROW_MULTIPLE
    for levers in list_strongest(job):
        tried = replace(job, levers=levers)
        longer = best + max(1, best // multiple // 256) * multiple
        if _fits_somehow(replace(tried, row_tokens=longer), gpu):
            best, chosen = max(longer, find_max_length(tried, gpu, _fits_somehow)), levers
    return best, chosen


def _fits_somehow(job: Job, gpu: Gpu) -> bool:
    """With that many layers offloaded or fewer."""
    found = walk_fits(job, [job.levers], partial(_tell, job, gpu), is_open=True)
    return any(fit.verdict == "fits" for _, fit in found)


def _walk_levers(job: Job, open_names: list[str]) -> Iterator[Levers]:
    """The given value of each is among its values."""
    given, chunks = job.levers, list_divisors(job.shape.num_heads // job.layout.sp_size)
    options: dict[str, list[Any]] = {
        "head_chunks": [n for n in chunks if n in (*FEW_CHUNKS, chunks[-1])],
        "offloaded_layers": [0, count_most_offloaded(job.shape)],
        "tiled_mlp": [False, True],
        "tiled_loss": [False, True],
        "offload_optimizer": ["none", "cpu"] if job.optim == "adamw" else ["none"],
        "gradient_checkpointing": [given.gradient_checkpointing, True, "full"],
        "offload_param": ["none", "cpu"] if job.zero_stage == 3 else ["none"],
    }
    for values in product(*(dict.fromkeys((*options[name], getattr(given, name))) for name in open_names)):
        levers = replace(given, **dict(zip(open_names, values, strict=True)))
        if not levers.offloaded_layers or levers.gradient_checkpointing is not False:
            yield levers


def _count_cost(levers: Levers, base: Levers) -> float:
    """Sum of what is changed; more chunks cost a little more than few."""
    changed = sum(cost for name, cost in COSTS.items() if getattr(levers, name) != getattr(base, name))
    return changed + levers.head_chunks / 4096 + 8 * (levers.gradient_checkpointing == "full")


def _count_peak(job: Job) -> tuple[bool, int]:
    return not is_indexable(job), compute_ledger(job).gpu_peak_bytes


def _explain(job: Job, gpu: Gpu, name: str, fit: Fit) -> str:
    """On: what would be without it. Off: that it is not needed."""
    off = getattr(OFF, name)
    value = getattr(job.levers, name)
    room = f"{gpu.memory_bytes / GIB:.1f} GiB"
    if value == off:
        if fit.verdict == "fits":
            return f"not needed: the peak is {fit.gpu_peak_bytes / GIB:.1f} of {room}"
        return "would not help" if fit.wall != "host" else "the host has no room for it"
    without = replace(job, levers=replace(job.levers, **{name: off}))
    if not is_indexable(without):
        return "without it a kernel would see 2^31 elements"
    peak = compute_ledger(without).gpu_peak_bytes
    gain = f"without it the peak would be {peak / GIB:.1f} of {room}, with it {fit.gpu_peak_bytes / GIB:.1f}"
    return f"{value} of {format_count(job.shape.num_layers, 'layer')}; {gain}" if name == "offloaded_layers" else gain
