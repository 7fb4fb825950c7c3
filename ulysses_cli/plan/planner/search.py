"""The planner: tries legal layouts, levers and machine counts. Returns what fits with its cost and time, or the walls
that rule out every plan. contest.py settles the layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ulysses_cli.plan.hardware import GIB, Gpu
from ulysses_cli.plan.layout import Layout, list_divisors
from ulysses_cli.plan.ledger.job import Job, check_known, make_job
from ulysses_cli.plan.ledger.ledger import compute_ledger
from ulysses_cli.plan.ledger.zero.swapping import compute_node_disk_bytes
from ulysses_cli.plan.levers import Levers, uses_disk
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.planner.candidates import METHODS, Candidate, Offer, PlanRequest, SearchResult, round_cost
from ulysses_cli.plan.planner.contest import Contest
from ulysses_cli.plan.planner.draft import Draft, find_obstacle, needs_stretch, write_draft
from ulysses_cli.plan.planner.fit import judge
from ulysses_cli.plan.planner.lever_choice import (
    COSTS,
    find_cheapest,
    find_longest,
)
from ulysses_cli.plan.planner.rings import MAX_RING, explain_rings, list_sp_layouts
from ulysses_cli.plan.planner.walls import explain_absence, list_walls
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import find_ring_size
from ulysses_cli.plan.rules.adapters import check_quantized_base
from ulysses_cli.plan.rules.positions import REPLACEABLE
from ulysses_cli.plan.speed import compute_speed
from ulysses_cli.plan.units import format_range

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
    left_out = {gpu.key: explain_absence(request, gpu, contest.list_tried(gpu)) for gpu in absent}
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
    return parse_recipe(write_draft(draft)).recipe


def _list_lora_targets(shape: ModelShape) -> tuple[str, ...]:
    return () if shape.adapts_all else shape.linear_modules


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
                best = length, replace(job, levers=levers, row_tokens=length)
    if best is None:
        return None
    cheapest = find_cheapest(replace(best[1], levers=Levers()), offer.gpu, list(COSTS))
    settled = replace(best[1], levers=cheapest or best[1].levers)
    fit, speed = judge(settled, compute_ledger(settled), offer.gpu), compute_speed(settled, offer.gpu)
    return Longest(Candidate(offer.gpu, settled, fit, speed, request.num_tokens), best[0], request)


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
        zero_stage=request.zero_stage,
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
