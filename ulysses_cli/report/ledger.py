"""An estimate as plain data for programs and as text for people: verdict, ledger by phase, time, money, suggestion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ulysses_cli.plan.hardware import GIB
from ulysses_cli.plan.ledger.zero.swapping import compute_node_disk_bytes
from ulysses_cli.plan.levers import get_key
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.planner.estimate import Estimate
from ulysses_cli.report.printing import format_table
from ulysses_cli.report.quantities import format_seconds

WORDS = {"fits": "fits", "too_close": "too close to tell", "does_not_fit": "does not fit"}
NUM_LARGEST = 4


def describe_estimate(found: Estimate, said: Sequence[str] = ()) -> dict[str, Any]:
    """One object for one GPU kind. Keys are stable."""
    fit, speed, levers = found.fit, found.speed, found.job.levers
    cost = found.usd_per_million_tokens
    return {
        "gpu": found.gpu.key,
        "gpu_name": found.gpu.name,
        "num_processes": found.job.world_size,
        "mesh": {
            "dp_replicate_size": found.job.layout.dp_replicate_size,
            "dp_shard_size": found.job.layout.dp_shard_size,
            "sp_size": found.job.layout.sp_size,
        },
        "row_tokens": found.job.row_tokens,
        "assumptions": list(said),
        "verdict": fit.verdict,
        "wall": fit.wall,
        "gpu_peak_bytes": fit.gpu_peak_bytes,
        "gpu_peak_allocated_bytes": found.ledger.gpu_allocated_bytes,
        "gpu_capacity_bytes": fit.gpu_capacity_bytes,
        "host_peak_bytes_per_node": fit.host_peak_bytes,
        "host_capacity_bytes_per_node": fit.host_capacity_bytes,
        "disk_bytes_per_node": compute_node_disk_bytes(found.job),
        "margin_bytes": fit.margin_bytes,
        "uncertainty_bytes": fit.uncertainty_bytes,
        "host_margin_bytes": fit.host_margin_bytes,
        "host_uncertainty_bytes": fit.host_uncertainty_bytes,
        "peak_phase": found.ledger.peak.phase,
        "peak_moment": found.ledger.peak.name,
        "phases": {phase: dict(moment.lines) for phase, moment in found.ledger.phases.items()},
        "host_phases": found.ledger.host_phases,
        "fragmentation_bytes": found.ledger.fragmentation,
        "levers": {**vars(levers)},
        "lever_reasons": found.choice.reasons,
        "max_length": found.max_length,
        "max_length_all_levers": found.max_length_all_levers,
        "suggestion": found.suggestion,
        "step_seconds": speed.step_seconds,
        "step_parts": speed.parts,
        "step_hidden": speed.hidden,
        "tokens_per_second": speed.tokens_per_second,
        "mfu": speed.mfu,
        "usd_per_million_tokens": None if cost is None else {"low": cost[0], "high": cost[1]},
        "price_date": found.gpu.price_date or None,
    }


def describe_verdict(found: Estimate) -> dict[str, Any]:
    """What validate-config shows of an estimate."""
    return {
        "gpu": found.gpu.key,
        "verdict": found.fit.verdict,
        "text": format_verdict(found),
        "levers": {**vars(found.job.levers)},
        "lever_reasons": found.choice.reasons,
        "suggestion": found.suggestion,
    }


def format_estimate(found: Estimate, name: str, said: Sequence[str] = ()) -> str:
    fit, peak, gpu, job = found.fit, found.ledger.peak, found.gpu, found.job
    layout, disk = job.layout, compute_node_disk_bytes(job)
    largest = sorted(peak.lines.items(), key=lambda item: -item[1])[:NUM_LARGEST]
    product = f"dp_replicate {layout.dp_replicate_size} x dp_shard {layout.dp_shard_size} x sp {layout.sp_size}"
    rows = [
        ("estimate", f"{name} on {format_count(job.world_size, 'GPU')}: {gpu.name} ({gpu.key})"),
        ("model", f"{job.shape.name}, {job.row_tokens:,} tokens per row, {job.local_tokens:,} per rank; {product}"),
        *(("assumed", each) for each in said),
        ("verdict", format_verdict(found)),
        ("peak", f"in {_name(peak.phase)}, {peak.name}: {', '.join(f'{_name(n)} {_gib(s)}' for n, s in largest)}"),
        ("host", f"{_gib(fit.host_peak_bytes)} of about {_gib(fit.host_capacity_bytes)} GiB on the fullest node"),
        *([("disk", f"{_gib(disk)} GiB below memory.nvme_path on the fullest node")] if disk else []),
        ("longest", _format_longest(found)),
        *_format_speed(found),
    ]
    text = "\n".join(f"{label:<10} {value}" for label, value in rows)
    text += "\n\n" + _format_phases(found) + "\n\n" + _format_levers(found)
    if found.suggestion:
        text += "\n\nthe cheapest change that fits:\n\n" + "\n".join(
            f"  {line}" for line in found.suggestion.splitlines()
        )
    elif fit.verdict != "fits":
        text += "\n\nno lever makes it fit: use more GPUs per row (sp_size), GPUs with more memory, or shorter rows"
    return text


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f}"


def _name(key: str) -> str:
    return key.replace("_", " ")


def format_verdict(found: Estimate) -> str:
    fit = found.fit
    if fit.wall == "host":
        room = f"{_gib(fit.host_peak_bytes)} of about {_gib(fit.host_capacity_bytes)} GiB of a node's host memory"
        unsure = _gib(fit.host_uncertainty_bytes)
        return f"{WORDS[fit.verdict]}: {room}, uncertain by {unsure}; the GPU needs {_gib(fit.gpu_peak_bytes)}"
    margin, unsure = _gib(abs(fit.margin_bytes)), _gib(fit.uncertainty_bytes)
    side = "margin" if fit.margin_bytes >= 0 else "over by"
    room = f"{_gib(fit.gpu_peak_bytes)} of {_gib(fit.gpu_capacity_bytes)} GiB"
    return f"{WORDS[fit.verdict]}: {room}, {side} {margin}, uncertain by {unsure}"


def _format_longest(found: Estimate) -> str:
    as_is, most = found.max_length, found.max_length_all_levers
    why = " (beyond, a tensor passes 2^31 elements)" if found.ends_at_index else ""
    return f"{as_is:,} tokens per row with these levers{why}, {most:,} with every lever"


def _format_speed(found: Estimate) -> list[tuple[str, str]]:
    speed, cost = found.speed, found.usd_per_million_tokens
    parts = sorted(speed.parts.items(), key=lambda item: -item[1])
    shares = ", ".join(
        f"{_name(n)} {100 * s / speed.step_seconds:.0f} %" for n, s in parts if s > 0.005 * speed.step_seconds
    )
    rate = f"{speed.tokens_per_second:,.0f} tokens/s, MFU {100 * speed.mfu:.0f} %"
    rows = [
        ("speed", f"{format_seconds(speed.step_seconds)} per step of {speed.tokens_per_step:,} tokens: {rate}"),
        ("", shares),
    ]
    if cost is None:
        rows.append(("price", f"not known for {found.gpu.key}: add usd_per_hour to ~/.config/ulysses/hardware.yaml"))
    else:
        source = ", ".join(filter(None, (found.gpu.price_source, found.gpu.price_date)))
        rows.append(("price", f"{format_money(cost)} per million tokens ({source})"))
    return rows


def format_money(span: tuple[float, float]) -> str:
    """Two digits: prices are not known better."""
    return f"USD {_two_digits(span[0])} to {_two_digits(span[1])}"


def _two_digits(value: float) -> str:
    if value >= 100:
        return f"{float(f'{value:.2g}'):,.0f}"
    return f"{value:.2g}" if value >= 0.01 else f"{value:.1g}"


def _format_phases(found: Estimate) -> str:
    """Lines down, phases across, in GiB; what rounds to nothing everywhere is left out."""
    phases = found.ledger.phases
    names = list(dict.fromkeys(name for moment in phases.values() for name in moment.lines))
    shown = [name for name in names if any(moment.lines.get(name, 0) >= 0.005 * GIB for moment in phases.values())]

    def cell(size: int) -> str:
        return f"{size / GIB:.2f}" if size >= 0.005 * GIB else "."

    rows = [(_name(name), *(cell(moment.lines.get(name, 0)) for moment in phases.values())) for name in shown]
    rows.append(("sum", *(f"{moment.num_bytes / GIB:.2f}" for moment in phases.values())))
    hosts = found.ledger.host_phases
    rows.append(("host, per node", *(f"{sum(hosts[phase].values()) / GIB:.2f}" for phase in phases)))
    return format_table(("GiB per GPU", *(_name(phase) for phase in phases)), rows)


def _format_levers(found: Estimate) -> str:
    values = vars(found.job.levers)
    rows = [
        (
            get_key(name),
            str(value).lower() if isinstance(value, bool) else str(value),
            found.choice.reasons.get(name, "the recipe's"),
        )
        for name, value in values.items()
    ]
    return format_table(("lever", "value", "why"), rows)
