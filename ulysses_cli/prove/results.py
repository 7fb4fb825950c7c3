"""The one format of what proofs find: rows of plain values, notes, what to fix. report/proofs.py shows it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from ulysses_cli.train.run_file import list_versions

Verdict = Literal["PASS", "FAIL", "WARN", "SKIP", "OOM", ""]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One finding. `group` says what it is part of; `values` are numbers with their unit in the name."""

    group: str
    name: str
    verdict: Verdict = ""
    values: dict[str, Any] = field(default_factory=dict)
    text: str = ""


@dataclass
class Findings:
    """What a command found. `fixes`: (what is wrong, what to do), the most urgent first."""

    command: str
    subject: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fixes: list[tuple[str, str]] = field(default_factory=list)
    started: float = field(default_factory=time.time)

    @property
    def passed(self) -> bool:
        return not any(row.verdict == "FAIL" for row in self.rows)

    def describe(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "subject": self.subject,
            "passed": self.passed,
            "seconds": round(time.time() - self.started, 2),
            "machine": describe_machine(),
            "rows": [asdict(row) for row in self.rows],
            "notes": self.notes,
            "fixes": [{"what": what, "how": how} for what, how in self.fixes],
        }


def describe_machine() -> dict[str, Any]:
    """Facts that a number depends on."""
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "num_cores": len(os.sched_getaffinity(0)),
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())],
        "versions": list_versions(),
    }
