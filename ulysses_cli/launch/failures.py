"""Why a run failed: what its ranks and its launcher wrote."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from ulysses_cli.run_folder.failure_record import choose_first, read_json


def find_first_failure(logs: Path) -> dict[str, Any]:
    """What the first failing rank wrote; or, when it was killed and wrote nothing, what the launcher saw of it. A rank
    that lost its peer writes before the launcher sees the peer's death, which is the cause."""
    told = [found for file in logs.glob("rank-*.error.json") if (found := read_json(file))]
    interrupted = [
        found for found in told if found.get("is_interruption")
    ]  # most often by the launcher, after a failure
    told = [found for found in told if not found.get("is_interruption")]
    seen = read_json(logs / "failure.json") or [{}]
    killed = [found for found in seen if found.get("exit_code") == -signal.SIGKILL]
    causes = [found for found in (*told, *seen) if found.get("is_cause")]
    if killed and not causes:
        return dict(killed[0])
    if told or interrupted:
        return choose_first(causes or told or interrupted)
    return dict(min(seen, key=lambda found: found.get("time", 0)))
