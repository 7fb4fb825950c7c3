"""What stands in the way of a plan: of all plans, and of those on one kind of GPU. Says how far away the nearest is."""

from __future__ import annotations

from collections.abc import Sequence

from ulysses_cli.plan.hardware import GIB, Gpu
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.planner.candidates import Candidate, Offer, Wall, Wish, format_usd
from ulysses_cli.plan.planner.draft import find_obstacle
from ulysses_cli.plan.planner.fit import Fit


def count_distance(fit: Fit) -> tuple[bool, float]:
    """From fitting: what would fit the GPU comes before what would not."""
    if fit.wall == "host":
        return False, fit.host_peak_bytes / fit.host_capacity_bytes
    return True, fit.gpu_peak_bytes / fit.gpu_capacity_bytes


def find_excess(wish: Wish, each: Candidate) -> str:
    """The bound that a fitting candidate breaks, or ''."""
    if wish.deadline_seconds is not None and each.seconds > wish.deadline_seconds:
        return "deadline"
    if wish.budget_usd is not None and each.usd_middle > wish.budget_usd:
        return "price"
    return ""


def explain_absence(wish: Wish, gpu: Gpu, tried: Sequence[Candidate]) -> str:
    """Why a kind of GPU is not among the best, though others are."""
    own = [each for each in tried if each.gpu.key == gpu.key]
    fitting = [each for each in own if each.fit.verdict == "fits"]
    if not own:
        return "no kernel can index a row on so few of them"
    if not fitting:
        near = min(own, key=lambda each: count_distance(each.fit))
        fit = near.fit
        needs, has, what = fit.gpu_peak_bytes, fit.gpu_capacity_bytes, "on each GPU"
        if fit.wall == "host":
            needs, has, what = fit.host_peak_bytes, fit.host_capacity_bytes, "of host memory"
        return f"does not fit: {near.job.world_size} of them need {needs / GIB:,.1f} GiB {what}, of {has / GIB:,.1f}"
    cheapest, fastest = min(each.usd_middle for each in fitting), min(each.seconds for each in fitting)
    if wish.budget_usd is not None and gpu.usd_middle is None:
        return "no price is known to hold against --budget: add usd_per_hour to hardware.yaml"
    if wish.budget_usd is not None and cheapest > wish.budget_usd:
        return f"the cheapest that fits costs about {format_usd(cheapest)}"
    if wish.deadline_seconds is not None and fastest > wish.deadline_seconds:
        return f"the fastest that fits takes {fastest / 3600:.3g} h"
    return "fits, behind the others" if any(not find_excess(wish, each) for each in fitting) else "either late or dear"


def list_walls(
    wish: Wish,
    offers: Sequence[Offer],
    layouts: Sequence[tuple[Job, list[Gpu]]],
    tried: Sequence[Candidate],
    fitting: Sequence[Candidate],
) -> list[Wall]:
    """What of time and money stands in the way of those that fit; otherwise what nothing fits into."""
    if fitting:
        walls = [_find_deadline_wall(wish, fitting), _find_price_wall(wish, fitting)]
    elif not tried:
        walls = [_find_index_wall(wish, offers)]
    else:
        walls = [_find_gpu_wall(wish, tried), _find_host_wall(tried), _find_heads_wall(wish, offers, layouts)]
    return [wall for wall in walls if wall is not None]


def _find_deadline_wall(wish: Wish, fitting: Sequence[Candidate]) -> Wall | None:
    if wish.deadline_seconds is None:
        return None
    hours, most = min(each.seconds for each in fitting) / 3600, wish.deadline_seconds / 3600
    message = f"the fastest that fits takes {hours:.3g} h, {hours / most:,.2g} times the deadline of {most:.3g} h"
    if hours <= most:
        message = f"what meets the deadline of {most:.3g} h costs more than the budget"
    return Wall("deadline", message, "offer more GPUs, allow more time, or train on fewer tokens")


def _find_price_wall(wish: Wish, fitting: Sequence[Candidate]) -> Wall | None:
    if wish.budget_usd is None:
        return None
    cheapest = min(fitting, key=lambda each: each.usd_middle)
    usd = cheapest.usd_middle
    if usd == float("inf"):
        return Wall("price", "no price is known for any kind that fits", "add usd_per_hour to hardware.yaml")
    message = f"the cheapest that fits costs about {format_usd(usd)}, {usd / wish.budget_usd:,.1f} times the budget"
    if usd <= wish.budget_usd:
        hours = cheapest.seconds / 3600
        message = f"the cheapest, about {format_usd(usd)}, is inside the budget but takes {hours:.3g} h"
    return Wall("price", message, f"raise --budget, or train on fewer tokens{_suggest_lora(wish)}")


def _find_index_wall(wish: Wish, offers: Sequence[Offer]) -> Wall:
    widest = max((offer.max_gpus for offer in offers), default=0)
    message = f"rows of {wish.max_length:,} tokens pass what kernels can index on {format_count(widest, 'GPU')}"
    hint = "use shorter rows, or more GPUs for a row as far as heads allow"
    if widest > 1 and wish.max_length % 8:
        hint = f"{wish.max_length:,} divides by few sp_sizes: use {wish.max_length // 8 * 8:,}, or shorter rows"
    return Wall("heads", message, hint)


def _find_gpu_wall(wish: Wish, tried: Sequence[Candidate]) -> Wall | None:
    on_gpu = [each for each in tried if each.fit.wall == "gpu"]
    if not on_gpu:
        return None
    near = min(on_gpu, key=lambda each: each.fit.gpu_peak_bytes / each.fit.gpu_capacity_bytes)
    needs, spare, has = (
        size / GIB for size in (near.fit.gpu_peak_bytes, near.fit.uncertainty_bytes, near.fit.gpu_capacity_bytes)
    )
    how = f"{near.job.world_size} x {near.gpu.key} with sp_size {near.job.layout.sp_size} and the smallest levers"
    message = f"nearest is {how}: {needs:.1f} GiB and {spare:.1f} for safety, of {has:.1f}"
    return Wall("gpu", message, f"offer GPUs with more memory, more of them, or shorter rows{_suggest_lora(wish)}")


def _find_host_wall(tried: Sequence[Candidate]) -> Wall | None:
    on_host = [each for each in tried if each.fit.wall == "host"]
    if not on_host:
        return None
    near = min(on_host, key=lambda each: each.fit.host_peak_bytes / each.fit.host_capacity_bytes)
    needs, has = near.fit.host_peak_bytes / GIB, near.fit.host_capacity_bytes / GIB
    message = (
        f"{near.job.world_size} x {near.gpu.key} need {needs:,.0f} GiB of host memory, "
        f"{near.fit.host_uncertainty_bytes / GIB:,.0f} for safety, on a node of about {has:,.0f}"
    )
    return Wall("host", message, "offer machines with more memory: host_gib_per_gpu in hardware.yaml")


def _find_heads_wall(wish: Wish, offers: Sequence[Offer], layouts: Sequence[tuple[Job, list[Gpu]]]) -> Wall | None:
    most = max(job.layout.sp_size for job, _ in layouts)
    if most >= max(offer.max_gpus for offer in offers):
        return None
    limit = find_obstacle(wish.shape) or format_count(wish.shape.num_heads, "head")
    message = f"a row is shared by at most {format_count(most, 'GPU')} here: {limit}"
    return Wall("heads", message, "sp_size divides the heads")


def _suggest_lora(wish: Wish) -> str:
    return "" if wish.is_lora else ", or try --method lora"
