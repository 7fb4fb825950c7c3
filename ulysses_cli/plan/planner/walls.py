"""Explains what keeps plans from fitting, in all or on one kind of GPU, and how far away the nearest one is."""

from __future__ import annotations

from collections.abc import Sequence

from ulysses_cli.plan.hardware import GIB, Gpu
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.planner.candidates import Candidate, Offer, PlanRequest, Wall
from ulysses_cli.plan.planner.draft import find_obstacle
from ulysses_cli.plan.planner.fit import Fit
from ulysses_cli.plan.units import format_usd

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
    return (
        "fits, behind the others"
        if any(not find_excess(request, plan) for plan in fitting)
        else "misses either --deadline or --budget"
    )


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
