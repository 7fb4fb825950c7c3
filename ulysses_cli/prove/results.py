"""The format of all findings: rows of plain values, notes, and what to fix. report/proofs.py prints it. Runs a list
of checks of a machine; a check that raises becomes a finding, and the other checks still run. Nothing is checked
here."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any, Literal

from ulysses_cli.plan.hardware import Hardware
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.train.processes.host import count_host_bytes

Verdict = Literal["PASS", "FAIL", "WARN", "SKIP", "OOM", ""]
Report = Callable[[str], None]  # takes a line of progress
PACKAGES = ("ulysses-cli", "torch", "transformers", "deepspeed", "accelerate", "peft", "datasets")


@dataclass(frozen=True)
class Row:
    """One finding. `group` names the check or layout that it belongs to; `values` are numbers with their unit in the
    name, or several such by what they are of."""

    group: str
    name: str
    verdict: Verdict = ""
    values: dict[str, Any] = field(default_factory=dict)
    text: str = ""


@dataclass
class Findings:
    """All results of a command. `fixes`: (what is wrong, what to do), the most urgent first."""

    command: str
    subject: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fixes: list[tuple[str, str]] = field(default_factory=list)
    calibration: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def passed(self) -> bool:
        return not any(row.verdict == "FAIL" for row in self.rows)

    def describe(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "subject": self.subject,
            "passed": self.passed,
            "seconds": round(time.monotonic() - self.started, 2),
            "machine": describe_machine(),
            "rows": [asdict(row) for row in self.rows],
            "notes": self.notes,
            "calibration": self.calibration,
            "fixes": [{"what": what, "how": how} for what, how in self.fixes],
        }


def describe_machine() -> dict[str, Any]:
    """The facts of this machine and its software that measured numbers depend on."""
    try:
        import torch

        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    except Exception:  # noqa: BLE001 - doctor reports what is wrong with torch
        gpus = []
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "num_cores": len(os.sched_getaffinity(0)),
        "host_memory_bytes": count_host_bytes(),
        "gpus": gpus,
        "versions": {name: version for name in PACKAGES if (version := find_version(name))},
    }


def find_version(package: str) -> str:
    """The installed version; '' where the package is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


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
