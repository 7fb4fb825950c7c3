"""A thread of each rank that ends a run which hangs, says which rank hangs, in which step and where, and writes the
rank's Python stacks to its log. Watchdogs exchange their status over the agent's store, on a connection of their
own.  A rank moves on while its step or phase changes, or while ranks read and write files and bytes move. Stacks
show which ranks wait, in a collective or for a GPU that is in one, and which rank they wait for."""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch.distributed as dist

from ulysses_cli.plan.problem import FAILED
from ulysses_cli.run.records import write_failure_record
from ulysses_cli.train.processes.store import connect


class ByteCount:
    """The bytes that this process has moved. Several threads add to it; a lost update only makes the count smaller."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, num_bytes: int) -> None:
        self.total += num_bytes


MOVED = ByteCount()


class SharedCount:
    """The bytes that all ranks have moved, as one of them knows it. `total` changes only when bytes have moved and each
    rank has given a sign since the last change: it stands still when a machine is lost, even if others still write."""

    def __init__(self, world_size: int, prefix: str) -> None:
        self.world_size, self.prefix = world_size, prefix
        self.total = self.num_told = self.num_signs = 0
        self.is_complete = True  # the round of signs that this rank has last taken part in

    def exchange(self, store: dist.Store, num_moved: int) -> None:
        """Raises RuntimeError where the store is gone. It may hang where the store's machine is lost."""
        total = store.add(f"{self.prefix}moved", num_moved - self.num_told)
        self.num_told = num_moved
        self.num_signs += self.is_complete
        num_signs = store.add(f"{self.prefix}signs", int(self.is_complete))
        self.is_complete = num_signs >= self.world_size * self.num_signs
        if self.is_complete:
            self.total = total


ANSWER_SECONDS = 5.0  # watchdogs wake within a second of each other
ANSWER_TIMEOUT = timedelta(seconds=ANSWER_SECONDS)
WRITING = "writing the model"  # on rank 0; the others have nothing to do meanwhile
FILE_PHASES = ("saving", WRITING)
LIBRARY_FACTOR = 10  # what libraries load to check the model is not counted: that many time-outs of rank 0 are for it
STEP_PHASES = ("comparing", "micro-step", "update")  # one time-out covers all of them
PACKAGE = "ulysses_cli/"
COLLECTIVES = ("torch/distributed/", "deepspeed/comm/", "ulysses_cli/train/processes/consistency.py")
DEVICE_WAITS = ("torch/cuda/", "deepspeed/accelerator/")
DEVICE_READ = re.compile(r"\.(item|tolist|cpu|synchronize)\(")
AUTOGRAD = "torch/autograd/graph.py"  # while it waits for the device's thread, which runs the backward


class Watched(Protocol):
    """The part of TrainState that is watched."""

    step: int
    phase: str


@dataclass(frozen=True)
class RankStatus:
    """The step, the phase and the line of code that one rank is in."""

    rank: int
    step: int
    phase: str
    place: str
    is_waiting: bool


class Watchdog:
    def __init__(self, train_state: Watched, seconds: float, rank: int, world_size: int, run_dir: Path) -> None:
        self.train_state = train_state
        self.seconds = seconds
        self.rank = rank
        self.world_size = world_size
        self.logs = run_dir / "logs"
        self.main_thread = threading.get_ident()
        self.stopped = threading.Event()
        self.store = connect(ANSWER_TIMEOUT)
        self.pause = min(1.0, seconds / 10)
        self.num_moved, self.shared = 0, SharedCount(world_size, _name_key_prefix())
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        threading.Thread(target=self._exchange, name="watchdog's exchange", daemon=True).start()

    def stop(self) -> None:
        self.stopped.set()

    def _watch(self) -> None:
        last, since = self._read_progress(), time.monotonic()
        num_bytes, quiet_since = MOVED.total, since
        while not self.stopped.wait(self.pause):
            now, moved, is_library = time.monotonic(), MOVED.total, self._writes_model()
            if moved != num_bytes or not is_library:
                quiet_since = now
            self.num_moved += abs(moved - num_bytes)
            self.num_moved += is_library and now - quiet_since < LIBRARY_FACTOR * self.seconds
            num_bytes = moved
            progress = self._read_progress()
            if progress != last:
                last, since = progress, now
            if now - since > self.seconds:
                self._end()

    def _writes_model(self) -> bool:
        return self.rank == 0 and self.train_state.phase.startswith(WRITING)

    def _exchange(self) -> None:
        """Shares what was moved while files are read and written, and answers a rank whose time-out ends earlier than
        this one's. On a connection of its own: asking may hang."""
        store = None
        while not self.stopped.wait(self.pause):
            try:
                store = store or connect(ANSWER_TIMEOUT)
                if store is None:
                    continue
                if self.train_state.phase.startswith(FILE_PHASES):
                    self.shared.exchange(store, self.num_moved)
                if store.check([f"{_name_key_prefix()}asked"]):
                    store.set(f"{_name_key_prefix()}{self.rank}", json.dumps(asdict(self._read_status())))
                    return
            except RuntimeError:
                store = None

    def _read_progress(self) -> tuple[int, str, int]:
        phase = self.train_state.phase
        name = "step" if phase.startswith(STEP_PHASES) else phase
        if not phase.startswith(FILE_PHASES):
            return self.train_state.step, name, 0
        return self.train_state.step, name, self.shared.total if self.world_size > 1 else self.num_moved

    def _end(self) -> None:
        """Ends the process even if the report fails or hangs."""
        try:
            faulthandler.dump_traceback(sys.stderr)
            own = self._read_status()
            write_failure_record(self.logs, self.rank, explain_hang([own], own, 1, self.seconds))
            # asking may hang as well: this C thread ends the process even while Python waits
            faulthandler.dump_traceback_later(3 * ANSWER_SECONDS, exit=True)
            failure = explain_hang(ask_others(self.store, own, self.world_size), own, self.world_size, self.seconds)
            write_failure_record(self.logs, self.rank, failure)
        finally:
            os._exit(FAILED)

    def _read_status(self) -> RankStatus:
        frames = sys._current_frames()
        python_threads = {thread.ident for thread in threading.enumerate() if _is_python_thread(thread)}
        others = [frame for ident, frame in frames.items() if ident not in python_threads]
        place, is_waiting = find_place(frames.get(self.main_thread), others)
        return RankStatus(
            self.rank, self.train_state.step + 1, self.train_state.phase or "between steps", place, is_waiting
        )


def _name_key_prefix() -> str:
    return f"ulysses/hang/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/"


def ask_others(store: dist.Store | None, own: RankStatus, world_size: int) -> list[RankStatus]:
    """The status of every rank that answers."""
    statuses = [own]
    if store is None:
        return statuses
    prefix = _name_key_prefix()
    end = time.monotonic() + ANSWER_SECONDS
    try:
        store.set(f"{prefix}{own.rank}", json.dumps(asdict(own)))
        store.set(f"{prefix}asked", "")
        waiting = set(range(world_size)) - {own.rank}
        while waiting and time.monotonic() < end:
            for rank in [rank for rank in waiting if store.check([f"{prefix}{rank}"])]:
                statuses.append(RankStatus(**json.loads(store.get(f"{prefix}{rank}"))))
                waiting.discard(rank)
            time.sleep(0.1)
    except RuntimeError:
        pass  # the store is gone: what is known is reported
    return statuses


def find_place(main: FrameType | None, others: Sequence[FrameType] = ()) -> tuple[str, bool]:
    """Returns the innermost line in this package, and whether the stack ends in a wait for other ranks. While autograd
    runs, the stack that counts is that of the thread which runs the hooks; without one, autograd waits for the device's
    queue."""
    if main is None:
        return "", False
    stack = list(walk_frames(main))
    if _name_file(stack[0]).endswith(AUTOGRAD):
        stacks = map(list, map(walk_frames, others))
        in_hooks = [hook_stack for hook_stack in stacks if any(map(_is_of_a_step, hook_stack))]
        if not in_hooks:
            return _name_place(stack), True
        return _name_place(in_hooks[0]) or _name_place(stack), _waits(in_hooks[0])
    return _name_place(stack), _waits(stack)


def walk_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields frames from the innermost outwards."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _waits(stack: Sequence[FrameType]) -> bool:
    """Whether the frames down to this package's innermost line wait. Reading a number from the device waits too, for
    all that the device has queued."""
    if DEVICE_READ.search(linecache.getline(stack[0].f_code.co_filename, stack[0].f_lineno)):
        return True
    for frame in stack:
        if any(part in _name_file(frame) for part in (*COLLECTIVES, *DEVICE_WAITS)):
            return True
        if PACKAGE in _name_file(frame):
            return False
    return False


def _name_place(stack: Sequence[FrameType]) -> str:
    own_frame = next((frame for frame in stack if PACKAGE in _name_file(frame)), None)
    if own_frame is None:
        return ""
    file = _name_file(own_frame)
    return f"{file[file.rindex(PACKAGE) :]}:{own_frame.f_lineno}"


def _name_file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _is_python_thread(thread: threading.Thread) -> bool:
    """Python started it. Autograd's device threads are started by C++."""
    return not isinstance(thread, threading._DummyThread)


def _is_of_a_step(frame: FrameType) -> bool:
    return any(part in _name_file(frame) for part in (f"{PACKAGE}train/", "deepspeed/runtime/"))


def explain_hang(statuses: Sequence[RankStatus], own: RankStatus, world_size: int, seconds: float) -> dict[str, object]:
    """The failure record of a hang. Every rank that answers computes the same message."""
    silent = sorted(set(range(world_size)) - {status.rank for status in statuses})
    busy = sorted(
        (status for status in statuses if not status.is_waiting), key=lambda status: (status.step, status.rank)
    )
    late = f"takes longer than run.step_timeout ({seconds:g} s)"
    failure: dict[str, object] = {"rank": own.rank, "phase": f"step {own.step}, {own.phase}", "is_cause": True}
    if silent:
        ranks = "0" if silent[0] == 0 else ", ".join(map(str, silent))  # without rank 0's store no rank answers
        message = f"step {own.step} {late}: rank {ranks} does not answer, the others wait for it in {own.phase}"
        failure["rank"] = silent[0]
    elif busy:
        hung = busy[0]
        message = f"step {hung.step} {late}: rank {hung.rank} hangs in {hung.phase} at {hung.place}"
        failure |= {"rank": hung.rank, "phase": f"step {hung.step}, {hung.phase}"}
    elif (odd := find_odd_rank(statuses)) is not None:
        message = f"step {odd.step} {late}: rank {odd.rank} waits alone in {odd.phase} at {odd.place}"
        failure |= {"rank": odd.rank, "phase": f"step {odd.step}, {odd.phase}"}
    else:
        message = f"step {own.step} {late}: all ranks wait for each other in {own.phase}; look at the network"
    hint = (
        "every rank's stack is in its log; continue with --resume auto; set a longer run.step_timeout if steps are "
        "that slow"
    )
    return {**failure, "message": message, "hint": hint, "exit_code_wanted": FAILED}


def find_odd_rank(statuses: Sequence[RankStatus]) -> RankStatus | None:
    """When all ranks wait: the one rank that waits at another place than all the others, which are at one place."""
    places: dict[tuple[int, str, str], list[RankStatus]] = {}
    for status in statuses:
        places.setdefault((status.step, status.phase, status.place), []).append(status)
    alone = [members[0] for members in places.values() if len(members) == 1]
    return alone[0] if len(statuses) > 2 and len(places) == 2 and alone else None
