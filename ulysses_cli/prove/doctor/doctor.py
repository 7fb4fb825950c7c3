"""`doctor`: runs every check on this machine (and on a recipe, if one is named) and lists what to fix."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from ulysses_cli.plan.hardware import Hardware
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.prove.doctor import machine, software
from ulysses_cli.prove.doctor.checkup import Check, CheckTarget, Finding, run_checks
from ulysses_cli.prove.results import Findings, Report

GPU_HINT = (
    "to test and measure this GPU, in a checkout: make gpu (each result beside its prediction, 25 minutes); without an "
    "installation: python3 benchmarks/gpu.py --minutes 25"
)


def _load_check(name: str) -> Check:
    """A check of device_checks.py. That module imports torch, which may be broken on this machine, so its import is
    part of the check."""

    def check(target: CheckTarget) -> Iterator[Finding]:
        yield from getattr(importlib.import_module("ulysses_cli.prove.doctor.device_checks"), name)(target)

    return check


CHECKS: tuple[tuple[str, Check], ...] = (
    ("packages", software.check_packages),
    ("GPUs", machine.check_gpus),
    ("arithmetic", _load_check("check_arithmetic")),
    ("topology", machine.check_topology),
    ("exchange", _load_check("check_exchange")),
    ("attention", _load_check("check_kernels")),
    ("compilers", software.check_compilers),
    ("build locks", software.check_locks),
    ("DeepSpeed's operators", software.check_operators),
    ("CPU Adam", software.check_cpu_adam),
    ("page-locked memory", _load_check("check_pinned")),
    ("memory", machine.check_memory),
    ("disks", machine.check_disks),
    ("limits", machine.check_limits),
)


def examine(
    recipe: Recipe | None, shape: ModelShape | None, hardware: Hardware, subject: str, report: Report
) -> Findings:
    findings, num_gpus = Findings("doctor", subject or "this machine"), count_gpus()
    run_checks(CheckTarget(recipe, shape, hardware, num_gpus), CHECKS, findings, report)
    if num_gpus:
        findings.notes.append(GPU_HINT)
    return findings


def count_gpus() -> int:
    """The GPUs that torch sees; 0 where torch or the driver is broken."""
    try:
        torch = importlib.import_module("torch")
        return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0
    except Exception:  # noqa: BLE001 - a driver that does not fit torch raises anything
        return 0
