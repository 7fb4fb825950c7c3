"""Finds the first failure of a run, from the records that its ranks and its agent wrote."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from ulysses_cli.run_folder.failure_record import choose_first, read_json


def find_first_failure(logs: Path, agent_code: int) -> dict[str, Any]:
    """The record of the first rank that failed; or, when that rank was killed and wrote none, the agent's record of
    it. Where nobody wrote one: how the agent itself ended, minus the number of the signal that killed it.

    A rank that lost its peer writes its record before the agent sees the peer's death, which is the cause."""
    written = [record for file in logs.glob("rank-*.error.json") if (record := read_json(file))]
    failures = [record for record in written if not record.get("is_interruption")]
    interruptions = [record for record in written if record.get("is_interruption")]  # mostly sent after a failure
    seen = read_json(logs / "failure.json") or []
    killed = [record for record in seen if record.get("exit_code") == -signal.SIGKILL]
    causes = [record for record in (*failures, *seen) if record.get("is_cause")]
    if killed and not causes:
        return dict(killed[0])
    if agent_code < 0 and not causes:
        return {"process": "the agent of the ranks", "exit_code": agent_code}
    if failures or interruptions:
        return choose_first(causes or failures or interruptions)
    return dict(min(seen, key=lambda record: record.get("time", 0), default={"exit_code": agent_code}))
