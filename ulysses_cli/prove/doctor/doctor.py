"""Is this machine fit to train, and this recipe on it: every check is executed, what is wrong comes with its remedy."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from ulysses_cli.plan.hardware import Hardware
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.prove.doctor import machine, software
from ulysses_cli.prove.doctor.checkup import Check, Finding, Patient, run_checks
from ulysses_cli.prove.results import Findings, Tell


def _take(room: str, name: str) -> Check:
    """A check whose module needs what may be broken here: its import is part of the check."""

    def check(patient: Patient) -> Iterator[Finding]:
        yield from getattr(importlib.import_module(f"ulysses_cli.prove.{room}"), name)(patient)

    return check


CHECKS: tuple[tuple[str, Check], ...] = (
    ("packages", software.check_packages),
    ("GPUs", machine.check_gpus),
    ("arithmetic", _take("wires", "check_arithmetic")),
    ("topology", machine.check_topology),
    ("exchange", _take("wires", "check_exchange")),
    ("attention", _take("wires", "check_kernels")),
    ("compilers", software.check_compilers),
    ("build locks", software.check_locks),
    ("DeepSpeed's operators", software.check_operators),
    ("CPU Adam", software.check_cpu_adam),
    ("page-locked memory", _take("wires", "check_pinned")),
    ("memory", machine.check_memory),
    ("disks", machine.check_disks),
    ("limits", machine.check_limits),
)


def examine(recipe: Recipe | None, shape: ModelShape | None, hardware: Hardware, subject: str, tell: Tell) -> Findings:
    findings = Findings("doctor", subject or "this machine")
    run_checks(Patient(recipe, shape, hardware, count_gpus()), CHECKS, findings, tell)
    return findings


def count_gpus() -> int:
    try:
        torch = importlib.import_module("torch")
        return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0
    except Exception:  # noqa: BLE001 - a driver that does not fit torch raises anything
        return 0
