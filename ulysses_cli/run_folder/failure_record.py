"""A rank's failure record: a small file that says what ended the rank, which the command reads.

Disk space for it is reserved before the run, in case the disk is full by then.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ulysses_cli.plan.files.regular_files import read_regular, write_own
from ulysses_cli.plan.files.whole_files import write_whole

SPARE = "ULYSSES_SPARE_FOLDER"  # of this machine: takes records that the run's disk does not take
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
    text = json.dumps({**failure, "time": time.time(), "boot": _read_boot(), "uptime": time.monotonic()})
    name = f"rank-{rank}.error.json"
    try:
        logs.mkdir(parents=True, exist_ok=True)  # the run's folder may have been removed
        try:
            write_whole(logs / name, text)
        except OSError:
            give_room(logs, rank)
            write_whole(logs / name, text)
    except OSError as error:
        _write_spare(name, text, error)


def write_failures(file: Path, failures: Sequence[Mapping[str, object]]) -> None:
    """Writes what the agent has seen of its ranks' ends."""
    try:
        write_whole(file, json.dumps(failures))
    except OSError as error:
        _write_spare(file.name, json.dumps(failures), error)


def _write_spare(name: str, text: str, error: OSError) -> None:
    """On a disk that is read-only or gone by now, nobody would learn why the run ended."""
    if not (folder := os.environ.get(SPARE)):
        raise error
    write_whole(Path(folder) / name, text)


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
