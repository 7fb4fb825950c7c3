"""What a check of doctor gets and gives: one machine, perhaps one recipe -> rows, and what to fix. Nothing is checked
here; a check that itself breaks is a finding too.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ulysses_cli.plan.hardware import Hardware
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.prove.results import Findings, Row, Tell, Verdict

COMMAND_SECONDS = 20


@dataclass(frozen=True)
class Patient:
    """`num_gpus` is what torch sees; recipe and shape are None when only the machine is asked about."""

    recipe: Recipe | None
    shape: ModelShape | None
    hardware: Hardware
    num_gpus: int

    @property
    def wants_gpu(self) -> bool:
        return self.recipe is not None and self.recipe.run.device != "cpu"

    @property
    def device(self) -> str:
        is_cpu = self.recipe is not None and not self.wants_gpu
        return "cuda" if self.num_gpus and not is_cpu else "cpu"


@dataclass(frozen=True)
class Finding:
    """One result of a check. `fix` is what to do about it."""

    name: str
    verdict: Verdict
    text: str
    fix: str = ""
    values: dict[str, Any] | None = None


Check = Callable[[Patient], Iterator[Finding]]


def run_checks(patient: Patient, checks: Sequence[tuple[str, Check]], findings: Findings, tell: Tell) -> None:
    for group, check in checks:
        tell(f"checking {group}")
        try:
            for found in check(patient):
                _add(findings, group, found)
        except Exception as error:  # noqa: BLE001 - a machine may lack anything; the other checks go on
            lines = str(error).strip().splitlines() or [""]
            text = f"{type(error).__name__}: {lines[0][:200]}"
            _add(findings, group, Finding("this check", "WARN", f"could not be done: {text}"))
    order = {"FAIL": 0, "WARN": 1}
    urgent = sorted(findings.fixes, key=lambda fix: order.get(fix[0].partition(" ")[0], 2))
    findings.fixes = [(what.partition(" ")[2], how) for what, how in urgent]


def _add(findings: Findings, group: str, found: Finding) -> None:
    findings.rows.append(Row(group, found.name, found.verdict, found.values or {}, found.text))
    if found.fix and found.verdict in ("FAIL", "WARN"):
        findings.fixes.append((f"{found.verdict} {found.name}: {found.text}", found.fix))


def ask(*command: str) -> str:
    """What a program of the system says on stdout; '' when it is not there or does not answer."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_SECONDS, env={**os.environ, "LC_ALL": "C"}
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""
