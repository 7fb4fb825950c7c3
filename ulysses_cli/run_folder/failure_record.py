"""A rank's failure record: a small file that says what ended the rank, which the command reads.

Disk space for it is reserved before the run, in case the disk is full by then.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ulysses_cli.plan.files.regular_files import read_regular, write_own

ROOM_BYTES = 1 << 16
MAX_JSON_BYTES = 16 << 20


def keep_room(logs: Path, rank: int) -> None:
    try:
        write_own(logs / f"rank-{rank}.room", " " * ROOM_BYTES)
    except OSError:
        return  # the disk is full already, and the run will fail with that


def give_room(logs: Path, rank: int) -> None:
    (logs / f"rank-{rank}.room").unlink(missing_ok=True)


def write_failure_record(logs: Path, rank: int, failure: Mapping[str, object]) -> None:
    """Writes what ended this rank. The command shows the first record of all ranks."""
    temporary = logs / f"rank-{rank}.error.part"
    text = json.dumps({**failure, "time": time.time(), "boot": _read_boot(), "uptime": time.monotonic()})
    logs.mkdir(parents=True, exist_ok=True)  # the run's folder may have been removed
    try:
        write_own(temporary, text)
    except OSError:
        give_room(logs, rank)
        temporary.unlink(missing_ok=True)
        write_own(temporary, text)
    temporary.rename(logs / f"rank-{rank}.error.json")


def choose_first(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The record that was written first: by the monotonic clock if one machine wrote all, else by the time of day. {}
    for none."""
    boots = {record.get("boot") for record in records if record.get("boot")}
    key = "uptime" if len(boots) == 1 and all("uptime" in record for record in records) else "time"
    first = min(records, key=lambda record: float(record.get(key, 0)), default=None)
    return dict(first) if first else {}


def _read_boot() -> str:
    """Identifies a machine's boot. Uptimes are comparable only within one boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def read_json(file: Path) -> Any:
    try:
        return json.loads(read_regular(file, MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
