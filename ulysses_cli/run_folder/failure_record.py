"""What ended a rank, as a small file that the command reads. There is room for it on a disk that is full by then."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOM_BYTES = 1 << 16


def keep_room(logs: Path, rank: int) -> None:
    try:
        (logs / f"rank-{rank}.room").write_bytes(b" " * ROOM_BYTES)
    except OSError:
        return  # the disk is full already, which the run will find out


def give_room(logs: Path, rank: int) -> None:
    (logs / f"rank-{rank}.room").unlink(missing_ok=True)


def write_failure_record(logs: Path, rank: int, told: Mapping[str, object]) -> None:
    """What ended this rank, for the command to show. The first one's counts."""
    beside = logs / f"rank-{rank}.error.part"
    text = json.dumps({**told, "time": time.time(), "boot": _read_boot(), "uptime": time.monotonic()})
    logs.mkdir(parents=True, exist_ok=True)  # somebody may have removed the run's folder
    try:
        beside.write_text(text)
    except OSError:
        give_room(logs, rank)
        beside.write_text(text)
    beside.rename(logs / f"rank-{rank}.error.json")


def choose_first(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What was written first: by a clock that nobody sets where one machine wrote all, else by the time of day. {} for
    none."""
    is_one = len({one.get("boot") for one in told if one.get("boot")}) == 1 and all("uptime" in one for one in told)
    key = "uptime" if is_one else "time"
    first = min(told, key=lambda one: float(one.get(key, 0)), default=None)
    return dict(first) if first else {}


def _read_boot() -> str:
    """Names a machine from one start to the next, which is as long as its uptime means anything."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
