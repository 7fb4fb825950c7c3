"""Chooses the levers of a job: of all combinations of the open levers, the cheapest that fits according to the
ledger, with no more layers offloaded than needed, and a reason for each. Levers that spend memory to save time
(large tiles, early steps of the optimizer) take what is left at the end; the planner turns them off before it
turns another on. Training and validate-config call `choose_levers`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any, Literal

from ulysses_cli.plan.hardware import GIB, Gpu
from ulysses_cli.plan.layout import Layout, list_divisors
from ulysses_cli.plan.ledger.job import Job, is_indexable, make_job
from ulysses_cli.plan.ledger.ledger import Ledger, weigh_ledger
from ulysses_cli.plan.ledger.machine import compute_saved_pinned
from ulysses_cli.plan.levers import (
    ALL_GROUPS,
    Levers,
    count_most_offloaded,
    get_key,
    swaps_activations,
)
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.planner.fit import (
    NO_ROOMS,
    ROW_MULTIPLE,
    Fit,
    Rooms,
    choose_stage,
    confirm,
    find_max_length,
    is_tried,
    judge,
    judge_indexable,
    try_levers,
)
from ulysses_cli.plan.planner.spending import (
    OFF,
    RECOMPUTING,
    SPENDING,
    explain_spending,
    has_chunks_for_speed,
    spend_what_is_left,
)
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.speed import compute_speed
from ulysses_cli.plan.units import format_count

# Relative costs: each lever costs more than all before it together. Tiles cost almost nothing, recomputing a layer a
# third of its time, the optimizer on the host seconds in every step. What costs most on long rows (attention computed
# twice, a disk) is tried only where nothing else fits, and weighed by the predicted time of a step.
COSTS = {
    "tiled_loss": 1,
    "tiled_mlp": 2,
    "offloaded_layers": 4,
    "head_chunks": 8,
    "gradient_checkpointing": 32,
    "offload_optimizer": 64,
    "offload_param": 128,
    "offloaded_to": 256,
}
EVERY = (*COSTS, *SPENDING)

# At most this many bytes are freed by each saved byte that is offloaded. At present 1.05: the byte itself, and the
# shares of the allocator and of the safety margin.
MOST_SPARED = 1.2
FEW_CHUNKS = (1, 2, 4)  # and as many as there are heads; numbers between them save little more


WRITTEN = "as the recipe says"


@dataclass(frozen=True)
class LeverChoice:
    """Settled levers, a reason for each that the recipe left open, and whether the job fits with them; and ZeRO's
    stage, with its reason."""

    levers: Levers
    reasons: dict[str, str]
    fit: Fit | None
    zero_stage: Literal[1, 2, 3] = 3
    stage_reason: str = WRITTEN

    def settle_stage(self, recipe: Recipe) -> Recipe:
        """The recipe with the stage in place of `auto`."""
        parallel = recipe.parallel.model_copy(update={"zero_stage": self.zero_stage})
        return recipe.model_copy(update={"parallel": parallel})

    def make_job(self, recipe: Recipe, shape: ModelShape, gpu: Gpu) -> Job:
        """The job as it was settled."""
        return make_job(self.settle_stage(recipe), shape, self.levers, gpus_per_node=gpu.gpus_per_node)


Judge = Callable[[Levers], Fit | None]  # the job's fit with these levers; None: no kernel can index it


def read_levers(recipe: Recipe, shape: ModelShape) -> tuple[Levers, list[str]]:
    """The recipe's levers, with `auto` as off, and the names that are `auto`."""
    written: dict[str, Any] = {name: getattr(recipe.memory, get_key(name)) for name in vars(OFF)}
    for name, most in (("offloaded_layers", count_most_offloaded(shape)), ("early_groups", ALL_GROUPS)):
        if isinstance(written[name], bool):
            written[name] = most if written[name] else 0
    open_names = [name for name, value in written.items() if value == "auto"]
    settled = {name: value for name, value in written.items() if value != "auto"}
    return replace(OFF, **settled), open_names


def explain_given_stage(recipe: Recipe) -> str:
    """What decides ZeRO's stage before a GPU is known, or ''."""
    memory = recipe.memory
    if recipe.parallel.zero_stage != "auto":
        return WRITTEN
    if recipe.zero_stage < 3:
        return "each GPU holds the whole base"
    shards = memory.leaf_layers is True or memory.overlap_optimizer not in ("auto", 0)
    return "memory.leaf_layers and memory.overlap_optimizer need stage 3" if shards else ""


def choose_levers(recipe: Recipe, shape: ModelShape, gpu: Gpu | None) -> LeverChoice:
    """For a recipe that passed its checks. Without a GPU (a run on the CPU) levers stay off."""
    levers, open_names = read_levers(recipe, shape)
    if gpu is None:
        why = "no GPU is named"
        reasons = dict.fromkeys(open_names, f"off: {why}")
        return LeverChoice(levers, reasons, None, recipe.zero_stage, explain_given_stage(recipe) or why)
    job = make_job(recipe, shape, levers, gpus_per_node=gpu.gpus_per_node)
    return choose_for_job(job, gpu, open_names, explain_given_stage(recipe))[0]


def choose_for_job(
    job: Job, gpu: Gpu, open_names: list[str], stage_reason: str = WRITTEN
) -> tuple[LeverChoice, Ledger]:
    """What a search proposes and a run on sizes confirms, and that run's ledger. `stage_reason`: why the job has its
    stage of ZeRO; '' where it may be lower."""
    settled, ledger = confirm(lambda room: job.with_levers(_propose(job, room, open_names)), gpu)
    lowered = stage_reason or choose_stage(settled, gpu)
    stage_reason = lowered if isinstance(lowered, str) else "all weights fit, and the GPU would wait for the processor"
    settled, ledger = (settled, ledger) if isinstance(lowered, str) else lowered
    fit = judge(settled, ledger, gpu)
    reasons = {name: _explain(settled, gpu, name, fit, open_names) for name in open_names}
    return LeverChoice(settled.levers, reasons, fit, settled.zero_stage, stage_reason), ledger


def _propose(job: Job, gpu: Gpu, open_names: list[str]) -> Levers:
    chosen = find_cheapest(job, gpu, open_names)
    if chosen is None:  # nothing fits: the levers that come nearest
        tried = [job.levers, *(replace(job.levers, **each) for each in list_last_measures(job, open_names))]
        every = (one for each in tried for one in _walk_levers(job.with_levers(each), _list_left(each, open_names)))
        chosen = min(every, key=lambda levers: _count_need(job.with_levers(levers), gpu))
        judge_levers = partial(try_levers, job, gpu)
        least = judge_levers(chosen)
        if least is not None and least.spare_bytes >= 0 and "offloaded_layers" in open_names:  # the host is the wall
            chosen, _ = offload_least(chosen, least, judge_levers)
    return spend_what_is_left(job, gpu, chosen, open_names)


def find_cheapest(
    job: Job,
    gpu: Gpu,
    open_names: list[str],
    judge_levers: Judge | None = None,
    may_fit: Callable[[Levers], bool] | None = None,
) -> Levers | None:
    """The cheapest combination of the open levers whose verdict is `fits`. Where none fits without a last measure, the
    fastest of those that fit with one. If there is none, the first that is `too_close`. Sets that may not fit are
    left out."""
    judge_levers = judge_levers or partial(try_levers, job, gpu)
    found = [_find_cheapest(job, open_names, judge_levers, may_fit)]
    if found[0] is None or not found[0][1]:
        for measure in list_last_measures(job, open_names):
            given = job.with_levers(replace(job.levers, **measure))
            names = [name for name in open_names if name not in measure]
            found.append(_find_cheapest(given, names, judge_levers, may_fit))
    fitting = [levers for levers, fits in filter(None, found) if fits]
    close = [levers for levers, fits in filter(None, found) if not fits]
    if len(fitting) > 1:
        return min(fitting, key=lambda levers: compute_speed(job.with_levers(levers), gpu).step_seconds)
    return next(iter(fitting + close), None)


def _find_cheapest(
    job: Job, open_names: list[str], judge_levers: Judge, may_fit: Callable[[Levers], bool] | None
) -> tuple[Levers, bool] | None:
    """The cheapest levers without a last measure that the recipe does not set, and whether they fit by more than the
    uncertainty."""
    ranked, close = list_ranked_levers(job, open_names), None
    sets = filter(may_fit, ranked) if may_fit is not None else ranked
    for levers, fit in walk_fits(job, sets, judge_levers, is_open="offloaded_layers" in open_names):
        if fit.verdict == "fits":
            return levers, True
        if fit.verdict == "too_close" and close is None:
            close = levers
    return None if close is None else (close, False)


def screen_levers(job: Job, judge_levers: Judge, may_hold: Callable[[Levers], bool]) -> Callable[[Levers], bool]:
    """A test that leaves out sets of levers at once: those with the same states and checkpointing, where these alone do
    not fit, or not even their strongest, which tile the loss and offload as few layers as the GPU allows. Tiles of an
    MLP add sums of its gradients, and one chunk or the most need least."""
    most_chunks = list_divisors(job.shape.common_heads // job.layout.ulysses_size)[-1]
    most_layers = count_most_offloaded(job.shape)
    known: dict[tuple[Any, ...], bool] = {}

    def may_fit(levers: Levers) -> bool:
        key = (levers.gradient_checkpointing, levers.offload_optimizer, levers.offload_param, levers.offloaded_to)
        if key not in known:
            strongest = (
                replace(levers, tiled_loss=True, tiled_mlp=tiles, head_chunks=chunks, offloaded_layers=most_layers)
                for tiles, chunks in product((True, False), {1, most_chunks})
            )
            fits = walk_fits(job, strongest, judge_levers, is_open=True)
            known[key] = may_hold(levers) and any(fit.verdict == "fits" for _, fit in fits)
        return known[key]

    return may_fit


def list_last_measures(job: Job, open_names: list[str]) -> list[dict[str, Any]]:
    """What spares the host and costs much, one by one and together: dropping kept attention results, and a disk for
    what layers save or for the optimizer's states."""
    options: list[list[dict[str, Any]]] = []
    if "gradient_checkpointing" in open_names and job.levers.gradient_checkpointing != "full":
        options.append([{}, {"gradient_checkpointing": "full"}])
    if job.has_disk and "offloaded_to" in open_names:
        options.append([{}, {"offloaded_to": "nvme"}])
    if job.has_disk and "offload_optimizer" in open_names and swaps_states(job):
        options.append([{}, {"offload_optimizer": "nvme"}])
    joined = ({name: value for part in parts for name, value in part.items()} for parts in product(*options))
    return [measure for measure in joined if measure]


def swaps_states(job: Job) -> bool:
    """Whether DeepSpeed can keep this run's states on a disk (rules/check.py: check_states_on_disk)."""
    return job.optim == "adamw" and job.zero_stage == 3 and not job.async_save


def walk_fits(job: Job, sets: Iterable[Levers], judge_levers: Judge, *, is_open: bool) -> Iterator[tuple[Levers, Fit]]:
    """The fit of each set. Where the number of offloaded layers is open, a set that fits the GPU offloads no more
    layers than it must, which may let it fit the host too. A given number that fits stays."""
    for levers in sets:
        fit = judge_levers(levers)
        if fit is None:
            continue
        is_given = levers.offloaded_layers == job.levers.offloaded_layers and fit.verdict == "fits"
        may_spare = is_open and levers.offloaded_layers and not is_given and fit.spare_bytes >= 0
        is_spared = may_spare and not _lacks_host(job, levers, fit, judge_levers)
        yield offload_least(levers, fit, judge_levers) if is_spared else (levers, fit)


def _lacks_host(job: Job, levers: Levers, most: Fit, judge_levers: Judge) -> bool:
    """A shortcut: whether the host is too small even for the fewest layers that must leave the GPU."""
    if most.fits_host or swaps_activations(levers):
        return False
    without = judge_levers(replace(levers, offloaded_layers=0))
    if without is None or without.spare_bytes >= 0 or not without.fits_host:
        return without is None or not without.fits_host
    layer_bytes = compute_saved_pinned(job.with_levers(levers)) / levers.offloaded_layers
    num_needed = -without.spare_bytes / (MOST_SPARED * layer_bytes)
    host_excess = most.host_uncertainty_bytes - most.host_margin_bytes
    num_too_many = host_excess / (MOST_SPARED * layer_bytes * job.ranks_per_node)
    return num_needed > levers.offloaded_layers - num_too_many


def offload_least(levers: Levers, most: Fit, judge_levers: Judge) -> tuple[Levers, Fit]:
    """The fewest offloaded layers with which a set fits the GPU, given that it fits with `levers.offloaded_layers`.
    Layers free about equally many bytes, so linear interpolation is close; where it is not, bisection continues."""

    def judge_layers(num_layers: int) -> Fit:
        fit = judge_levers(replace(levers, offloaded_layers=num_layers))
        if fit is None:
            raise AssertionError("what kernels can index does not depend on offloaded layers")
        return fit

    few = 0
    many = levers.offloaded_layers
    with_few = judge_layers(0)
    with_many = most
    if with_few.spare_bytes >= 0:
        return replace(levers, offloaded_layers=0), with_few
    is_line = True
    while (width := many - few) > 1:
        share = with_few.spare_bytes / (with_few.spare_bytes - with_many.spare_bytes) if is_line else 0.5
        middle = few + min(max(1, int(share * width)), width - 1)
        fit = judge_layers(middle)
        if fit.spare_bytes >= 0:
            many, with_many = middle, fit
        else:
            few, with_few = middle, fit
        is_line = 2 * (many - few) <= width
    return replace(levers, offloaded_layers=many), with_many


def list_ranked_levers(job: Job, open_names: list[str]) -> tuple[Levers, ...]:
    """Every combination of the open levers, the cheapest first; those that leave out a tile past 2^31 elements last.
    Rows of more ranks are ranked alike."""
    alone = Layout(sp_size=job.layout.sp_size, ring_size=job.layout.ring_size)
    return _rank_levers(replace(job, layout=alone, accumulation=1), tuple(open_names))


@lru_cache(maxsize=256)
def _rank_levers(job: Job, open_names: tuple[str, ...]) -> tuple[Levers, ...]:
    def rank(levers: Levers) -> tuple[bool, float]:
        return not is_tried(job.with_levers(levers)), _count_cost(levers, job.levers)

    return tuple(sorted(_walk_levers(job, open_names), key=rank))


def list_strongest(job: Job) -> list[Levers]:
    """Sets that may let the longest row fit: most levers first, the given ones last. All have tiles, the most chunks of
    heads and as many offloaded layers as the GPU allows. No set is the smallest for every job: the host may have no
    room, one GPU gathers weights that are in host memory, and a saved attention result avoids the buffers of an
    exchange."""
    most: dict[str, Any] = {
        "tiled_loss": True,
        "tiled_mlp": True,
        "head_chunks": job.shape.common_heads // job.layout.ulysses_size,
        "offloaded_layers": count_most_offloaded(job.shape),
    }
    given, names = job.with_levers(replace(job.levers, **most)), [name for name in COSTS if name not in most]
    jobs = [given, *(replace(given, levers=replace(given.levers, **each)) for each in list_last_measures(given, names))]
    every = (levers for each in jobs for levers in _walk_levers(each, _list_left(each.levers, names)))
    walked = [levers for levers in every if levers.gradient_checkpointing is not False]
    return [*sorted(dict.fromkeys(walked), key=lambda levers: -_count_cost(levers, OFF)), job.levers]


def list_smallest(job: Job) -> list[Levers]:
    """The strongest sets without those that only spare the host: one of them needs the least GPU memory. States that
    are given to a disk stay there."""
    given, optimizer = job.levers, "cpu" if job.optim == "adamw" else "none"
    optimizer = given.offload_optimizer if given.offload_optimizer == "nvme" else optimizer
    strongest = [levers for levers in list_strongest(job) if levers.offloaded_to == given.offloaded_to]
    return [levers for levers in strongest if levers.offloaded_layers and levers.offload_optimizer == optimizer]


def find_longest(job: Job, gpu: Gpu) -> tuple[int, Levers]:
    """The longest row with any levers, never shorter than with the given ones; and those levers. Each set is tried with
    a row longer than the best so far; its own longest row is searched only if that fits."""
    best, chosen = find_max_length(job, gpu), job.levers
    multiple = job.layout.sp_size * ROW_MULTIPLE
    for levers in list_strongest(job):
        tried = job.with_levers(levers)
        longer = best + max(1, best // multiple // 256) * multiple
        if _fits_somehow(replace(tried, max_length=longer), gpu):
            best, chosen = max(longer, find_max_length(tried, gpu, _find_rooms)), levers
    return best, next(_walk_fitting(replace(job, max_length=best, levers=chosen), gpu), chosen) if best else chosen


def _list_left(given: Levers, open_names: list[str]) -> list[str]:
    """Open levers that are still open where a measure is given."""
    return [name for name in open_names if not is_last_measure(name, getattr(given, name))]


def _fits_somehow(job: Job, gpu: Gpu) -> bool:
    """With that many layers offloaded, or fewer."""
    return any(True for _ in _walk_fitting(job, gpu))


def _find_rooms(job: Job, gpu: Gpu) -> Rooms:
    """On the GPU with so many layers offloaded, and on a host with as few as the GPU allows."""
    judge_levers = partial(try_levers, job, gpu)
    fit = judge_levers(job.levers)
    if fit is None:
        return NO_ROOMS
    if fit.spare_bytes < 0 or not job.levers.offloaded_layers:
        return fit.spare_bytes, fit.spare_host_bytes
    return fit.spare_bytes, offload_least(job.levers, fit, judge_levers)[1].spare_host_bytes


def _walk_fitting(job: Job, gpu: Gpu) -> Iterator[Levers]:
    fits = walk_fits(job, [job.levers], partial(try_levers, job, gpu), is_open=True)
    return (levers for levers, fit in fits if fit.verdict == "fits")


def _walk_levers(job: Job, open_names: Iterable[str]) -> Iterator[Levers]:
    """All combinations of the open levers, without last measures that are not given. The given value of each lever is
    among its values."""
    given, chunks = job.levers, list_divisors(job.shape.common_heads // job.layout.ulysses_size)
    options: dict[str, list[Any]] = {
        "head_chunks": [n for n in chunks if n in (*FEW_CHUNKS, chunks[-1])],
        "offloaded_layers": [0, count_most_offloaded(job.shape)],
        "tiled_mlp": [False, True],
        "tiled_loss": [False, True],
        "offload_optimizer": ["none", "cpu"] if job.optim == "adamw" else ["none"],
        "gradient_checkpointing": [given.gradient_checkpointing, True],
        "offloaded_to": [given.offloaded_to],
        "offload_param": ["none", "cpu"] if job.zero_stage == 3 else ["none"],
        **{name: [getattr(OFF, name)] for name in SPENDING},
    }
    for values in product(*(dict.fromkeys((*options[name], getattr(given, name))) for name in open_names)):
        levers = replace(given, **dict(zip(open_names, values, strict=True)))
        if not levers.offloaded_layers or levers.gradient_checkpointing is not False:
            yield levers


def _find_host_need(job: Job, gpu: Gpu) -> int:
    """Host memory of a node where it is too small, with as many offloaded layers as the GPU needs; else 0."""
    most = replace(job.levers, offloaded_layers=count_most_offloaded(job.shape) if job.levers.offloaded_layers else 0)
    fit = try_levers(job, gpu, most)
    if fit is not None and fit.spare_bytes >= 0:
        _, fit = offload_least(most, fit, partial(try_levers, job, gpu))
    return fit.host_peak_bytes if fit is not None and not fit.fits_host else 0


def is_last_measure(name: str, value: Any) -> bool:
    return value == "nvme" or (name == "gradient_checkpointing" and value == "full")


def _count_cost(levers: Levers, base: Levers) -> float:
    """The summed costs of the changed levers; more chunks cost a little more than few."""
    changed = sum(cost for name, cost in COSTS.items() if getattr(levers, name) != getattr(base, name))
    return changed + levers.head_chunks / 4096 + (8 if levers.gradient_checkpointing == "full" else 0)


def _count_need(job: Job, gpu: Gpu) -> tuple[bool, bool, int]:
    """Sorts what fits the GPU, by the host memory that it takes, before what does not."""
    fit = judge_indexable(job, gpu)
    if fit is None:
        return True, True, 0
    fits_gpu = fit.spare_bytes >= 0
    return False, not fits_gpu, fit.host_peak_bytes if fits_gpu else fit.gpu_peak_bytes


def _explain(job: Job, gpu: Gpu, name: str, fit: Fit, open_names: Collection[str]) -> str:
    """The reason for one lever. If it is on: the peak without it. If it is off: that it is not needed or of no use."""
    if name == "head_chunks" and has_chunks_for_speed(job, gpu):
        return "the next one is exchanged while one attends"
    if name in SPENDING:
        return explain_spending(job, gpu, name, fit, open_names)
    off = getattr(OFF, name)
    value = getattr(job.levers, name)
    room = f"{gpu.memory_bytes / GIB:.1f} GiB"
    if name == RECOMPUTING and value is False:
        return f"the GPU has room for all that layers save: the peak is {fit.gpu_peak_bytes / GIB:.1f} of {room}"
    if value == off:
        if fit.verdict == "fits" and name == RECOMPUTING:
            saving = job.with_levers(replace(job.levers, gradient_checkpointing=False, offloaded_layers=0))
            needs = weigh_ledger(saving).gpu_peak_bytes / GIB
            return f"without it the peak would be {needs:.1f} of {room}, with it {fit.gpu_peak_bytes / GIB:.1f}"
        if fit.verdict == "fits":
            return f"not needed: the peak is {fit.gpu_peak_bytes / GIB:.1f} of {room}"
        if name == "offloaded_to" and not job.has_disk:
            return "no disk is named (memory.nvme_path)"
        return "would not help" if fit.wall != "host" else "the host has no room for it"
    # What is on a disk would be on the host instead.
    instead, lesser = ("on the host", {name: "cpu"}) if value == "nvme" else ("without it", {name: off})
    without = job.with_levers(replace(job.levers, **lesser))
    if not is_indexable(without):
        return "without it a kernel would see 2^31 elements"
    if name in ("tiled_loss", "tiled_mlp") and not is_tried(without):
        return "without it a tensor would have 2^31 elements, which no run has shown to be right"
    if is_last_measure(name, value) and (needs := _find_host_need(without, gpu) / GIB):
        has = gpu.get_host_bytes(job.world_size) / GIB
        with_it = fit.host_peak_bytes / GIB
        return f"{instead} a node would need {needs:,.0f} GiB of host memory of {has:,.0f}, with it {with_it:,.0f}"
    peak = weigh_ledger(without).gpu_peak_bytes
    gain = f"without it the peak would be {peak / GIB:.1f} of {room}, with it {fit.gpu_peak_bytes / GIB:.1f}"
    return f"{value} of {format_count(job.shape.num_layers, 'layer')}; {gain}" if name == "offloaded_layers" else gain
