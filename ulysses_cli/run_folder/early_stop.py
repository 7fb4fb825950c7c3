"""Why a run stopped with a checkpoint before its last step: one rank of each machine tells its command.

The ranks exit with 0 then, since torch's agent would take any other code for a failure and end the others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ulysses_cli.plan.files.regular_files import write_own

STOP_FILE = "ULYSSES_STOP_FILE"
ASKED_FILE = "ULYSSES_ASKED_FILE"  # who asked for the signal, where a Python program did


def write_early_stop(reason: str, environ: Mapping[str, str] = os.environ) -> None:
    if environ.get("LOCAL_RANK") == "0" and STOP_FILE in environ:
        write_own(environ[STOP_FILE], reason)


def name_asker(reason: str, environ: Mapping[str, str] = os.environ) -> str:
    """`reason`, or the function of a Python program whose wish reached the ranks as a signal."""
    return (ASKED_FILE in environ and read_early_stop(Path(environ[ASKED_FILE]))) or reason


def read_early_stop(file: Path) -> str:
    """Returns the reason, or '' for a run that did all of its steps."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
