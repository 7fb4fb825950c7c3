"""What ended a rank, as a small file that the command reads. There is room for it on a disk that is full by then."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

ROOM_BYTES = 1 << 16


def keep_room(logs: Path, rank: int) -> None:
    try:
        (logs / f"rank-{rank}.room").write_bytes(b" " * ROOM_BYTES)
    except OSError:
        return  # the disk is full already, which the run will find out


def give_room(logs: Path, rank: int) -> None:
    (logs / f"rank-{rank}.room").unlink(missing_ok=True)


def write_last_words(logs: Path, rank: int, told: Mapping[str, object]) -> None:
    """What ended this rank, for the command to show. The first one's counts."""
    beside = logs / f"rank-{rank}.error.part"
    text = json.dumps({**told, "time": time.time()})
    logs.mkdir(parents=True, exist_ok=True)  # somebody may have removed the run's folder
    try:
        beside.write_text(text)
    except OSError:
        give_room(logs, rank)
        beside.write_text(text)
    beside.rename(logs / f"rank-{rank}.error.json")
