"""The small files in which a run says what happened: metrics.jsonl and eval.jsonl, one JSON object per line;
told.jsonl, what it sent to whom; why it stopped early; what ended a rank, and which rank failed first. No torch.
Each line is written to disk at once. After a crash, readers take the complete lines, and a resumed run cuts the
rest. Disk space for a rank's failure record is reserved before the run, in case the disk is full by then."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulysses_cli.plan.files import open_own, open_regular, read_regular, write_own, write_whole
from ulysses_cli.plan.schedule import MEASURES
from ulysses_cli.plan.secrets import collect_secrets, mask_text


class LineFile:
    """Writes one JSON object per line, at once. NaN and infinity become null, because JSON has neither. Bytes that a
    full disk refuses wait for the next line: a run that continues without room for its checkpoints continues here too.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.waiting = path, b""
        self._open()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.handle = open_own(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    @property
    def is_gone(self) -> bool:
        """Whether the file was removed."""
        return not os.fstat(self.handle).st_nlink

    def begin_anew(self) -> None:
        os.close(self.handle)
        self._open()

    def write(self, line: dict[str, Any]) -> None:
        self.waiting += json.dumps(_clean(line)).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        try:
            while self.waiting:
                self.waiting = self.waiting[os.write(self.handle, self.waiting) :]
        except OSError:
            return

    def close(self) -> None:
        self._flush()
        os.close(self.handle)


def _clean(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    return value


def cut_lines(path: Path, last_step: int) -> None:
    """On resume: removes steps that will be done again, so that each appears once, and a torn last line."""
    if not path.exists():
        return
    write_whole(path, "".join(f"{line}\n" for _, line in _read_lines(path, last_step)))


def read_lines(path: Path, last_step: int) -> Iterator[dict[str, Any]]:
    """The lines of the steps up to `last_step`."""
    return (json.loads(line) | {"step": step} for step, line in _read_lines(path, last_step))


def has_diverged(path: Path) -> bool:
    """Whether the loss was far above its past when the run ended, as its metrics say."""
    return next(
        (bool(line["diverged"]) for line in reversed([*read_lines(path, sys.maxsize)]) if "diverged" in line), False
    )


def find_last_step(path: Path, last_step: int) -> int:
    """The newest step up to `last_step` that has a line in the file, -1 for none."""
    return max((step for step, _ in _read_lines(path, last_step)), default=-1)


def read_measured(run_dir: Path, last_step: int) -> dict[str, dict[int, float]]:
    """What a run has measured up to `last_step`, by measure and step. The base model's losses, of step 0, are left out:
    the run has not trained it."""
    files = {name: list(read_lines(run_dir / name, last_step)) for name in {each.file for each in MEASURES.values()}}
    return {
        name: {line["step"]: value for line in files[measure.file]
               if line["step"] and (value := measure.read(line)) is not None}
        for name, measure in MEASURES.items()
    }  # fmt: skip


def _read_lines(path: Path, last_step: int) -> Iterator[tuple[int, str]]:
    """(step, line) of each complete line up to `last_step`."""
    if not path.exists():
        return
    with open_regular(path) as stream:
        text = stream.read().decode("utf-8", errors="replace")
    for line in text.splitlines():
        try:
            if (step := int(json.loads(line)["step"])) <= last_step:
                yield step, line
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue


NOTIFICATIONS = "told.jsonl"


def note_notification(run_dir: Path, kind: str, name: str, text: str) -> None:
    """Adds a line. A disk that is full or gone costs the line and nothing else."""
    known = collect_secrets({}, os.environ)
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    line = {"time": now, "kind": kind, "name": mask_text(name, known), "text": mask_text(text, known)}
    try:
        with open(run_dir / NOTIFICATIONS, "a", encoding="utf-8", opener=open_own) as file:
            file.write(json.dumps(line) + "\n")
    except OSError:
        return


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
    def plan_file(self) -> Path:
        """What the command has resolved, for its ranks."""
        return self.folder / f"plan{self.suffix}.json"

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
        for file in (self.plan_file, self.failure_file, self.stop_file, *own):
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
