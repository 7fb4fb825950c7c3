"""What a traced step found, alone or beside the formula's, as plain data and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ulysses_cli.plan.hardware import GIB, Gpu
from ulysses_cli.plan.ledger.device import CONTEXT_BYTES, DEVICE_LINES, DEVICE_SHARE_UNSURE, SHARE_UNSURE
from ulysses_cli.plan.ledger.ledger import Ledger
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.report.ledger import WORDS
from ulysses_cli.report.printing import format_table


def describe_trace(found: Mapping[str, Any], ledger: Ledger | None) -> dict[str, Any]:
    """`gpu_peak_allocated_bytes` is what torch.cuda.max_memory_allocated would say; `difference` is the formula's, as a
    share of the trace's."""
    phases = dict(found["device"])
    peak = max(phases.values())
    described = {
        "gpu_peak_allocated_bytes": peak,
        "gpu_peak_reserved_bytes": found["reserved"],
        "phases": phases,
        "host_phases_per_rank": found["host"],
        "num_layers": found["num_layers"],
        "traced_layers": found["traced_layers"],
        "from_cache": found["from_cache"],
    }
    if ledger is not None:
        formula = list_formula(ledger)
        described["formula_phases"] = formula
        described["difference"] = max(formula.values()) / peak - 1
    return described


def list_formula(ledger: Ledger) -> dict[str, int]:
    """The formula's bytes of what a trace sees: what stands beside torch's tensors is left out."""
    unseen = (*DEVICE_LINES, "cublas_workspace")
    return {
        phase: sum(size for name, size in moment.lines.items() if name not in unseen)
        for phase, moment in ledger.phases.items()
    }


def judge_trace(found: Mapping[str, Any], gpu: Gpu) -> dict[str, Any]:
    """By the trace alone: what the allocator holds, and beside it the context. NCCL's buffers are not known."""
    peak = found["reserved"]["expandable_segments"] + CONTEXT_BYTES
    unsure, margin = round(SHARE_UNSURE * peak + DEVICE_SHARE_UNSURE * CONTEXT_BYTES), gpu.memory_bytes - peak
    verdict = "fits" if margin >= unsure else "too_close" if margin > -unsure else "does_not_fit"
    return {
        "gpu": gpu.key,
        "gpu_name": gpu.name,
        "verdict": verdict,
        "gpu_peak_bytes": peak,
        "gpu_capacity_bytes": gpu.memory_bytes,
        "margin_bytes": margin,
        "uncertainty_bytes": unsure,
        "peak_phase": max(found["device"], key=lambda phase: found["device"][phase]),
        "trace": describe_trace(found, None),
    }


def format_verdicts(results: Sequence[Mapping[str, Any]]) -> str:
    lines = ["no formula describes this model; this is a trace of its real layers"]
    for each in results:
        room = f"{_gib(each['gpu_peak_bytes'])} of {_gib(each['gpu_capacity_bytes'])} GiB"
        words = f"{WORDS[each['verdict']]}: {room}, uncertain by {_gib(each['uncertainty_bytes'])}"
        lines.append(f"{each['gpu_name']} ({each['gpu']}): {words}")
    return "\n".join(lines)


def format_trace(found: Mapping[str, Any], ledger: Ledger | None) -> str:
    told = describe_trace(found, ledger)
    formula, phases = told.get("formula_phases", {}), told["phases"]
    rows = []
    for phase, size in phases.items():
        beside = (_gib(formula[phase]), f"{formula[phase] / size - 1:+.1%}") if phase in formula else ("", "")
        rows.append((phase.replace("_", " "), *beside[:1], _gib(size), *beside[1:]))
    peak = told["gpu_peak_allocated_bytes"]
    if formula:
        rows.append(("peak", _gib(max(formula.values())), _gib(peak), f"{told['difference']:+.1%}"))
    else:
        rows.append(("peak", "", _gib(peak), ""))
    text = format_table(("allocated, GiB per GPU", "formula", "trace", "formula is"), rows)
    reserved = told["gpu_peak_reserved_bytes"]
    layers = ", ".join(map(str, told["traced_layers"]))
    return (
        f"{text}\n\nreserved by the allocator: {_gib(reserved['expandable_segments'])} GiB with expandable segments, "
        f"{_gib(reserved['fixed_segments'])} without\n"
        f"traced: {layers} of {format_count(told['num_layers'], 'layer')}, the real model and engine on "
        "tensors without data"
        f"{', remembered' if told['from_cache'] else ''}"
    )


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}"
