"""Formats the memory of a traced step as plain data and as text, alone or next to the formula's prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ulysses_cli.plan.hardware import Gpu
from ulysses_cli.plan.ledger.device import (
    CONTEXT_BYTES,
    DEVICE_LINES,
    DEVICE_SHARE_UNSURE,
    SHARE_UNSURE,
    compute_uncertainty,
)
from ulysses_cli.plan.ledger.ledger import Ledger
from ulysses_cli.plan.ledger.memory_snapshot import MemorySnapshot
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.planner.fit import compare
from ulysses_cli.report.ledger import VERDICTS, format_phases
from ulysses_cli.report.printing import format_table
from ulysses_cli.report.quantities import format_gib

ON_DISK = {"activations": "what layers save", "states": "the optimizer's states", "weights": "weights"}


def describe_trace(trace: Mapping[str, Any], ledger: Ledger | None) -> dict[str, Any]:
    """`gpu_peak_allocated_bytes` is what torch.cuda.max_memory_allocated would return. `difference` is how far the
    formula's peak is above the trace's, as a share of the trace's."""
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
        formula = list_formula(ledger)
        described["formula_phases"] = formula
        described["difference"] = max(formula.values()) / peak - 1
    return described


def list_formula(ledger: Ledger) -> dict[str, int]:
    """The formula's bytes per phase, without the lines that a trace cannot see: memory outside of torch's tensors."""
    unseen = (*DEVICE_LINES, "cublas_workspace")
    return {
        phase: sum(size for name, size in moment.lines.items() if name not in unseen)
        for phase, moment in ledger.phases.items()
    }


def judge_trace(trace: Mapping[str, Any], gpu: Gpu) -> dict[str, Any]:
    """The verdict by the trace alone: the allocator's memory and the CUDA context. NCCL's buffers are not known."""
    peak = trace["reserved"]["expandable_segments"] + CONTEXT_BYTES
    uncertainty = round(SHARE_UNSURE * peak + DEVICE_SHARE_UNSURE * CONTEXT_BYTES)
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
    peak = f"peak in {fullest.phase.replace('_', ' ')}, {fullest.name}"
    return f"{format_verdicts(results, first)}\n{peak}\n\n{format_phases(moments)}"


def format_verdicts(
    results: Sequence[Mapping[str, Any]],
    first: str = "no formula describes this model; this is a trace of its real layers",
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
    text = format_table(("allocated, GiB per GPU", "formula", "trace", "formula is"), rows)
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
