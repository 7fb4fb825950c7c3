"""The planner: tries legal layouts, levers and machine counts, the most promising first, until the plans that are
listed are known. Returns what fits with its cost and time, or the walls that rule out every plan. A layout's
memory is the same on every kind of GPU, so it is computed once for all kinds."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from operator import le
from typing import Any

from ulysses_cli.plan.hardware import GIB, Gpu
from ulysses_cli.plan.layout import Layout, list_divisors
from ulysses_cli.plan.ledger.job import Job, check_known, is_indexable, make_job
from ulysses_cli.plan.ledger.ledger import Ledger, weigh_least_ledger, weigh_ledger
from ulysses_cli.plan.ledger.machine import compute_node_disk_bytes
from ulysses_cli.plan.ledger.weights import list_linear_modules
from ulysses_cli.plan.levers import ALL_GROUPS, Levers, Offload, explain_no_overlap, uses_disk
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.planner.candidates import (
    BEHIND,
    METHODS,
    Candidate,
    Draft,
    Offer,
    PlanRequest,
    SearchResult,
    count_distance,
    explain_absence,
    find_excess,
    find_obstacle,
    list_walls,
    needs_stretch,
    round_cost,
    write_draft,
)
from ulysses_cli.plan.planner.fit import (
    Fit,
    choose_stage,
    confirm,
    confirm_length,
    holds_whole,
    is_tried,
    judge,
    lower_stage,
)
from ulysses_cli.plan.planner.lever_choice import (
    COSTS,
    EVERY,
    find_cheapest,
    find_longest,
    list_smallest,
    offload_least,
    screen_levers,
    swaps_states,
    walk_fits,
)
from ulysses_cli.plan.planner.rings import (
    MAX_RING,
    explain_rings,
    forget_ring,
    is_slower,
    keep_rings_that_win,
    list_sp_layouts,
    may_win,
    rank_ring,
)
from ulysses_cli.plan.planner.spending import OFF, spend_what_is_left
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.recipe.sections import Preference
from ulysses_cli.plan.resolved import find_ring_size
from ulysses_cli.plan.rules.adapters import check_quantized_base
from ulysses_cli.plan.rules.model import REPLACEABLE
from ulysses_cli.plan.speed import MOST_HIDDEN, Speed, compute_speed
from ulysses_cli.plan.units import format_count, format_range

Order = Callable[[Candidate], tuple[float, ...]]


class Contest:
    """Settles layouts, the most promising first. A bound for a layout's plan is the fastest step of those sets of
    levers whose least needs fit. A layout whose bound lies behind the plans that are listed is never settled."""

    def __init__(self, request: PlanRequest, layouts: Sequence[tuple[Job, list[Gpu]]]) -> None:
        self.request = request
        self._settled: dict[tuple[int, int], Candidate | None] = {}
        self._ledgers: dict[int, LedgersOfJob] = {}
        groups: dict[tuple[str, Layout], list[tuple[Job, Gpu]]] = {}
        for job, gpus in layouts:
            for gpu in gpus:
                groups.setdefault((gpu.key, forget_ring(job.layout)), []).append((job, gpu))
        self.groups = list(groups.values())  # of one kind of GPU, layouts that differ in their ring alone
        self.bounds = [[self._find_bound(job, gpu) for job, gpu in group] for group in self.groups]

    def rank(self, order: Order, limit: int) -> list[Candidate]:
        """The best plan of each kind inside all bounds, the best kinds first, at most `limit`. A kind whose plans all
        have more GPUs than the work needs comes after the others, with the fewest GPUs that fit."""
        heap: list[tuple[tuple[float, ...], int, Candidate | None]] = []
        for number, bounds in enumerate(self.bounds):
            known = [bound for bound in bounds if bound is not None]
            if not all(find_excess(self.request, bound) for bound in known):
                heap.append((min(map(order, known)), number, None))
        heapq.heapify(heap)
        found: dict[str, Candidate] = {}
        others: dict[str, list[tuple[int, Candidate]]] = {}
        while heap and len(found) < limit:
            _, number, plan = heapq.heappop(heap)
            kind = self.groups[number][0][1].key
            if kind in found:
                continue
            if plan is None:
                plan = self._choose(number)
                if plan is not None:
                    heapq.heappush(heap, (order(plan), number, plan))
            elif not plan.is_justified:
                others.setdefault(kind, []).append((number, plan))
            elif (measured := self._measure(number, plan)) is not None:
                if order(measured) > order(plan):  # it needs more levers than was weighed
                    heapq.heappush(heap, (order(measured), number, measured))
                else:
                    found[kind] = measured
        fewest = [
            measured
            for kind, plans in others.items()
            if kind not in found
            for number, plan in sorted(plans, key=lambda each: (each[1].job.world_size, order(each[1])))[:1]
            if (measured := self._measure(number, plan)) is not None
        ]
        return [*found.values(), *sorted(fewest, key=order)][:limit]

    def _measure(self, number: int, plan: Candidate) -> Candidate | None:
        """The plan as a run on sizes confirms it, with more levers where it must; None where none are enough."""
        job = next(job for job, _ in self.groups[number] if job.layout == plan.job.layout)

        def propose(room: Gpu) -> Job:
            proposed = find_fit(self.request, self._get_ledgers(job), room)
            return plan.job if proposed is None else proposed.job

        settled, ledger = confirm(propose, plan.gpu)
        fit = judge(settled, ledger, plan.gpu)
        speed = compute_speed(settled, plan.gpu)
        return replace(plan, job=settled, fit=fit, speed=speed) if fit.verdict == "fits" else None

    def list_tried(self, gpu: Gpu | None = None) -> list[Candidate]:
        """The plan or the nearest miss of every layout; of one kind of GPU if one is given."""
        numbers = [number for number, group in enumerate(self.groups) if gpu is None or group[0][1].key == gpu.key]
        return [plan for number in numbers for plan in self._list_tried(number)]

    def list_rivals(self, plans: Iterable[Candidate]) -> list[Candidate]:
        """What was tried of the layouts that differ from those of these plans in their ring alone."""
        shown = {(plan.gpu.key, forget_ring(plan.job.layout)) for plan in plans}
        firsts = [(gpu.key, forget_ring(job.layout)) for job, gpu in (group[0] for group in self.groups)]
        return [plan for number, first in enumerate(firsts) if first in shown for plan in self._list_tried(number)]

    def explain_absence(self, gpu: Gpu) -> str:
        """Why a kind is not listed, though others are. Where one of its layouts is inside all bounds, others are
        better."""
        own = [number for number, group in enumerate(self.groups) if group[0][1].key == gpu.key]
        own.sort(key=lambda number: (number, 0) not in self._settled)
        is_behind = any(self._choose(number) is not None for number in own)
        return BEHIND if is_behind else explain_absence(self.request, gpu, self.list_tried(gpu))

    def _list_tried(self, number: int) -> list[Candidate]:
        missed = (
            self.settle(number, at) or find_nearest(self.request, self._get_ledgers(job), gpu)
            for at, (job, gpu) in enumerate(self.groups[number])
        )
        return [plan for plan in missed if plan is not None]

    def _choose(self, number: int) -> Candidate | None:
        """First that of `ring_size: auto`. Another ring can win alone if it is faster with the same levers."""
        group, plans = self.groups[number], list[Candidate]()
        known = [(bound, at) for at, bound in enumerate(self.bounds[number]) if bound is not None]
        for bound, at in sorted(known, key=lambda each: (rank_ring(each[0]), each[0].speed.step_seconds)):
            if any(not may_win(group[at][0].layout, plan) or is_slower(bound, plan) for plan in plans):
                continue
            plan = self.settle(number, at)
            plans += [plan] if plan is not None and not find_excess(self.request, plan) else []
        kept = keep_rings_that_win(plans)
        return kept[0] if kept else None

    def settle(self, number: int, at: int) -> Candidate | None:
        if (number, at) not in self._settled:
            job, gpu = self.groups[number][at]
            may_fit = self.bounds[number][at] is not None
            found = find_fit(self.request, self._get_ledgers(job), gpu) if may_fit else None
            self._settled[number, at] = found
        return self._settled[number, at]

    def _get_ledgers(self, job: Job) -> LedgersOfJob:
        return self._ledgers.setdefault(id(job), LedgersOfJob(job))  # whose layouts keep the job alive

    def _find_bound(self, job: Job, gpu: Gpu) -> Candidate | None:
        speeds = [compute_bound(job, gpu, levers) for levers in self._get_ledgers(job).list_least(gpu)]
        if not speeds:
            return None
        if (whole := lower_stage(job)) is not None and holds_whole(whole, gpu):
            speeds.append(compute_bound(whole, gpu, replace(OFF, gradient_checkpointing=False)))
        fastest = min(speeds, key=lambda speed: speed.step_seconds)
        return Candidate(gpu, job, UNKNOWN, fastest, self.request.num_tokens)


UNKNOWN = Fit("fits", "", 0, 0, 0, 0, 0, 0)


def compute_bound(job: Job, gpu: Gpu, levers: Levers) -> Speed:
    """No step with the same states, recomputation and MLPs in tiles is faster: with all that saves time, as if it took
    no memory, and with as much of the exchange hidden as there can be."""
    early = ALL_GROUPS if levers.offload_optimizer == "cpu" else 0
    speed = compute_speed(job.with_levers(replace(levers, leaf_layers=True, early_groups=early)), gpu)
    hidden = 0.0 if explain_no_overlap(job.shape, job.layout.ulysses_size) else MOST_HIDDEN * speed.parts["exchange"]
    return replace(speed, step_seconds=speed.step_seconds - hidden)


# What sets of levers hold, from the fastest, which need most memory.
SAVED: tuple[dict[str, Any], ...] = (
    {"gradient_checkpointing": False},
    {"gradient_checkpointing": False, "tiled_mlp": True},
    {},
)
STATES: tuple[Offload, ...] = ("none", "cpu", "nvme")


class LedgersOfJob:
    """Ledgers of a layout by levers. They are the same for every kind of GPU."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.measured: dict[Levers, Ledger | None] = {}
        self.least: dict[tuple[bool, bool, str, str], Ledger] = {}

    def may_fit(self, gpu: Gpu, levers: Levers) -> bool:
        """Whether the least fits that sets need which hold as much."""
        if levers.gradient_checkpointing is False:
            without = replace(levers, gradient_checkpointing=True)
            if not self.may_fit(gpu, without):
                return False
        return judge(self.job, self._weigh_least(levers), gpu).verdict != "does_not_fit"

    def _weigh_least(self, levers: Levers) -> Ledger:
        saves_all = levers.gradient_checkpointing is False
        held = saves_all, saves_all and levers.tiled_mlp, levers.offload_optimizer, levers.offload_param
        if held not in self.least:
            states = replace(OFF, offload_optimizer=levers.offload_optimizer, offload_param=levers.offload_param)
            tried = replace(states, gradient_checkpointing=not saves_all, tiled_mlp=held[1])
            self.least[held] = weigh_least_ledger(self.job.with_levers(tried))
        return self.least[held]

    def _count_saved(self, gpu: Gpu, levers: Levers) -> int:
        """The most layers that may save all: as many as fit beside what is held, with MLPs in tiles."""
        none, num_layers = self._weigh_least(levers), self.job.shape.num_layers
        every = self._weigh_least(replace(levers, gradient_checkpointing=False, tiled_mlp=True))
        room = gpu.memory_bytes + none.uncertainty_bytes - none.gpu_peak_bytes
        share = room / max(1, every.gpu_peak_bytes - none.gpu_peak_bytes)
        return min(num_layers - 1, max(0, int(share * num_layers)))

    @cached_property
    def fastest(self) -> list[tuple[tuple[int, ...], Levers]]:
        """Levers that differ in what they hold, the fastest first, and their places in the three lists of choices."""
        job = self.job
        optimizers = STATES[: 1 + int(job.optim == "adamw") + int(job.has_disk and swaps_states(job))]
        params = STATES[: 1 + int(job.zero_stage == 3)]
        return [
            (place, replace(OFF, **SAVED[place[0]], offload_optimizer=STATES[place[1]], offload_param=STATES[place[2]]))
            for place in product(range(len(SAVED)), range(len(optimizers)), range(len(params)))
        ]

    def list_least(self, gpu: Gpu) -> list[Levers]:
        """The fastest that may fit, where none of these holds at least as much."""
        found = list[tuple[tuple[int, ...], Levers]]()
        for place, levers in self.fastest:
            if not any(all(map(le, other, place)) for other, _ in found) and self.may_fit(gpu, levers):
                saved = self._count_saved(gpu, levers) if levers.gradient_checkpointing else 0
                found.append((place, replace(levers, saved_layers=saved)))
        return [levers for _, levers in found]

    @cached_property
    def smallest(self) -> list[Levers]:
        return list_smallest(self.job)

    def judge(self, gpu: Gpu, levers: Levers) -> Fit | None:
        tried = self.job.with_levers(levers)
        if levers not in self.measured:
            self.measured[levers] = weigh_ledger(tried) if is_indexable(tried) else None
        ledger = self.measured[levers]
        return judge(tried, ledger, gpu) if ledger is not None else None


def find_fit(request: PlanRequest, ledgers: LedgersOfJob, gpu: Gpu) -> Candidate | None:
    """The cheapest levers that fit; where none fit without a last measure, the fastest that fit with one."""
    job, judge_levers = ledgers.job, partial(ledgers.judge, gpu)
    may_fit = partial(ledgers.may_fit, gpu)
    plain = judge_levers(job.levers) if may_fit(job.levers) else None
    levers: Levers | None = job.levers
    if plain is None or plain.verdict != "fits" or not is_tried(job):
        levers = find_cheapest(job, gpu, list(COSTS), judge_levers, screen_levers(job, judge_levers, may_fit))
    fit = judge_levers(levers) if levers is not None else None
    if levers is None or fit is None or fit.verdict != "fits":
        return None
    levers = spend_what_is_left(job, gpu, levers, EVERY)
    plan = _make_candidate(request, job, gpu, levers, judge_levers(levers) or fit)
    lowered = choose_stage(plan.job, gpu)
    if isinstance(lowered, str):
        return plan
    whole, ledger = lowered
    return replace(plan, job=whole, speed=compute_speed(whole, gpu), fit=judge(whole, ledger, gpu))


def find_nearest(request: PlanRequest, ledgers: LedgersOfJob, gpu: Gpu) -> Candidate | None:
    """The nearest miss of a layout that fits with no levers; None where no kernel can index its row."""
    job, judge_levers = ledgers.job, partial(ledgers.judge, gpu)
    misses = walk_fits(job, [*ledgers.smallest, *ledgers.measured], judge_levers, is_open=False)
    nearest = min(misses, key=lambda miss: count_distance(miss[1]), default=None)
    if nearest is None:
        return None
    if nearest[1].spare_bytes >= 0:  # the host is the wall: offload only what must leave
        nearest = offload_least(*nearest, judge_levers)
    return _make_candidate(request, job, gpu, *nearest)


def _make_candidate(request: PlanRequest, job: Job, gpu: Gpu, levers: Levers, fit: Fit) -> Candidate:
    settled = replace(job, levers=levers, has_disk=uses_disk(levers))
    return Candidate(gpu, settled, fit, compute_speed(settled, gpu), request.num_tokens)


MACHINE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SHOWN = 5  # kinds of GPU, the best first


def search(request: PlanRequest, offers: Sequence[Offer], limit: int = SHOWN, *, explains: bool = True) -> SearchResult:
    """`explains`: also says of each kind that is not listed why it is not, for which all its layouts are settled."""
    check_known(request.shape, "--model")
    layouts = _list_layouts(request, offers)
    contest = Contest(request, layouts)
    best, fastest = contest.rank(_order_by_cost, limit), contest.rank(_order_by_time, limit)
    if not best:
        tried = contest.list_tried()
        fitting = [plan for plan in tried if plan.fit.verdict == "fits"]
        return SearchResult((), (), tuple(list_walls(request, offers, layouts, tried, fitting)))
    shown = {plan.gpu.key for plan in (*best, *fastest)}
    absent = [offer.gpu for offer in offers if explains and offer.gpu.key not in shown]
    left_out = {gpu.key: contest.explain_absence(gpu) for gpu in absent}
    rivals = contest.list_rivals((*best, *fastest))
    return SearchResult(tuple(best), tuple(fastest), (), left_out, tuple(explain_rings((*best, *fastest), rivals)))


def _order_by_cost(plan: Candidate) -> tuple[float, ...]:
    return round_cost(plan.usd_middle), plan.job.num_nodes, plan.seconds


def _order_by_time(plan: Candidate) -> tuple[float, ...]:
    return plan.seconds, plan.usd_middle


def list_methods(request: PlanRequest, method: str | None) -> list[PlanRequest]:
    """The request with each method that may be taken: the given one; None: all that the model allows, of which the
    first that fits trains most."""
    requests = []
    for name in METHODS if method is None else (method,):
        is_lora, quantize_base = METHODS[name]
        tried = replace(request, is_lora=is_lora, quantize_base=quantize_base)
        problems = list(check_quantized_base(make_plan_recipe(tried), request.shape))
        if problems and method is not None:
            raise RecipeError([replace(each, key="--method", hint="use --method lora") for each in problems])
        requests += [] if problems else [tried]
    return requests


def search_methods(
    requests: Sequence[PlanRequest], offers: Sequence[Offer], limit: int = SHOWN, *, explains: bool = True
) -> tuple[PlanRequest, SearchResult]:
    """The request that was taken, and its plans: all weights where a plan fits; else LoRA, and a base in 4 bits where
    LoRA would have to keep the 16-bit base on the host and would be slower."""
    found: list[tuple[PlanRequest, SearchResult]] = []
    for tried in requests:
        result = search(tried, offers, limit, explains=explains)
        if result.by_cost:
            found.append((tried, result))
            if not tried.is_lora or result.by_cost[0].job.levers.offload_param == "none":
                break
    return min(found, key=lambda each: each[1].by_cost[0].gpu_seconds, default=(tried, result))


def _list_layouts(request: PlanRequest, offers: Sequence[Offer]) -> list[tuple[Job, list[Gpu]]]:
    """Every layout whose groups share the rows of a step evenly, with the kinds of GPU that could run it."""
    kinds: dict[tuple[int, int], list[Gpu]] = {}
    for offer in offers:
        for count in _list_counts(offer):
            kinds.setdefault((count, offer.gpu.gpus_per_node), []).append(offer.gpu)
    recipe = make_plan_recipe(request)
    return [
        (make_plan_job(recipe, request, layout, per_node), gpus)
        for (count, per_node), gpus in kinds.items()
        for sp_size in list_sp_sizes(request.shape, count, request.max_length)
        if request.rows_per_step % (count // sp_size) == 0
        for layout in list_sp_layouts(request.shape, count, sp_size)
    ]


def _list_counts(offer: Offer) -> list[int]:
    """Parts of a machine, then whole machines."""
    per_node = offer.gpu.gpus_per_node
    counts = {n for n in list_divisors(per_node) if n < per_node}
    counts |= {per_node * machines for machines in MACHINE_COUNTS}
    counts |= {offer.max_gpus} if offer.max_gpus < per_node or offer.max_gpus % per_node == 0 else set()
    return sorted(n for n in counts if n <= offer.max_gpus)


def list_sp_sizes(shape: ModelShape, num_gpus: int, max_length: int | None) -> list[int]:
    """Sizes that divide GPUs and the row, and heads where no ring is possible; `max_length` None: any row. A ring of
    many short shares is left out: the heads are shared as far as they can be, up to a machine."""
    if find_obstacle(shape):
        return [1]
    sizes = [n for n in list_divisors(num_gpus) if (max_length or 0) % n == 0 and shape.list_ring_sizes(n)]
    return [n for n in sizes if n in shape.sp_sizes or n // find_ring_size(shape, n) * MAX_RING >= n]


def list_limits(request: PlanRequest, offers: Sequence[Offer]) -> list[str]:
    """What no plan can use of an offer: GPUs beyond whole machines, and sp_sizes that do not divide the row."""
    limits = []
    for offer in offers:
        most, per_node = max(_list_counts(offer)), offer.gpu.gpus_per_node
        if most < offer.max_gpus:
            left = f"{offer.max_gpus - most} of {offer.max_gpus} x {offer.gpu.key} are left unused"
            limits.append(f"{left}: beyond one machine of {per_node}, whole machines, at most {MACHINE_COUNTS[-1]}")
    counts = {count for offer in offers for count in _list_counts(offer)}
    legal = max(max(list_sp_sizes(request.shape, count, None)) for count in counts)
    used = max(max(list_sp_sizes(request.shape, count, request.max_length)) for count in counts)
    if used < legal:
        below = request.max_length // legal * legal
        also = f"; with {below:,} up to {legal}" if below else ""
        limits.append(f"sp_size divides the row: with {request.max_length:,} tokens it is at most {used}{also}")
    return limits


def make_plan_recipe(request: PlanRequest) -> Recipe:
    """The planned recipe without its layout and levers. Plan and recipe then have the same engine settings and row."""
    draft = Draft(
        "owner/model",
        max(2, request.max_length),
        Layout(),
        is_lora=request.is_lora,
        lora_targets=_list_lora_targets(request.shape),
        quantize_base=request.quantize_base,
        zero_stage=request.zero_stage,
    )
    recipe = parse_recipe(write_draft(draft)).recipe
    return recipe.model_copy(update={"preference": Preference()}) if request.has_pairs else recipe


def _list_lora_targets(shape: ModelShape) -> tuple[str, ...]:
    return () if shape.adapts_all else list_linear_modules(shape)


def make_plan_job(recipe: Recipe, request: PlanRequest, layout: Layout, gpus_per_node: int) -> Job:
    """The longest row is searched with one row for each group."""
    rounds = request.rows_per_step // layout.dp_size if request.max_length else 1
    parallel = recipe.parallel.model_copy(update={**vars(layout)})
    train = recipe.train.model_copy(update={"gradient_accumulation_steps": rounds})
    recipe = recipe.model_copy(update={"parallel": parallel, "train": train})
    job = make_job(recipe, request.shape, Levers(), gpus_per_node=gpus_per_node)
    return replace(job, has_disk=request.nvme_path is not None)


@dataclass(frozen=True)
class Longest:
    """The longest row on all GPUs of an offer, with the method that was taken."""

    candidate: Candidate
    max_length: int
    request: PlanRequest

    @property
    def stretch(self) -> float:
        """How many times the positions of the model the row has; 1 where it has no rotary positions."""
        shape = self.request.shape
        return max(1.0, self.max_length / shape.max_position_embeddings) if shape.rope_type else 1.0


def search_longest(requests: Sequence[PlanRequest], offers: Sequence[Offer]) -> list[Longest]:
    """With every lever, for each kind. All weights where a row fits; of adapters those with the longest row. The
    requests' `max_length` is not used."""
    check_known(requests[0].shape, "--model")
    found = []
    for offer in offers:
        rows = list[Longest]()
        for request in requests:
            row = _find_longest(request, offer)
            rows += [row] if row is not None else []
            if rows and not request.is_lora:
                break
        found += [max(rows, key=lambda row: row.max_length)] if rows else []
    return sorted(found, key=lambda row: -row.max_length)


def _find_longest(request: PlanRequest, offer: Offer) -> Longest | None:
    recipe, shape = make_plan_recipe(request), request.shape
    best: tuple[int, Job] | None = None
    for sp_size in list_sp_sizes(shape, offer.max_gpus, None):
        for layout in list_sp_layouts(shape, offer.max_gpus, sp_size):
            job = make_plan_job(recipe, request, layout, offer.gpu.gpus_per_node)
            length, levers = find_longest(job, offer.gpu)
            if shape.rope_type and shape.rope_type not in REPLACEABLE:  # its positions cannot be stretched
                length = min(length, shape.max_position_embeddings // sp_size * sp_size)
            if length and (best is None or length > best[0]):
                best = length, replace(job, levers=levers, max_length=length)
    if best is None:
        return None
    longest = best[1]
    if length := confirm_length(longest, offer.gpu, *find_longest(longest, offer.gpu)):
        longest = replace(longest, max_length=min(length, best[0]))

    def propose(room: Gpu) -> Job:
        cheapest = find_cheapest(replace(longest, levers=Levers()), room, list(COSTS))
        return replace(longest, levers=cheapest or longest.levers)

    settled, ledger = confirm(propose, offer.gpu)
    fit, speed = judge(settled, ledger, offer.gpu), compute_speed(settled, offer.gpu)
    return Longest(Candidate(offer.gpu, settled, fit, speed, request.num_tokens), longest.max_length, request)


def draft_candidate(best: Candidate, request: PlanRequest, model: str, file: str) -> tuple[Draft, tuple[str, ...]]:
    """A recipe for a candidate, and its header."""
    job, gpu = best.job, best.gpu
    trained = "LoRA" if request.is_lora else "Full fine-tuning"
    trained = trained if request.quantize_base is None else f"LoRA on a base in {request.quantize_base}"
    rows = request.rows_per_step
    steps = max(1, -(-request.num_tokens // best.speed.tokens_per_step))
    disk = compute_node_disk_bytes(job) / GIB
    draft = Draft(
        model=model,
        max_length=request.max_length,
        layout=job.layout,
        is_lora=request.is_lora,
        lora_targets=_list_lora_targets(request.shape),
        quantize_base=request.quantize_base,
        zero_stage=job.zero_stage,
        levers=job.levers,
        accumulation=job.accumulation,
        gpu=gpu.key,
        needs_stretch=needs_stretch(request.shape, request.max_length),
        dataset="emozilla/pg19",
        is_packed=not request.shape.crosses_documents,
        max_steps=steps,
        nvme_path=request.nvme_path if uses_disk(job.levers) else None,
    )
    peak = f"{best.fit.gpu_peak_bytes / GIB:.1f} of {best.fit.gpu_capacity_bytes / GIB:.1f} GiB"
    machines = format_count(job.num_nodes, "machine")
    hours = format_range(*(seconds / 3600 for seconds in best.seconds_range))
    header = (
        f"{trained} at {request.max_length:,} tokens, as planned.",
        "",
        f"model      {request.shape.name}",
        f"hardware   {job.world_size} x {gpu.name} ({gpu.key}) in {machines}",
        *([f"disk       {disk:,.0f} GiB free below memory.nvme_path on each machine"] if disk else []),
        f"launch     ulysses train {file}",
        f"predicted  {peak} per GPU, {format_range(*best.tokens_per_second)} tokens/s, {hours} hours",
        f"measured   not on this GPU: {best.accuracy.reason}",
        f"step       {best.speed.tokens_per_step:,} tokens, as in every plan: {format_count(rows, 'row')}",
        "",
        "Put your own data in place of the data set below.",
    )
    return draft, header
