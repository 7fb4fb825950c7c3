"""A thread of each rank that ends a run which no longer moves, and says which rank hangs, in which step and where.

Ranks that wait, in a collective or for a GPU that is in one, are told apart from the one that they wait for by their
stacks. They compare over the launcher's store, on a connection of their own: the main thread's may be in use.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import math
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

from ulysses_cli.plan.exit_codes import FAILED
from ulysses_cli.run_folder.failure_record import write_failure_record
from ulysses_cli.train.processes.rank_store import connect

ANSWER_SECONDS = 5.0  # watchdogs wake within a second of each other
ANSWER_TIMEOUT = timedelta(seconds=ANSWER_SECONDS)
SAVING_PATIENCE = 10  # disks are slower than steps, and vary
WRITING = "writing the model"  # on rank 0; the others have nothing to do meanwhile
STEP_PHASES = ("comparing", "micro-step", "update")  # one clock for all of them
PACKAGE = "ulysses_cli/"
COLLECTIVES = ("torch/distributed/", "deepspeed/comm/", "ulysses_cli/train/processes/consistency.py")
DEVICE_WAITS = ("torch/cuda/", "deepspeed/accelerator/")
DEVICE_READ = re.compile(r"\.(item|tolist|cpu|synchronize)\(")
AUTOGRAD = "torch/autograd/graph.py"  # while it waits for the device's thread, which runs the backward


class Moving(Protocol):
    """What is watched: a train_state."""

    step: int
    phase: str


@dataclass(frozen=True)
class Sighting:
    """Where one rank stands."""

    rank: int
    step: int
    phase: str
    place: str
    is_waiting: bool


class Watchdog:
    def __init__(self, train_state: Moving, seconds: float, rank: int, world_size: int, run_dir: Path) -> None:
        self.train_state, self.seconds, self.rank, self.world_size = train_state, seconds, rank, world_size
        self.logs = run_dir / "logs"
        self.main_thread = threading.get_ident()
        self.stopped = threading.Event()
        self.store = connect(ANSWER_TIMEOUT)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        threading.Thread(target=self._answer, name="watchdog's answer", daemon=True).start()

    def stop(self) -> None:
        self.stopped.set()

    def _watch(self) -> None:
        last, since = self._read_beat(), time.monotonic()
        while not self.stopped.wait(min(1.0, self.seconds / 10)):
            beat = self._read_beat()
            if beat != last:
                last, since = beat, time.monotonic()
            if time.monotonic() - since > self.seconds * find_patience(beat[1], self.rank):
                self._end()

    def _answer(self) -> None:
        """To a rank whose clock runs out earlier than this one's. On a connection of its own: asking may hang."""
        store = connect(ANSWER_TIMEOUT)
        while store is not None and not self.stopped.wait(1.0):
            try:
                if store.check([f"{_name_place_of_hangs()}asked"]):
                    store.set(f"{_name_place_of_hangs()}{self.rank}", json.dumps(asdict(self._look())))
                    return
            except RuntimeError:
                return

    def _read_beat(self) -> tuple[int, str]:
        phase = self.train_state.phase
        return self.train_state.step, "step" if phase.startswith(STEP_PHASES) else phase

    def _end(self) -> None:
        """Whatever goes wrong here, the process ends."""
        try:
            faulthandler.dump_traceback(sys.stderr)
            own = self._look()
            write_failure_record(self.logs, self.rank, explain_hang([own], own, 1, self.seconds))
            # asking may hang as well: this thread of C ends the process, whatever Python waits for
            faulthandler.dump_traceback_later(3 * ANSWER_SECONDS, exit=True)
            told = explain_hang(ask_others(self.store, own, self.world_size), own, self.world_size, self.seconds)
            write_failure_record(self.logs, self.rank, told)
        finally:
            os._exit(FAILED)

    def _look(self) -> Sighting:
        frames, ours = sys._current_frames(), {thread.ident for thread in threading.enumerate() if _is_ours(thread)}
        others = [frame for ident, frame in frames.items() if ident not in ours]
        place, is_waiting = find_place(frames.get(self.main_thread), others)
        return Sighting(
            self.rank, self.train_state.step + 1, self.train_state.phase or "between steps", place, is_waiting
        )


def _name_place_of_hangs() -> str:
    return f"ulysses/hang/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/"


def ask_others(store: dist.Store | None, own: Sighting, world_size: int) -> list[Sighting]:
    """What every rank says that can still speak."""
    found = [own]
    if store is None:
        return found
    prefix = _name_place_of_hangs()
    end = time.monotonic() + ANSWER_SECONDS
    try:
        store.set(f"{prefix}{own.rank}", json.dumps(asdict(own)))
        store.set(f"{prefix}asked", "")
        waiting = set(range(world_size)) - {own.rank}
        while waiting and time.monotonic() < end:
            for rank in [rank for rank in waiting if store.check([f"{prefix}{rank}"])]:
                found.append(Sighting(**json.loads(store.get(f"{prefix}{rank}"))))
                waiting.discard(rank)
            time.sleep(0.1)
    except RuntimeError:
        pass  # the store is gone: what is known is told
    return found


def find_patience(phase: str, rank: int) -> float:
    """How many times the time-out a phase may take."""
    if phase.startswith(WRITING):
        return SAVING_PATIENCE if rank == 0 else math.inf
    return SAVING_PATIENCE if phase.startswith("saving") else 1


def find_place(main: FrameType | None, others: Sequence[FrameType] = ()) -> tuple[str, bool]:
    """(innermost place in this package, whether the stack ends in a wait for others). While autograd runs, the stack
    that counts is that of the thread which runs the hooks; without one, the device's queue is waited for."""
    if main is None:
        return "", False
    stack = list(walk_frames(main))
    if _name_file(stack[0]).endswith(AUTOGRAD):
        in_hooks = [found for found in map(list, map(walk_frames, others)) if any(map(_is_of_a_step, found))]
        if not in_hooks:
            return _name_place(stack), True
        return _name_place(in_hooks[0]) or _name_place(stack), _waits(in_hooks[0])
    return _name_place(stack), _waits(stack)


def walk_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """From the innermost outwards."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _waits(stack: Sequence[FrameType]) -> bool:
    """Down to this package's innermost line, or at it: a read of a number waits for all that the device has queued."""
    if DEVICE_READ.search(linecache.getline(stack[0].f_code.co_filename, stack[0].f_lineno)):
        return True
    for frame in stack:
        if any(part in _name_file(frame) for part in (*COLLECTIVES, *DEVICE_WAITS)):
            return True
        if PACKAGE in _name_file(frame):
            return False
    return False


def _name_place(stack: Sequence[FrameType]) -> str:
    found = next((frame for frame in stack if PACKAGE in _name_file(frame)), None)
    if found is None:
        return ""
    file = _name_file(found)
    return f"{file[file.rindex(PACKAGE) :]}:{found.f_lineno}"


def _name_file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _is_ours(thread: threading.Thread) -> bool:
    """Started by Python, as the device's threads of autograd are not."""
    return not isinstance(thread, threading._DummyThread)


def _is_of_a_step(frame: FrameType) -> bool:
    return any(part in _name_file(frame) for part in (f"{PACKAGE}train/", "deepspeed/runtime/"))


def explain_hang(seen: Sequence[Sighting], own: Sighting, world_size: int, seconds: float) -> dict[str, object]:
    """Every rank that answers comes to the same words."""
    silent = sorted(set(range(world_size)) - {one.rank for one in seen})
    busy = sorted((one for one in seen if not one.is_waiting), key=lambda one: (one.step, one.rank))
    late = f"takes longer than run.step_timeout ({seconds:g} s)"
    told: dict[str, object] = {"rank": own.rank, "phase": f"step {own.step}, {own.phase}", "is_cause": True}
    if silent:
        who = "0" if silent[0] == 0 else ", ".join(map(str, silent))  # which holds the store
        message = f"step {own.step} {late}: rank {who} does not answer, the others wait for it in {own.phase}"
        told["rank"] = silent[0]
    elif busy:
        one = busy[0]
        message = f"step {one.step} {late}: rank {one.rank} hangs in {one.phase} at {one.place}"
        told |= {"rank": one.rank, "phase": f"step {one.step}, {one.phase}"}
    elif (odd := find_odd_one(seen)) is not None:
        message = f"step {odd.step} {late}: rank {odd.rank} waits alone in {odd.phase} at {odd.place}"
        told |= {"rank": odd.rank, "phase": f"step {odd.step}, {odd.phase}"}
    else:
        message = f"step {own.step} {late}: all ranks wait for each other in {own.phase}; look at the network"
    hint = "every rank's stack is in its log; --resume auto goes on; a longer run.step_timeout if steps are that slow"
    return {**told, "message": message, "hint": hint, "exit_code_wanted": FAILED}


def find_odd_one(seen: Sequence[Sighting]) -> Sighting | None:
    """When all wait: the one rank that waits elsewhere than all the others, who agree."""
    places: dict[tuple[int, str, str], list[Sighting]] = {}
    for one in seen:
        places.setdefault((one.step, one.phase, one.place), []).append(one)
    alone = [found[0] for found in places.values() if len(found) == 1]
    return alone[0] if len(seen) > 2 and len(places) == 2 and alone else None
