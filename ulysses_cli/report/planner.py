"""Formats the planner's results as plain data and as text, and where the ranks of a run stand: machines, their GPUs,
which of them share a row, or a copy of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.layout import Placement, list_divisors
from ulysses_cli.plan.ledger.machine import compute_node_disk_bytes
from ulysses_cli.plan.levers import Levers, swaps_activations
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.planner.candidates import Candidate, SearchResult, Wall
from ulysses_cli.plan.planner.estimate import Estimate, explain_gathers, find_host_bound
from ulysses_cli.plan.planner.rings import LayoutInside
from ulysses_cli.plan.planner.search import Longest
from ulysses_cli.plan.speed import compute_second_gather_seconds, compute_speed
from ulysses_cli.plan.units import format_count, format_range, format_usd
from ulysses_cli.report.printing import format_table
from ulysses_cli.report.quantities import format_gib, format_seconds, format_step_seconds

SHOWN_MACHINES = 8


Seconds = tuple[float, float]  # of a step: as the ranks stand, and if each group stood on one machine


@dataclass(frozen=True)
class CrossingCosts:
    """What is predicted for groups that cross machines. `inside`: the layout whose rows need not cross, if it fits."""

    exchange: Seconds
    gather: Seconds
    inside: LayoutInside | None = None


def describe_placement(placement: Placement, costs: CrossingCosts | None, shape: ModelShape) -> dict[str, Any]:
    shown = range(min(placement.num_nodes, SHOWN_MACHINES))
    has_copies = placement.layout.dp_replicate_size > 1
    return {
        "machines": placement.num_nodes,
        "gpus_per_machine": placement.gpus_per_node,
        "rows_by_machine": [[[ranks[0], ranks[-1]] for ranks in placement.list_machine(node)] for node in shown],
        "copies_by_machine": [placement.list_copies(node) for node in shown] if has_copies else [],
        "crossing_rows": placement.num_crossing,
        "crossing_copies": placement.num_crossing_copies,
        "exchange_seconds": costs.exchange if costs is not None else None,
        "gather_seconds": costs.gather if costs is not None and has_copies else None,
        "warnings": list_warnings(placement, costs, shape),
    }


def list_warnings(placement: Placement, costs: CrossingCosts | None, shape: ModelShape) -> list[str]:
    """Of groups that cross machines. `shape`: its heads decide which layouts are legal."""
    found = (
        explain_crossing(placement, costs, shape),
        explain_crossing_copies(placement, costs.gather if costs is not None else None),
    )
    return [warning for warning in found if warning]


def compute_crossing_costs(placement: Placement, estimate: Estimate) -> CrossingCosts:
    """`estimate`: for machines of as many GPUs as the placement's."""
    layout, job, here = placement.layout, estimate.job, estimate.gpu
    row, copy = (replace(here, gpus_per_node=size) for size in (layout.sp_size, layout.replica_size))
    return CrossingCosts(
        (compute_speed(job, here).parts["exchange"], compute_speed(job, row).parts["exchange"]),
        (
            job.accumulation * compute_second_gather_seconds(job, here),
            job.accumulation * compute_second_gather_seconds(job, copy),
        ),
        estimate.inside,
    )


def _tell_cost(what: str, seconds: Seconds | None) -> str:
    if seconds is None:
        return "validate-config with --gpu says what it costs"
    here, together = (format_seconds(part) for part in seconds)
    return f"{what} is predicted to take {here} of a step instead of {together} on one machine"


def explain_crossing_copies(placement: Placement, seconds: Seconds | None) -> str:
    """'' where no copy of the weights crosses machines."""
    if not placement.num_crossing_copies:
        return ""
    layout, per_node = placement.layout, placement.gpus_per_node
    count = f"{format_count(placement.num_crossing_copies, 'copy')} of the weights of {layout.dp_replicate_size}"
    cost = _tell_cost("the backward's gather", seconds)
    better = [copies for copies in list_divisors(layout.world_size // layout.sp_size)
              if copies > 1 and per_node % (layout.world_size // copies) == 0]  # fmt: skip
    hint = (
        f"dp_replicate_size {better[0]} with dp_shard_size {layout.dp_size // better[0]} keeps each inside a machine"
        if better
        else "dp_replicate_size 1 gathers as fast, and needs no memory for copies"
    )
    return f"{count} cross machines: {layout.replica_size} ranks each, machines of {per_node}; {cost}; {hint}"


def explain_crossing(placement: Placement, costs: CrossingCosts | None, shape: ModelShape) -> str:
    """'' where no row crosses machines."""
    if not placement.num_crossing:
        return ""
    size, rows, gpus = placement.layout.sp_size, placement.layout.dp_size, format_count(placement.gpus_per_node, "GPU")
    if placement.must_cross:
        text = f"every row crosses machines: sp_size {size} is more than {gpus}"
    else:
        crossing = format_count(placement.num_crossing, "row")
        text = f"{crossing} of {rows} cross machines without need: sp_size {size} does not divide {gpus}"
    cost = _tell_cost("the exchange", costs.exchange if costs is not None else None)
    if costs is None:
        inside = _name_size_inside(placement, shape)
    else:
        inside = format_inside(costs.inside, placement.layout.ring_size) if costs.inside is not None else ""
    return "; ".join((text, cost, *filter(None, (inside, _name_ring_inside(placement, shape)))))


def format_inside(inside: LayoutInside, own_ring: int) -> str:
    """The layout with its predicted time beside that of the job's own."""
    layout, (rows, own_rows) = inside.layout, inside.rows_per_step
    ring = f", ring_size {layout.ring_size}" if max(layout.ring_size, own_ring) > 1 else ""
    steps = f" and gradient_accumulation_steps {inside.accumulation}" if inside.accumulation > 1 else ""
    took, own = format_seconds(inside.seconds), format_seconds(inside.own_seconds)
    text = f"sp_size {layout.sp_size}{ring} with dp_shard_size {layout.dp_shard_size}{steps} fits and would not cross"
    more = f" (a step then has {rows} rows instead of {own_rows})" if rows != own_rows else ""
    return f"{text}: predicted to take {took} for the tokens of a step instead of {own}{more}"


def _name_size_inside(placement: Placement, shape: ModelShape) -> str:
    """The layout with the most ranks for each row, of those that are legal and keep rows inside machines. '' where the
    row asks for more ranks than a machine has."""
    if placement.must_cross:
        return ""
    layout = placement.layout
    fitting = [
        size
        for size in list_divisors(placement.gpus_per_node)
        if size < layout.sp_size
        and shape.list_ring_sizes(size)
        and layout.world_size % (layout.dp_replicate_size * size) == 0
    ]
    if not fitting:
        return ""
    size, ring = fitting[-1], shape.list_ring_sizes(fitting[-1])[0]
    named = f", ring_size {ring}" if max(ring, layout.ring_size) > 1 else ""
    shards = layout.world_size // (layout.dp_replicate_size * size)
    return f"sp_size {size}{named} with dp_shard_size {shards} would not cross"


def _name_ring_inside(placement: Placement, shape: ModelShape) -> str:
    """The smallest ring whose ranks exchange heads inside machines."""
    if not placement.num_crossing_heads:
        return "heads are exchanged inside machines, and only keys and values cross"
    size, per_node = placement.layout.sp_size, placement.gpus_per_node
    inside = [ring for ring in shape.list_ring_sizes(size) if ring > 1 and per_node % (size // ring) == 0]
    return f"with ring_size {inside[0]} only keys and values would cross" if inside else ""


def format_placement(described: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns lines of (label, text): a machine each, with the ranks that share a row in brackets."""
    size = format_count(described["gpus_per_machine"], "GPU")
    copies = described["copies_by_machine"]
    words = ", those beside a copy share its weights" if copies else ""
    lines = [("machines", f"{described['machines']} with {size} each; ranks in brackets share a row{words}")]
    for node, rows in enumerate(described["rows_by_machine"]):
        drawn = " ".join(f"[{' '.join(map(str, range(first, last + 1)))}]" for first, last in rows)
        lines.append(("", f"{node}: {drawn}{_name_copies(copies[node]) if copies else ''}"))
    if described["machines"] > SHOWN_MACHINES:
        lines.append(("", "..."))
    return [*lines, *(("warning", warning) for warning in described["warnings"])]


def _name_copies(copies: Sequence[int]) -> str:
    return f"  {'copies' if len(copies) > 1 else 'copy'} {', '.join(map(str, copies))}"


HEADER = ("GPUs", "sp x dp", "levers", "hours", "money", "tokens/s", "margin GiB", "limited by")


def describe_candidate(candidate: Candidate) -> dict[str, Any]:
    job = candidate.job
    speed = candidate.speed
    fit = candidate.fit
    usd = candidate.usd
    seconds, rates = candidate.seconds_range, candidate.tokens_per_second
    return {
        "gpu": candidate.gpu.key,
        "num_gpus": job.world_size,
        "mesh": asdict(job.layout),
        "levers": {**vars(job.levers)},
        "zero_stage": job.zero_stage,
        "row_tokens": job.max_length,
        "tokens_per_step": speed.tokens_per_step,
        "accumulation": job.accumulation,
        "hours": candidate.seconds / 3600,
        "hours_range": {"low": seconds[0] / 3600, "high": seconds[1] / 3600},
        "startup_hours": candidate.startup_seconds / 3600,
        "usd": None if usd is None else {"low": usd[0], "high": usd[1]},
        "tokens_per_second": speed.tokens_per_second,
        "tokens_per_second_range": {"low": rates[0], "high": rates[1]},
        "accuracy": candidate.accuracy.reason,
        "mfu": speed.mfu,
        "step_seconds": speed.step_seconds,
        "gpu_peak_bytes": fit.gpu_peak_bytes,
        "gpu_capacity_bytes": fit.gpu_capacity_bytes,
        "margin_bytes": fit.margin_bytes,
        "uncertainty_bytes": fit.uncertainty_bytes,
        "host_peak_bytes_per_node": fit.host_peak_bytes,
        "host_margin_bytes": fit.host_margin_bytes,
        "host_uncertainty_bytes": fit.host_uncertainty_bytes,
        "disk_bytes_per_node": compute_node_disk_bytes(job),
        "limited_by": candidate.limit,
    }


def describe_search(result: SearchResult, assumptions: Sequence[str]) -> dict[str, Any]:
    shown = (*result.by_cost, *result.by_time)
    return {
        "feasible": bool(result.by_cost),
        "assumptions": list(assumptions),
        "by_cost": [describe_candidate(candidate) for candidate in result.by_cost],
        "by_time": [describe_candidate(candidate) for candidate in result.by_time],
        "walls": [describe_wall(wall) for wall in result.walls],
        "left_out": dict(result.left_out),
        "rings": list(result.rings),
        "usd_per_gpu_hour": {candidate.gpu.key: _describe_price(candidate.gpu) for candidate in shown},
    }


def describe_wall(wall: Wall) -> dict[str, str]:
    return {"wall": wall.kind, "message": wall.message, "hint": wall.hint}


def describe_longest(results: Sequence[Longest], assumptions: Sequence[str]) -> dict[str, Any]:
    return {
        "assumptions": list(assumptions),
        "longest": [
            {
                "max_length": result.max_length,
                "method": result.request.method,
                "positions": result.request.shape.max_position_embeddings,
                "stretch": result.stretch,
                **describe_candidate(result.candidate),
            }
            for result in results
        ],
    }


MOST_STRETCHED = 32  # arXiv 2309.00071: Llama 2 from 4Ki to 128Ki


def format_search(result: SearchResult, title: str, assumptions: Sequence[str]) -> str:
    text = _format_title(title, assumptions)
    text += "\n\nby cost\n" + format_table(HEADER, map(_format_row, result.by_cost))
    text += "\n\nby time\n" + format_table(HEADER, map(_format_row, result.by_time))
    notes = [f"left out: {key}: {reason}" for key, reason in result.left_out.items()] + list(result.rings)
    notes += list_disks([*result.by_cost, *result.by_time])
    notes += list_gathers([*result.by_cost, *result.by_time])
    notes.append(_explain_startup([*result.by_cost, *result.by_time]))
    notes += list_accuracy([*result.by_cost, *result.by_time])
    text += "\n\n" + "\n".join(notes)
    return text + "\n\n" + format_prices([candidate.gpu for candidate in (*result.by_cost, *result.by_time)])


def _explain_startup(candidates: Sequence[Candidate]) -> str:
    seconds = [candidate.startup_seconds for candidate in candidates]
    span = " to ".join(dict.fromkeys(f"{each / 60:.0f}" for each in (min(seconds), max(seconds))))
    return f"hours and money begin with the start, about {span} min: processes, weights, a rehearsed step and save"


def list_accuracy(candidates: Sequence[Candidate]) -> list[str]:
    """Why speeds are ranges, once for each reason."""
    kinds: dict[str, list[str]] = {}
    for candidate in candidates:
        kinds.setdefault(candidate.accuracy.reason, []).append(f"{candidate.job.world_size} x {candidate.gpu.key}")
    lines = ["speed is predicted, not measured on these GPUs:"]
    lines += [f"  {', '.join(dict.fromkeys(named))}: {reason}" for reason, named in kinds.items()]
    bound = [each for each in candidates if each.speed.is_host_bound]
    if bound and (found := find_host_bound(bound[0].job, bound[0].gpu)):
        names = dict.fromkeys(f"{each.job.world_size} x {each.gpu.key}" for each in bound)
        what, helps = found.explain()
        lines += [f"limited by the host: {', '.join(names)}", f"  {next(iter(names))} {what}", f"  {helps}"]
    return lines


def list_gathers(candidates: Sequence[Candidate]) -> list[str]:
    """Of models with experts, for each number of GPUs of a kind the candidate that comes first."""
    first = {(each.job.world_size, each.gpu.key): each for each in reversed(candidates)}
    lines = ((f"{num} x {key}", explain_gathers(each.job, each.gpu)) for (num, key), each in first.items())
    return [f"{name}: {text}" for name, text in lines if text][::-1]


def list_disks(candidates: Sequence[Candidate]) -> list[str]:
    """What each candidate keeps below --nvme-path, and how fast that is taken to be."""
    lines = []
    for candidate in candidates:
        if needed := compute_node_disk_bytes(candidate.job):
            name, rate = f"{candidate.job.world_size} x {candidate.gpu.key}", candidate.gpu.efficiency.disk_gb_s
            lines.append(f"{name}: {format_gib(needed)} GiB below --nvme-path on each machine, moved at {rate:g} GB/s")
    return list(dict.fromkeys(lines))


def _format_title(title: str, assumptions: Sequence[str]) -> str:
    return title + "".join(f"\nassumed: {assumption}" for assumption in assumptions)


def format_prices(gpus: Sequence[Gpu]) -> str:
    """The prices in use, one line per kind of GPU. A limit on cost is compared with the middle of the range."""
    return "\n".join(dict.fromkeys(f"price: {gpu.key}: {_format_price(gpu)}" for gpu in gpus))


def _format_price(gpu: Gpu) -> str:
    if gpu.usd_low is None or gpu.usd_high is None or gpu.usd_middle is None:
        return "not known; add usd_per_hour to ~/.config/ulysses/hardware.yaml"
    source = ", ".join(filter(None, (gpu.price_source, gpu.price_date)))
    span = format_usd(gpu.usd_low, gpu.usd_high)
    return f"{span} per GPU and hour, {gpu.usd_middle:.2f} in the middle ({source})"


def _describe_price(gpu: Gpu) -> dict[str, Any]:
    return {
        "low": gpu.usd_low,
        "high": gpu.usd_high,
        "middle": gpu.usd_middle,
        "source": gpu.price_source,
        "date": gpu.price_date,
    }


def format_longest(results: Sequence[Longest], title: str, assumptions: Sequence[str]) -> str:
    header = (
        "GPUs",
        "longest row",
        "positions",
        "method",
        "sp x dp",
        "levers",
        "tokens/s",
        "step",
        "margin GiB",
        "limited by",
    )
    rows = []
    for result in results:
        row = _format_row(result.candidate)
        step = format_step_seconds(result.candidate.speed.step_seconds, result.candidate.accuracy)
        positions = f"{result.stretch:.3g} x" if result.stretch > 1 else "inside"
        about = (f"{result.max_length:,}", positions, result.request.method)
        rows.append((row[0], *about, row[1], row[2], row[5], step, row[6], row[7]))
    candidates = [result.candidate for result in results]
    notes = _explain_positions(results) + list_disks(candidates) + list_accuracy(candidates)
    text = _format_title(title, assumptions) + "\n\n" + format_table(header, rows)
    return text + ("\n\n" + "\n".join(notes) if notes else "")


def _explain_positions(results: Sequence[Longest]) -> list[str]:
    """What rows beyond the model's positions need besides memory."""
    shape = results[0].request.shape
    if max(result.stretch for result in results) <= 1:
        return []
    positions, known = f"{shape.max_position_embeddings:,}", shape.max_position_embeddings * MOST_STRETCHED
    return [
        f"{shape.name} was made for {positions} positions: a longer row needs model.rope_scaling (`plan --write` and "
        "`init` write yarn) and training on such rows",
        f"memory says nothing of quality: YaRN's paper shows stretches up to {MOST_STRETCHED} x, here {known:,} tokens",
    ]


def _format_row(candidate: Candidate) -> tuple[str, ...]:
    job, fit, usd = candidate.job, candidate.fit, candidate.usd
    ring = f" (ring {job.layout.ring_size})" if job.layout.ring_size > 1 else ""
    return (
        f"{job.world_size} x {candidate.gpu.key}",
        f"{job.layout.sp_size}{ring} x {job.layout.dp_size}",
        format_levers(job.levers, job.zero_stage),
        format_range(*(seconds / 3600 for seconds in candidate.seconds_range)),
        "no price" if usd is None else format_usd(*usd, digits=2),
        format_range(*candidate.tokens_per_second),
        f"{format_gib(fit.margin_bytes)} of {format_gib(fit.gpu_capacity_bytes, 0)}",
        candidate.limit.replace("_", " "),
    )


def format_levers(levers: Levers, zero_stage: int = 3) -> str:
    """A short list of the levers that are on, and a stage that gathers no weights."""
    place = "disk" if swaps_activations(levers) else "host"
    names = {
        "tiled_loss": levers.tiled_loss,
        "tiled_mlp": levers.tiled_mlp,
        f"activations of {format_count(levers.offloaded_layers, 'layer')} on {place}": levers.offloaded_layers > 0,
        format_count(levers.head_chunks, "head chunk"): levers.head_chunks > 1,
        "overlapped exchange": levers.overlap_exchange,
        "no recompute": not levers.gradient_checkpointing,
        f"{format_count(levers.saved_layers, 'layer')} not recomputed": levers.saved_layers > 0,
        "full recompute": levers.gradient_checkpointing == "full",
        f"optimizer on {levers.offload_optimizer}": levers.offload_optimizer != "none",
        "leaf layers": levers.leaf_layers,
        "early steps": levers.early_groups > 0,
        f"weights on {levers.offload_param}": levers.offload_param != "none",
        "ZeRO-1": zero_stage == 1,
    }
    return ", ".join(name.replace("_", " ") for name, is_on in names.items() if is_on) or "none"
