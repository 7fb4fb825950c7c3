"""Formats predicted memory as plain data and as text: an estimate with its ledger by phase, time, cost and
suggestion; a traced step, alone or beside the prediction; and memory by row length, also as a page with a chart.
Predicts nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ulysses_cli.plan.hardware import GIB, Gpu
from ulysses_cli.plan.ledger.job import Lines, MemorySnapshot
from ulysses_cli.plan.ledger.ledger import Ledger
from ulysses_cli.plan.ledger.machine import (
    CONTEXT_BYTES,
    DEVICE_LINES,
    DEVICE_SHARE_UNSURE,
    LEDGER_SHARE_UNSURE,
    compute_node_disk_bytes,
    compute_uncertainty,
)
from ulysses_cli.plan.levers import SPELLED, get_key
from ulysses_cli.plan.planner.estimate import Estimate
from ulysses_cli.plan.planner.fit import compare
from ulysses_cli.plan.planner.lever_choice import WRITTEN
from ulysses_cli.plan.planner.rings import BetterRing
from ulysses_cli.plan.planner.sweep import Curve, LengthSweep, compute_sweep
from ulysses_cli.plan.units import format_count, format_range, format_usd
from ulysses_cli.report.page.charts import Mark, Series, draw_lines
from ulysses_cli.report.page.page import Chart, Note, PageSection, Table, make_page
from ulysses_cli.report.planner import format_inside
from ulysses_cli.report.printing import format_table
from ulysses_cli.report.quantities import format_gib, format_step_seconds

VERDICTS = {"fits": "fits", "too_close": "too close to tell", "does_not_fit": "does not fit"}
NUM_LARGEST = 4
VISIBLE_BYTES = 0.005 * GIB  # a smaller size rounds to 0.00 GiB


def describe_estimate(estimate: Estimate, assumptions: Sequence[str] = ()) -> dict[str, Any]:
    """The estimate for one kind of GPU, as plain data. Its keys are stable."""
    fit = estimate.fit
    speed = estimate.speed
    job = estimate.job
    ledger = estimate.ledger
    cost, rates = estimate.usd_per_million_tokens, estimate.tokens_per_second
    return {
        "gpu": estimate.gpu.key,
        "gpu_name": estimate.gpu.name,
        "num_processes": job.world_size,
        "mesh": asdict(job.layout),
        "row_tokens": job.max_length,
        "assumptions": list(assumptions),
        "verdict": fit.verdict,
        "wall": fit.wall,
        "gpu_peak_bytes": fit.gpu_peak_bytes,
        "gpu_peak_allocated_bytes": ledger.gpu_allocated_bytes,
        "gpu_capacity_bytes": fit.gpu_capacity_bytes,
        "host_peak_bytes_per_node": fit.host_peak_bytes,
        "host_capacity_bytes_per_node": fit.host_capacity_bytes,
        "disk_bytes_per_node": compute_node_disk_bytes(job),
        "margin_bytes": fit.margin_bytes,
        "uncertainty_bytes": fit.uncertainty_bytes,
        "host_margin_bytes": fit.host_margin_bytes,
        "host_uncertainty_bytes": fit.host_uncertainty_bytes,
        "peak_phase": ledger.peak.phase,
        "peak_moment": ledger.peak.name,
        "phases": {phase: dict(moment.lines) for phase, moment in ledger.phases.items()},
        "host_phases": ledger.host_phases,
        "fragmentation_bytes": ledger.fragmentation,
        "levers": {**vars(job.levers)},
        "lever_reasons": estimate.choice.reasons,
        "zero_stage": job.zero_stage,
        "zero_stage_reason": estimate.choice.stage_reason,
        "max_length": estimate.max_length,
        "max_length_all_levers": estimate.max_length_all_levers,
        "suggestion": estimate.suggestion,
        "own_ring": estimate.own_ring,
        "slow_attention": estimate.slow_attention,
        "layout_inside": None if estimate.inside is None else asdict(estimate.inside),
        "better_ring": None if estimate.better_ring is None else asdict(estimate.better_ring),
        "step_seconds": speed.step_seconds,
        "step_parts": speed.parts,
        "step_hidden": speed.hidden,
        "tokens_per_second": speed.tokens_per_second,
        "tokens_per_second_range": {"low": rates[0], "high": rates[1]},
        "accuracy": estimate.accuracy.reason,
        "reference_share": estimate.reference_share,
        "head_share": estimate.head_share,
        "gather_over_compute": speed.gather_over_compute,
        "is_host_bound": speed.is_host_bound,
        "host_remedies": [asdict(each) for each in estimate.host_bound.remedies] if estimate.host_bound else [],
        "mfu": speed.mfu,
        "usd_per_million_tokens": None if cost is None else {"low": cost[0], "high": cost[1]},
        "price_date": estimate.gpu.price_date or None,
    }


def describe_verdict(estimate: Estimate) -> dict[str, Any]:
    """The part of an estimate that validate-config shows."""
    return {
        "gpu": estimate.gpu.key,
        "verdict": estimate.fit.verdict,
        "text": format_verdict(estimate),
        "levers": {**vars(estimate.job.levers)},
        "lever_reasons": estimate.choice.reasons,
        "zero_stage": estimate.job.zero_stage,
        "zero_stage_reason": estimate.choice.stage_reason,
        "suggestion": estimate.suggestion,
    }


def format_estimate(estimate: Estimate, name: str, assumptions: Sequence[str] = ()) -> str:
    fit = estimate.fit
    peak = estimate.ledger.peak
    gpu, choice = estimate.gpu, estimate.choice
    job = estimate.job
    mesh, disk = format_mesh(asdict(job.layout)), compute_node_disk_bytes(job)
    largest = sorted(peak.lines.items(), key=lambda item: -item[1])[:NUM_LARGEST]
    largest_text = ", ".join(f"{_spell_key(name)} {format_gib(size)}" for name, size in largest)
    host = f"{format_gib(fit.host_peak_bytes)} of about {format_gib(fit.host_capacity_bytes)} GiB"
    rows = [
        ("estimate", f"{name} on {format_count(job.world_size, 'GPU')}: {gpu.name} ({gpu.key})"),
        ("model", f"{job.shape.name}, {job.max_length:,} tokens per row, {job.local_tokens:,} per rank; {mesh}"),
        *(("assumed", assumption) for assumption in assumptions),
        ("verdict", format_verdict(estimate)),
        ("peak", f"in {_name_moment(peak)}: {largest_text}"),
        ("host", f"{host} on the fullest node"),
        *([("disk", f"{format_gib(disk)} GiB below memory.nvme_path on the fullest node")] if disk else []),
        *([("stage", format_stage(job.zero_stage, choice.stage_reason))] if choice.stage_reason != WRITTEN else []),
        ("longest", _format_longest(estimate)),
        *_format_speed(estimate),
        *([("attention", estimate.slow_attention)] if estimate.slow_attention else []),
        *([("ring", estimate.own_ring)] if estimate.own_ring else []),
        *([("ring", format_better_ring(estimate.better_ring))] if estimate.better_ring else []),
        *([("layout", format_inside(estimate.inside, job.layout.ring_size))] if estimate.inside else []),
    ]
    text = "\n".join(f"{label:<10} {value}" for label, value in rows)
    text += (
        "\n\n" + format_phases(estimate.ledger.phases, estimate.ledger.host_phases) + "\n\n" + _format_levers(estimate)
    )
    if estimate.suggestion:
        text += "\n\nthe cheapest change that fits:\n\n" + "\n".join(
            f"  {line}" for line in estimate.suggestion.splitlines()
        )
    elif fit.verdict != "fits":
        text += "\n\nno lever makes it fit: use more GPUs per row (sp_size), GPUs with more memory, or shorter rows"
    return text


def format_stage(stage: int, reason: str) -> str:
    return f"ZeRO-{stage}: {reason}"


def _name_moment(moment: MemorySnapshot) -> str:
    phase = _spell_key(moment.phase)
    return moment.name if moment.name.startswith(phase) else f"{phase}, {moment.name}"


def format_mesh(mesh: Mapping[str, int]) -> str:
    """The sizes of a layout's axes, as a product."""
    ring = mesh.get("ring_size", 1)
    inside = f" (ring {ring} x ulysses {mesh['sp_size'] // ring})" if ring > 1 else ""
    return f"dp_replicate {mesh['dp_replicate_size']} x dp_shard {mesh['dp_shard_size']} x sp {mesh['sp_size']}{inside}"


def _spell_key(key: str) -> str:
    return key.replace("_", " ")


def format_verdict(estimate: Estimate) -> str:
    fit = estimate.fit
    verdict, gpu_peak = VERDICTS[fit.verdict], format_gib(fit.gpu_peak_bytes)
    if fit.wall == "host":
        host = f"{format_gib(fit.host_peak_bytes)} of about {format_gib(fit.host_capacity_bytes)} GiB"
        uncertainty = format_gib(fit.host_uncertainty_bytes)
        return f"{verdict}: {host} of a node's host memory, uncertain by {uncertainty}; the GPU needs {gpu_peak}"
    margin, uncertainty = format_gib(abs(fit.margin_bytes)), format_gib(fit.uncertainty_bytes)
    side = "margin" if fit.margin_bytes >= 0 else "over by"
    memory = f"{gpu_peak} of {format_gib(fit.gpu_capacity_bytes)} GiB"
    return f"{verdict}: {memory}, {side} {margin}, uncertain by {uncertainty}"


def _format_longest(estimate: Estimate) -> str:
    limit = " (a longer row has a tensor of more than 2^31 elements)" if estimate.ends_at_index else ""
    these, every = f"{estimate.max_length:,}", f"{estimate.max_length_all_levers:,}"
    return f"{these} tokens per row with these levers{limit}, {every} with every lever"


def format_better_ring(ring: BetterRing) -> str:
    gain = "fits" if ring.gain is None else f"takes {ring.gain:.1%} less time"
    fewer = f" and memory.attention_head_chunks: {ring.head_chunks}" if ring.head_chunks is not None else ""
    return f"parallel.ring_size: {ring.size}{fewer} {gain} with these levers"


def _format_speed(estimate: Estimate) -> list[tuple[str, str]]:
    speed, gpu, cost = estimate.speed, estimate.gpu, estimate.usd_per_million_tokens
    parts = sorted(speed.parts.items(), key=lambda item: -item[1])
    shares = ", ".join(
        f"{_spell_key(name)} {seconds / speed.step_seconds:.0%}"
        for name, seconds in parts
        if seconds > 0.005 * speed.step_seconds
    )
    accuracy = estimate.accuracy
    mfu = f"MFU {format_range(100 * speed.mfu * accuracy.low, 100 * speed.mfu * accuracy.high)}%"
    rate = f"{format_range(*estimate.tokens_per_second)} tokens/s, {mfu}"
    step = format_step_seconds(speed.step_seconds, accuracy)
    rows = [
        ("speed", f"{step} per step of {speed.tokens_per_step:,} tokens: {rate}"),
        ("", f"predicted, not measured on this GPU: {accuracy.reason}"),
        ("", shares),
    ]
    if estimate.reference_share is not None:
        rows.append(
            ("", f"before step 1 a forward of each row, {estimate.reference_share:.0%} of the first epoch's time")
        )
    if estimate.head_share is not None:
        less = f"a step takes up to {estimate.head_share:.0%} less"
        rows.append(("", f"the head is counted on all tokens, and runs on targets alone: {less}"))
    if estimate.host_bound is not None:
        what, helps = estimate.host_bound.explain()
        rows += [("", f"limited {what}"), ("", helps)]
    if estimate.gathers:
        rows.append(("", estimate.gathers))
    if cost is None:
        rows.append(("price", f"not known for {gpu.key}: add usd_per_hour to ~/.config/ulysses/hardware.yaml"))
    else:
        source = ", ".join(filter(None, (gpu.price_source, gpu.price_date)))
        rows.append(("price", f"{format_usd(*cost, digits=2)} per million tokens ({source})"))
    return rows


def format_phases(phases: Mapping[str, MemorySnapshot], hosts: Mapping[str, Lines] | None = None) -> str:
    """A table of GiB with a row per ledger line and a column per phase. Leaves out lines that are 0.00 in every
    phase."""
    names = list(dict.fromkeys(name for moment in phases.values() for name in moment.lines))
    shown = [name for name in names if any(moment.lines.get(name, 0) >= VISIBLE_BYTES for moment in phases.values())]

    def cell(size: int) -> str:
        return format_gib(size, 2) if size >= VISIBLE_BYTES else "."

    rows = [(_spell_key(name), *(cell(moment.lines.get(name, 0)) for moment in phases.values())) for name in shown]
    rows.append(("sum", *(format_gib(moment.num_bytes, 2) for moment in phases.values())))
    if hosts is not None:
        rows.append(("host, per node", *(format_gib(sum(hosts[phase].values()), 2) for phase in phases)))
    return format_table(("GiB per GPU", *(_spell_key(phase) for phase in phases)), rows)


def _format_levers(estimate: Estimate) -> str:
    values = vars(estimate.job.levers)
    rows = [
        (
            get_key(name),
            str(value).lower() if isinstance(value, bool) else str(value),
            estimate.choice.reasons.get(name, "set by the recipe"),
        )
        for name, value in values.items()
    ]
    return format_table(("lever", "value", "why"), rows)


ON_DISK = {"activations": "what layers save", "states": "the optimizer's states", "weights": "weights"}


def describe_trace(trace: Mapping[str, Any], ledger: Ledger | None) -> dict[str, Any]:
    """`gpu_peak_allocated_bytes` is what torch.cuda.max_memory_allocated would return. `difference` is how far the
    predicted peak is above the trace's, as a share of the trace's."""
    phases = dict(trace["device"])
    peak = max(phases.values())
    described = {
        "gpu_peak_allocated_bytes": peak,
        "gpu_peak_reserved_bytes": trace["reserved"],
        "phases": phases,
        "host_phases_per_rank": trace["host"],
        "disk_bytes_per_rank": trace["disk"],
        "num_layers": trace["num_layers"],
        "traced_layers": trace["traced_layers"],
        "from_cache": trace["from_cache"],
    }
    if ledger is not None:
        predicted = list_predicted(ledger)
        described["formula_phases"] = predicted
        described["difference"] = max(predicted.values()) / peak - 1
    return described


def list_predicted(ledger: Ledger) -> dict[str, int]:
    """The predicted bytes per phase, without the lines that a trace cannot see: memory outside of torch's tensors."""
    unseen = (*DEVICE_LINES, "cublas_workspace")
    return {
        phase: sum(size for name, size in moment.lines.items() if name not in unseen)
        for phase, moment in ledger.phases.items()
    }


def judge_trace(trace: Mapping[str, Any], gpu: Gpu) -> dict[str, Any]:
    """The verdict by the trace alone: the allocator's memory and the CUDA context. NCCL's buffers are not known."""
    peak = trace["reserved"]["expandable_segments"] + CONTEXT_BYTES
    uncertainty = round(LEDGER_SHARE_UNSURE * peak + DEVICE_SHARE_UNSURE * CONTEXT_BYTES)
    phase = max(trace["device"], key=lambda phase: trace["device"][phase])
    return {**_judge(gpu, peak, uncertainty), "peak_phase": phase, "trace": describe_trace(trace, None)}


def judge_moments(moments: Mapping[str, MemorySnapshot], gpu: Gpu) -> dict[str, Any]:
    """The verdict by a run of the model's own layers on sizes alone."""
    fullest = max(moments.values(), key=lambda moment: moment.num_bytes)
    judged = _judge(gpu, fullest.num_bytes, compute_uncertainty(fullest.lines))
    phases = {phase: dict(moment.lines) for phase, moment in moments.items()}
    return {**judged, "peak_phase": fullest.phase, "peak_moment": fullest.name, "phases": phases}


def _judge(gpu: Gpu, peak: int, uncertainty: int) -> dict[str, Any]:
    margin = gpu.memory_bytes - peak
    return {
        "gpu": gpu.key,
        "gpu_name": gpu.name,
        "verdict": compare(margin, uncertainty),
        "gpu_peak_bytes": peak,
        "gpu_capacity_bytes": gpu.memory_bytes,
        "margin_bytes": margin,
        "uncertainty_bytes": uncertainty,
    }


def format_moments(results: Sequence[Mapping[str, Any]], moments: Mapping[str, MemorySnapshot]) -> str:
    fullest = max(moments.values(), key=lambda moment: moment.num_bytes)
    first = "the GPU's memory alone, of this model's own layers: time, price and host memory are not predicted for it"
    return f"{format_verdicts(results, first)}\npeak in {_name_moment(fullest)}\n\n{format_phases(moments)}"


def format_verdicts(
    results: Sequence[Mapping[str, Any]],
    first: str = "weights of this model are not known; this is a trace of its real layers",
) -> str:
    lines = [first]
    for result in results:
        memory = f"{_gib(result['gpu_peak_bytes'])} of {_gib(result['gpu_capacity_bytes'])} GiB"
        verdict = f"{VERDICTS[result['verdict']]}: {memory}, uncertain by {_gib(result['uncertainty_bytes'])}"
        lines.append(f"{result['gpu_name']} ({result['gpu']}): {verdict}")
    return "\n".join(lines)


def format_trace(trace: Mapping[str, Any], ledger: Ledger | None) -> str:
    described = describe_trace(trace, ledger)
    formula, phases = described.get("formula_phases", {}), described["phases"]
    rows = []
    for phase, size in phases.items():
        predicted, difference = "", ""
        if phase in formula:
            predicted, difference = _gib(formula[phase]), f"{formula[phase] / size - 1:+.1%}"
        rows.append((phase.replace("_", " "), predicted, _gib(size), difference))
    peak = described["gpu_peak_allocated_bytes"]
    if formula:
        rows.append(("peak", _gib(max(formula.values())), _gib(peak), f"{described['difference']:+.1%}"))
    else:
        rows.append(("peak", "", _gib(peak), ""))
    text = format_table(("allocated, GiB per GPU", "predicted", "trace", "predicted is"), rows)
    reserved = described["gpu_peak_reserved_bytes"]
    layers = ", ".join(map(str, described["traced_layers"]))
    disk = described["disk_bytes_per_rank"]
    parts = [f"{what} {_gib(disk[name])}" for name, what in ON_DISK.items() if disk.get(name)]
    on_disk = f"below memory.nvme_path, GiB for each GPU: {', '.join(parts)}\n" if parts else ""
    return (
        f"{text}\n\n{on_disk}"
        f"reserved by the allocator: {_gib(reserved['expandable_segments'])} GiB with expandable segments, "
        f"{_gib(reserved['fixed_segments'])} without\n"
        f"traced: {layers} of {format_count(described['num_layers'], 'layer')}, the real model and engine on "
        "tensors without data"
        f"{', read from the cache' if described['from_cache'] else ''}"
    )


def _gib(size: float) -> str:
    return format_gib(size, 2)


LEVERS = "with the levers that a run of each length would choose where the recipe leaves them open"


def describe_sweep(estimate: Estimate, sweep: LengthSweep) -> dict[str, Any]:
    return {
        "gpu": estimate.gpu.key,
        "gpu_capacity_bytes": estimate.fit.gpu_capacity_bytes,
        "lengths": list(sweep.lengths),
        "gpu_peak_bytes": {curve.name: list(curve.peaks) for curve in sweep.curves},
        "fits": {curve.name: list(curve.fits) for curve in sweep.curves},
    }


def format_sweep(estimate: Estimate, sweep: LengthSweep) -> str:
    """A table of GiB per GPU. An x marks what does not fit."""
    capacity = estimate.fit.gpu_capacity_bytes

    def cell(curve: Curve, index: int) -> str:
        peak = curve.peaks[index]
        return "-" if peak is None else f"{format_gib(peak)}{'' if curve.fits[index] else ' x'}"

    rows = [
        (f"{length:,}", *(cell(curve, index) for curve in sweep.curves)) for index, length in enumerate(sweep.lengths)
    ]
    gpus = f"{estimate.job.world_size} x {estimate.gpu.key}"
    head = f"{estimate.job.shape.name} on {gpus}: GiB per GPU, of {format_gib(capacity)}"
    table = format_table(("tokens per row", *(curve.name for curve in sweep.curves)), rows)
    return f"{head}\n\n{table}\n\n{_explain_marks(sweep)}"


def _explain_marks(sweep: LengthSweep) -> str:
    cells = [cell for curve in sweep.curves for cell in zip(curve.peaks, curve.fits, strict=True)]
    lines = [f"{LEVERS}; large tiles stay off"]
    if any(peak is not None and not fits for peak, fits in cells):
        lines.append("x: does not fit the GPU or the host with any of them")
    if any(peak is None for peak, _ in cells):
        closed = [f"memory.{SPELLED.get(name, name)} is {str(value).lower()}" for name, value in sweep.closed]
        condition = f" while {' and '.join(closed)}" if closed else ""
        lines.append(f"-: a tensor of a rank would exceed 2^31 elements, which kernels cannot index{condition}")
    return "\n".join(lines)


def make_sweep_page(sweeps: Sequence[tuple[Estimate, LengthSweep]]) -> str:
    sections = []
    for estimate, sweep in sweeps:
        capacity = estimate.fit.gpu_capacity_bytes
        limit = 2.5 * capacity  # higher values are not drawn: they would flatten the part of the curves that matters
        series = [
            Series(curve.name, sweep.lengths, [p if p is None or p <= limit else None for p in curve.peaks])
            for curve in sweep.curves
        ]
        marks = [Mark(capacity, f"{estimate.gpu.key}")]
        gpus = f"{estimate.job.world_size} x {estimate.gpu.name}"
        svg = draw_lines(gpus, series, "tokens per row (tokens)", "memory per GPU (bytes)", x_log=True, marks=marks)
        rows = [
            (f"{length:,}", *("-" if (peak := c.peaks[i]) is None else format_gib(peak) for c in sweep.curves))
            for i, length in enumerate(sweep.lengths)
        ]
        table = Table(("tokens per row", *(curve.name for curve in sweep.curves)), rows, "GiB per GPU")
        note = f"Predicted, {LEVERS}; the last curve has every lever."
        sections.append(PageSection(f"{estimate.job.shape.name} on {gpus}", [Chart(svg, note, table)]))
    about = Note("These are predictions made before a run. A rehearsal on the machine measures the peak.")
    return make_page("Memory by row length", [*sections, PageSection("About this page", [about])])


def compute_sweeps(estimates: Sequence[Estimate]) -> list[tuple[Estimate, LengthSweep]]:
    return [(estimate, compute_sweep(estimate.longer, estimate.gpu, estimate.choice.reasons)) for estimate in estimates]
