"""Finds the first failure of a run, from the records that its ranks and its agent wrote."""

from __future__ import annotations

import os
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulysses_cli.plan.files.regular_files import open_regular
from ulysses_cli.run_folder.failure_record import choose_first, read_json

STAGGER_SECONDS = 60.0  # one machine may fail before another one starts
TAIL_BYTES, MAX_LINE_LETTERS = 1 << 14, 400


@dataclass(frozen=True)
class MachineLogs:
    """The files of one machine among a run's logs: machines that share a disk do not delete each other's."""

    folder: Path
    node_rank: int = 0
    num_nodes: int = 1
    processes_here: int = 1
    spare: Path | None = None  # records that the run's disk did not take

    @property
    def suffix(self) -> str:
        return f"-{self.node_rank}" if self.num_nodes > 1 else ""

    @property
    def agent_log(self) -> Path:
        return self.folder / f"agent{self.suffix}.log"

    @property
    def failure_file(self) -> Path:
        return self.folder / f"failure{self.suffix}.json"

    @property
    def stop_file(self) -> Path:
        return self.folder / f"stopped{self.suffix}.txt"

    def clear(self) -> float:
        """Deletes what an earlier run of this machine left. Returns the time by the clock of the disk."""
        first = self.node_rank * self.processes_here
        ranks = range(first, first + self.processes_here)
        own = [file for rank in ranks for file in self.folder.glob(f"rank-{rank}.error*.json")]
        for file in (self.failure_file, self.stop_file, *own):
            file.unlink(missing_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".clock-") as clock:
            return os.fstat(clock.fileno()).st_mtime

    def list_rank_failures(self, began: float) -> list[dict[str, Any]]:
        """Returns the records of all ranks whose machines write here. Those from before `began` are an earlier run's,
        of a machine that has not started again."""
        files = [
            file for file in self.folder.glob("rank-*.error.json") if file.stat().st_mtime >= began - STAGGER_SECONDS
        ]
        files += self.spare.glob("rank-*.error.json") if self.spare is not None else ()
        return [record for file in files if isinstance(record := read_json(file), dict)]

    def read_failures(self) -> list[dict[str, Any]]:
        """What the agent has seen of its ranks' ends."""
        kept = read_json(self.spare / self.failure_file.name) if self.spare is not None else None
        return read_json(self.failure_file) or kept or []

    def read_last_line(self, rank: int | None, began: float) -> str:
        """Returns what a rank's log ends with: a rank that fails while it imports its code leaves no record. '' where
        the log is on another machine or of an earlier run."""
        file = self.folder / f"rank-{rank}.log"
        try:
            with open_regular(file) as log:
                facts = os.fstat(log.fileno())
                log.seek(max(0, facts.st_size - TAIL_BYTES))
                lines = log.read().decode(errors="replace").split("\n") if facts.st_mtime >= began else []
        except OSError:
            return ""
        return next((line.strip()[:MAX_LINE_LETTERS] for line in reversed(lines) if line.strip()), "")


def find_first_failure(logs: MachineLogs, agent_code: int, began: float = 0.0) -> dict[str, Any]:
    """The record of the first rank that failed; or, when that rank was killed and wrote none, the agent's record of
    it. Where nobody wrote one: how the agent itself ended, minus the number of the signal that killed it.

    A rank that lost its peer writes its record before the agent sees the peer's death, which is the cause."""
    written = logs.list_rank_failures(began)
    failures = [record for record in written if not record.get("is_interruption")]
    interruptions = [record for record in written if record.get("is_interruption")]  # mostly sent after a failure
    seen = logs.read_failures()
    killed = [record for record in seen if record.get("exit_code") == -signal.SIGKILL]
    causes = [record for record in (*failures, *seen) if record.get("is_cause")]
    if killed and not causes:
        return {**killed[0], "log": logs.agent_log.name}
    if agent_code < 0 and not causes:
        return {"process": "the agent of the ranks", "exit_code": agent_code, "log": logs.agent_log.name}
    told = {record.get("rank") for record in written}
    silent = [record for record in seen if record.get("rank") not in told and 0 < (record.get("exit_code") or 0) < 128]
    if failures or (interruptions and not silent):  # the others of a rank that ends before it can write are interrupted
        return choose_first(causes or failures or interruptions)
    first = dict(min(silent or seen, key=lambda record: record.get("time", 0), default={"exit_code": agent_code}))
    if (first.get("exit_code") or 0) > 0 and (line := logs.read_last_line(first.get("rank"), began)):
        return first | {"message": line}
    return first | {"log": logs.agent_log.name}
