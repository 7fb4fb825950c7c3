"""What the planner found, as plain data and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ulysses_cli.plan.hardware import GIB, Gpu
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.planner.candidates import Candidate, SearchResult, Wall
from ulysses_cli.plan.planner.search import Longest
from ulysses_cli.report.ledger import format_money
from ulysses_cli.report.printing import format_table
from ulysses_cli.report.quantities import format_seconds

HEADER = ("GPUs", "sp x dp", "levers", "hours", "money", "tokens/s", "margin GiB", "limited by")


def describe_candidate(each: Candidate) -> dict[str, Any]:
    layout, usd = each.job.layout, each.usd
    return {
        "gpu": each.gpu.key,
        "num_gpus": each.job.world_size,
        "mesh": {
            "dp_replicate_size": layout.dp_replicate_size,
            "dp_shard_size": layout.dp_shard_size,
            "sp_size": layout.sp_size,
        },
        "levers": {**vars(each.job.levers)},
        "row_tokens": each.job.row_tokens,
        "hours": each.seconds / 3600,
        "usd": None if usd is None else {"low": usd[0], "high": usd[1]},
        "tokens_per_second": each.speed.tokens_per_second,
        "mfu": each.speed.mfu,
        "step_seconds": each.speed.step_seconds,
        "gpu_peak_bytes": each.fit.gpu_peak_bytes,
        "gpu_capacity_bytes": each.fit.gpu_capacity_bytes,
        "margin_bytes": each.fit.margin_bytes,
        "uncertainty_bytes": each.fit.uncertainty_bytes,
        "host_peak_bytes_per_node": each.fit.host_peak_bytes,
        "host_margin_bytes": each.fit.host_margin_bytes,
        "host_uncertainty_bytes": each.fit.host_uncertainty_bytes,
        "limited_by": each.speed.limit,
    }


def describe_found(found: SearchResult, said: Sequence[str]) -> dict[str, Any]:
    return {
        "feasible": bool(found.by_cost),
        "assumptions": list(said),
        "by_cost": [describe_candidate(each) for each in found.by_cost],
        "by_time": [describe_candidate(each) for each in found.by_time],
        "walls": [describe_wall(wall) for wall in found.walls],
        "left_out": dict(found.left_out),
        "usd_per_gpu_hour": {each.gpu.key: _describe_price(each.gpu) for each in (*found.by_cost, *found.by_time)},
    }


def describe_wall(wall: Wall) -> dict[str, str]:
    return {"wall": wall.kind, "message": wall.message, "hint": wall.hint}


def describe_longest(found: Sequence[Longest], said: Sequence[str]) -> dict[str, Any]:
    return {
        "assumptions": list(said),
        "longest": [{"max_length": each.max_length, **describe_candidate(each.candidate)} for each in found],
    }


def format_found(found: SearchResult, title: str, said: Sequence[str]) -> str:
    text = title + "".join(f"\nassumed: {each}" for each in said)
    text += "\n\nby cost\n" + format_table(HEADER, [_format_row(each) for each in found.by_cost])
    text += "\n\nby time\n" + format_table(HEADER, [_format_row(each) for each in found.by_time])
    left_out = "\n".join(f"left out: {key}: {why}" for key, why in found.left_out.items())
    text += f"\n\n{left_out}" if left_out else ""
    return text + "\n\n" + format_prices([each.gpu for each in (*found.by_cost, *found.by_time)])


def format_prices(gpus: Sequence[Gpu]) -> str:
    """Which prices were taken, one line for each kind. A bound on money is held against the middle."""
    return "\n".join(dict.fromkeys(f"price: {each.key}: {_format_price(each)}" for each in gpus))


def _format_price(gpu: Gpu) -> str:
    if gpu.usd_low is None or gpu.usd_high is None or gpu.usd_middle is None:
        return "not known; add usd_per_hour to ~/.config/ulysses/hardware.yaml"
    source = ", ".join(filter(None, (gpu.price_source, gpu.price_date)))
    span = f"USD {gpu.usd_low:.2f}" if gpu.usd_low == gpu.usd_high else f"USD {gpu.usd_low:.2f} to {gpu.usd_high:.2f}"
    return f"{span} per GPU and hour, {gpu.usd_middle:.2f} in the middle ({source})"


def _describe_price(gpu: Gpu) -> dict[str, Any]:
    return {
        "low": gpu.usd_low,
        "high": gpu.usd_high,
        "middle": gpu.usd_middle,
        "source": gpu.price_source,
        "date": gpu.price_date,
    }


def format_longest(found: Sequence[Longest], title: str, said: Sequence[str]) -> str:
    header = ("GPUs", "longest row", "sp x dp", "levers", "tokens/s", "step", "margin GiB", "limited by")
    rows = []
    for each in found:
        row = _format_row(each.candidate)
        step = format_seconds(each.candidate.speed.step_seconds)
        rows.append((row[0], f"{each.max_length:,}", row[1], row[2], row[5], step, row[6], row[7]))
    return title + "".join(f"\nassumed: {each}" for each in said) + "\n\n" + format_table(header, rows)


def _format_row(each: Candidate) -> tuple[str, ...]:
    layout, usd = each.job.layout, each.usd
    return (
        f"{each.job.world_size} x {each.gpu.key}",
        f"{layout.sp_size} x {layout.dp_size}",
        format_levers(each.job.levers),
        f"{each.seconds / 3600:.3g}",
        "no price" if usd is None else format_money(usd),
        f"{each.speed.tokens_per_second:,.0f}",
        f"{each.fit.margin_bytes / GIB:.1f} of {each.fit.gpu_capacity_bytes / GIB:.0f}",
        each.speed.limit.replace("_", " "),
    )


def format_levers(levers: Levers) -> str:
    """Those that are on, in short."""
    names = {
        "tiled_loss": levers.tiled_loss,
        "tiled_mlp": levers.tiled_mlp,
        f"activations of {format_count(levers.offloaded_layers, 'layer')} on host": levers.offloaded_layers > 0,
        format_count(levers.head_chunks, "head chunk"): levers.head_chunks > 1,
        "full recompute": levers.gradient_checkpointing == "full",
        f"optimizer on {levers.offload_optimizer}": levers.offload_optimizer != "none",
        f"weights on {levers.offload_param}": levers.offload_param != "none",
    }
    return ", ".join(name.replace("_", " ") for name, is_on in names.items() if is_on) or "none"
