"""What doctor's checks take (a machine, and a recipe if one is named) and return (findings), and the loop over them.

Nothing is checked here. A check that raises becomes a finding, and the other checks still run.
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
from ulysses_cli.prove.results import Findings, Report, Row, Verdict

COMMAND_SECONDS = 20


@dataclass(frozen=True)
class CheckTarget:
    """What is checked. `num_gpus` is what torch sees; recipe and shape are None when the machine alone is checked."""

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


Check = Callable[[CheckTarget], Iterator[Finding]]


def run_checks(target: CheckTarget, checks: Sequence[tuple[str, Check]], findings: Findings, report: Report) -> None:
    """Runs every check and adds its results to `findings`, with the fixes of failures before those of warnings."""
    for group, check in checks:
        report(f"checking {group}")
        try:
            for finding in check(target):
                _add(findings, group, finding)
        except Exception as error:  # noqa: BLE001 - a machine may lack anything; the other checks go on
            lines = str(error).strip().splitlines() or [""]
            text = f"{type(error).__name__}: {lines[0][:200]}"
            _add(findings, group, Finding("this check", "WARN", f"could not be done: {text}"))
    order = {"FAIL": 0, "WARN": 1}
    urgent = sorted(findings.fixes, key=lambda fix: order.get(fix[0].partition(" ")[0], 2))
    findings.fixes = [(what.partition(" ")[2], how) for what, how in urgent]


def _add(findings: Findings, group: str, finding: Finding) -> None:
    findings.rows.append(Row(group, finding.name, finding.verdict, finding.values or {}, finding.text))
    if finding.fix and finding.verdict in ("FAIL", "WARN"):
        findings.fixes.append((f"{finding.verdict} {finding.name}: {finding.text}", finding.fix))


def run_command(*command: str) -> str:
    """The stdout of a system program; '' when it is not installed, fails or does not end in time."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_SECONDS, env={**os.environ, "LC_ALL": "C"}
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""
