"""The format of all findings: rows of plain values, notes, and what to fix. report/proofs.py prints it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any, Literal

from ulysses_cli.train.processes.host_memory import count_host_bytes

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
