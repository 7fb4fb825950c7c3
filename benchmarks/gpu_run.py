"""Runs the parts of gpu.py: each in processes of its own, within its time, whose rows are written as they come. What a
part leaves behind is ended before the next one starts. Knows nothing of what is measured.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from paths import ROOT

CALL = uuid.uuid4().hex  # of this process
MARK = "ULYSSES_GPU_PART"  # in the environment of a part's processes: those of a session of their own keep it, too
END_SECONDS = 15.0  # for ended processes to give the GPU back
TAIL_CHARS = 1500
# No part needs a network: a look-up of the host's name may wait for one.
QUIET = {"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
MISSED, UNFINISHED = 3, 4  # exit codes of a measurement: it missed its bar; its time was over, and it can go on
NO_TESTS = 5  # pytest's, where all had passed before
Row = dict[str, Any]


@dataclass(frozen=True)
class PartFolders:
    """`scratch`: for what is not kept. `seconds`: what the part has. `earlier`: rows of tests that have passed in an
    earlier try."""

    scratch: Path
    results: Path
    rehearses: bool
    seconds: float
    earlier: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Part:
    """`make_commands`: run in order. `read_line`: rows of one line of their output, which are kept at once; `read`:
    rows of the last one's whole output. `judge`: status and reason by the rows of commands that have ended well.
    `goes_on`: a later call continues it, so that it may begin with little time. `lane`: parts of one lane run one after
    another, those of several lanes at once. `environ`: what its processes get beside the usual."""

    name: str
    make_commands: Callable[[PartFolders], list[list[str]]]
    seconds: float
    read_line: Callable[[str], Iterator[Row]] = lambda line: iter(())
    read: Callable[[str], list[Row]] = lambda output: []
    judge: Callable[[list[Row]], tuple[str, str]] = lambda rows: ("done", "")
    goes_on: bool = False
    lane: int = 0
    environ: dict[str, str] = field(default_factory=dict)


@dataclass
class PartRun:
    """A part's run so far. `keep`: called with each new row."""

    part: Part
    keep: Callable[[dict[str, Any]], None]
    rows: list[Row] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    def describe(self, status: str, reason: str = "") -> dict[str, Any]:
        seconds = round(time.monotonic() - self.start, 1)
        return {"status": status, **({"reason": reason} if reason else {}), "seconds": seconds, "rows": self.rows}

    def add(self, rows: list[Row]) -> None:
        if rows:
            self.rows += rows
            self.keep(self.describe("running"))


def run_part(part: Part, folders: PartFolders, log: Path, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Returns the part's status, its rows and why it is not done. `log`: takes all that its processes print."""
    run, output = PartRun(part, keep, [*folders.earlier]), ""
    keep(run.describe("running"))
    for command in part.make_commands(folders):
        left = folders.seconds - (time.monotonic() - run.start)
        output, code, tail = run_command(command, max(1.0, left), log, run)
        if code is None:
            return run.describe("out of time", f"took longer than {folders.seconds:.0f} s: {tail}")
        if code == UNFINISHED:
            return run.describe("out of time", "ended by its own clock; the next call goes on")
        if code not in (0, MISSED, *([NO_TESTS] if folders.earlier else [])):
            run.add(read_rows(part, output)[0])
            return run.describe("failed", f"exit code {code}: {tail}")
    rows, problem = read_rows(part, output)
    run.add(rows)
    if problem:
        return run.describe("failed", problem)
    status, reason = part.judge(run.rows)
    return run.describe(status, reason)


def read_rows(part: Part, output: str) -> tuple[list[Row], str]:
    try:
        return part.read(output), ""
    except (ValueError, KeyError, IndexError) as error:
        return [], f"its output cannot be read: {error}: {output[-TAIL_CHARS:]}"


def run_command(command: list[str], seconds: float, log: Path, run: PartRun) -> tuple[str, int | None, str]:
    """Returns its stdout, its exit code (None: its time was over) and the end of all that it printed, each line with
    its second. No process of it is left."""
    mark, lines, is_late, begun = f"{CALL}-{uuid.uuid4().hex}", [], False, time.monotonic()
    with log.open("a", encoding="utf-8") as copy:
        copy.write(f"\n$ {' '.join(command)}\n")
        copy.flush()
        start = copy.tell()

        def write(line: str) -> None:
            with suppress(ValueError):  # a process that outlives the command, whose log is closed
                copy.write(f"[{time.monotonic() - begun:6.1f}] {line}")
                copy.flush()

        environ = {**make_environ(mark), **run.part.environ}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, text=True, errors="replace", start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        talk = threading.Thread(target=lambda stream: [*map(write, stream)], args=(process.stderr,), daemon=True)
        talk.start()
        try:
            for line in read_lines(process, time.monotonic() + seconds):
                is_late = line is None
                if line is not None:
                    lines.append(line)
                    write(line)
                    run.add(list(run.part.read_line(line.rstrip("\n"))))
        finally:
            end_marked(mark)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            talk.join(1.0)
    with log.open(encoding="utf-8", errors="replace") as whole:
        whole.seek(start)
        tail = whole.read().strip()[-TAIL_CHARS:]
    return "".join(lines), None if is_late else process.returncode, tail


def make_environ(mark: str) -> dict[str, str]:
    """The checkout stands before what the user's own path holds, whose relative places are those of this process: tests
    run in other folders."""
    own = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = [str(ROOT), str(ROOT / "tests"), *own]
    changes = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "COLUMNS": "400", MARK: mark}
    return {**QUIET, **os.environ, **changes}


def read_lines(process: Any, until: float) -> Iterator[str | None]:
    """Lines as they are printed; None when the time is over. Ends with the process, though others hold its pipe."""
    lines: queue.Queue[str] = queue.Queue()

    def put_lines() -> None:
        for line in process.stdout:
            lines.put(line)

    reader = threading.Thread(target=put_lines, daemon=True)
    reader.start()
    while reader.is_alive() or not lines.empty():
        if time.monotonic() > until:
            yield None
            return
        try:
            yield lines.get(timeout=0.2)
        except queue.Empty:
            if process.poll() is not None:
                reader.join(1.0)
                if lines.empty():
                    return


def end_marked(mark: str = CALL) -> None:
    """Ends all processes with this mark, or all of this call, and waits until they are gone: the GPU's memory is free
    then."""
    until = time.monotonic() + END_SECONDS
    while (left := list_marked(mark)) and time.monotonic() < until:
        for process in left:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(left, timeout=1.0)


def list_marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK, "").startswith(mark) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def read_json_line(line: str) -> Iterator[Row]:
    """A row that a measurement prints as a line of its own."""
    if line.startswith('{"name": '):
        with suppress(json.JSONDecodeError):
            yield json.loads(line)
