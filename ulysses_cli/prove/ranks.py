"""Runs a function on ranks of this machine and returns rank 0's result, or raises the first rank's failure. Two
worlds of ranks can be timed fairly: they take steps in turns, so that another load slows both alike.

On the CPU ranks are forked from one server that has torch and DeepSpeed loaded. A GPU's context cannot be forked, so
each rank on a GPU is a new process. No rank outlives the process that started it, however that process ends."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.popen_forkserver import Popen
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from ulysses_cli.plan.files import write_whole
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.run.key import KEY, find_seal

PRELOADED = ["ulysses_cli.prove.recorded_run", "deepspeed", "peft"]
ON_CPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}  # DeepSpeed decides when it is imported
ABANDONED = 143


class _RankPopen(Popen):
    """Reads how its process has ended once, whichever thread asks: a process that starts another one asks for all that
    it has, and a second reading would say that a rank was killed."""

    def __init__(self, process: BaseProcess) -> None:
        self.lock = threading.Lock()
        super().__init__(process)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if not self.lock.acquire(blocking=not flag):
            return self.returncode
        try:
            return super().poll(flag)
        finally:
            self.lock.release()


class _ForkedRank(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Popen:
        return _RankPopen(process_obj)


def warm_up() -> None:
    """Starts the server. Its imports then run while the caller does other things."""
    forkserver.set_forkserver_preload(PRELOADED)
    with _environment(ON_CPU):
        forkserver.ensure_running()


def start_process(target: Callable[..., None], args: tuple[Any, ...], device: str = "cpu") -> BaseProcess:
    """Runs `target(*args)` in a process of its own."""
    if device == "cpu":
        warm_up()
    kind: Any = _ForkedRank if device == "cpu" else multiprocessing.get_context("spawn").Process
    process: BaseProcess = kind(target=_run, args=(target, args, find_seal().key), daemon=True)
    process.start()
    return process


def _run(target: Callable[..., None], args: tuple[Any, ...], key: str) -> None:
    """All ranks of one parent share its run key."""
    os.environ[KEY] = key
    threading.Thread(target=_end_with_parent, daemon=True).start()
    target(*args)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(ABANDONED)  # what this rank may be waiting for will not come


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables while the server starts: it inherits the environment of this process at that moment."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass(eq=False)
class Interleaving:
    """One side's turns. Rank 0 has the pipe to the other side; a side without a pipe never waits."""

    pipe: Connection | None = None
    has_turn: bool = False

    def wait_for_turn(self, group: Any = None) -> None:
        """Collective over the group: all ranks start when the other side has ended its step."""
        if self.pipe is not None and not self.has_turn:
            try:
                self.pipe.recv_bytes()
            except (EOFError, OSError):
                self.pipe = None  # the other side has ended or failed
        importlib.import_module("torch.distributed").barrier(
            group=group
        )  # doctor imports this module where torch may be broken

    def pass_turn(self) -> None:
        """The other side takes its next step."""
        self.has_turn = False
        if self.pipe is not None:
            try:
                self.pipe.send_bytes(b"turn")
            except OSError:
                self.pipe = None


@dataclass(frozen=True)
class Pairs:
    """Seconds of their step / seconds of our step next to it, over all pairs of steps: median and spread."""

    num_pairs: int
    median: float
    low: float  # lower quartile
    high: float  # upper quartile


def compare_pairs(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Pairs | None:
    """Takes seconds per unit of work by step number; a pair is a step that both sides took. None without pairs."""
    ratios = sorted(theirs[step] / ours[step] for step in ours.keys() & theirs.keys())
    if not ratios:
        return None
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Pairs(len(ratios), median, low, high)


CHECK_SECONDS = 1.0
CONNECT_SECONDS = 600.0  # for the ranks of other machines to come
CAUSE_WAIT_SECONDS = 2.0  # after one rank has failed, the rank that caused the failure may still be ending
MAX_CPU_RANKS = 8  # of a proof
OUT_OF_MEMORY_EXIT = -9  # killed: on Linux, nearly always for want of memory


@dataclass(eq=False)  # and not frozen: whatever it passes through notes the traceback in it
class RankFailureError(Exception):
    """The first rank that failed. `kind` is the exception's name, or `killed`, `time`. `problems`: those of an input
    that the rank refused."""

    rank: int
    kind: str
    message: str
    trace: str
    problems: tuple[Problem, ...] = ()

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.kind}: {self.message}"


class Neighbours(Protocol):
    """The machines of a world of ranks, of which this is one."""

    @property
    def place(self) -> Any: ...

    def check(self) -> None:
        """Raises where another machine is gone."""


def run_on_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    device: str = "cpu",
    time_limit: float = 600.0,
    machines: Neighbours | None = None,
    name: str = "",
) -> Any:
    """Runs `function(device, *args)` on every rank of a new world and returns rank 0's result. No rank outlives this
    call. With `machines` each starts its share of the ranks, and returns None where rank 0 is on another one; `name`
    parts this world from others of the same machines."""
    world = World(num_ranks, device, time_limit, machines, name)
    try:
        world.start(function, args)
        return world.wait()
    finally:
        world.end()


def run_interleaved(
    num_ranks: int, sides: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], *, device: str, time_limit: float
) -> list[Any]:
    """Runs `function(device, interleaving, *args)` of one or two sides at once, each on a world of its own. Returns for
    each side rank 0's result or its RankFailureError. When one side fails, the other continues alone."""
    worlds = [World(num_ranks, device, time_limit) for _ in sides]
    pipes = multiprocessing.Pipe() if len(sides) > 1 else (None, None)
    try:
        for number, (world, (function, args)) in enumerate(zip(worlds, sides, strict=True)):
            others = [Interleaving()] * (num_ranks - 1)
            world.start(function, args, [Interleaving(pipes[number], has_turn=not number), *others])
        for pipe in pipes:
            if pipe is not None:
                pipe.close()  # only the ranks have it open now, so that each side sees the other's end
        with ThreadPoolExecutor(len(worlds)) as pool:
            try:
                return list(pool.map(World.wait_or_fail, worlds))
            except BaseException:
                for world in worlds:
                    world.end()  # first, since the threads wait for the ranks
                raise
    finally:
        for world in worlds:
            world.end()


class World:
    """The ranks that run one function, and the temporary folder that they share."""

    def __init__(
        self, num_ranks: int, device: str, time_limit: float, machines: Neighbours | None = None, name: str = ""
    ) -> None:
        self.num_ranks, self.device, self.time_limit = num_ranks, device, time_limit
        self.machines, self.name = machines, name
        self.folder = Path(tempfile.mkdtemp(prefix="ulysses-ranks-"))
        self.processes: dict[int, Any] = {}  # by rank

    def start(
        self, function: Callable[..., Any], args: tuple[Any, ...], interleavings: Sequence[Interleaving] = ()
    ) -> None:
        machine = self.machines.place if self.machines is not None else None
        num_here, first, endpoint = self.num_ranks, 0, ""
        if machine is not None:
            num_here = self.num_ranks // machine.count
            first, endpoint = machine.rank * num_here, machine.endpoint
        for local_rank in range(num_here):
            rank = first + local_rank
            own = (interleavings[rank], *args) if interleavings else args
            meeting = (endpoint, self.name) if endpoint else None
            place = RankPlace(
                rank, self.num_ranks, str(self.folder), self.device, self.time_limit, local_rank, num_here, meeting
            )
            self.processes[rank] = start_process(_serve, (place, function, own), self.device)

    def wait(self) -> Any:
        check = self.machines.check if self.machines is not None else None
        _wait(self.processes, self.folder, self.time_limit, check)
        if 0 not in self.processes:
            return None
        with open(self.folder / "result", "rb") as stream:
            return pickle.load(stream)  # noqa: S301 - written by our own rank, in our own temporary folder

    def wait_or_fail(self) -> Any:
        try:
            return self.wait()
        except RankFailureError as failure:
            self.end()
            return failure

    def end(self) -> None:
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
        for process in self.processes.values():
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class RankPlace:
    """A rank's number and what all ranks of its world share. `meeting`: the endpoint of the machines' store and the
    world's name there; None on one machine, whose ranks meet in the folder."""

    rank: int
    num_ranks: int
    folder: str
    device: str
    time_limit: float
    local_rank: int
    num_here: int
    meeting: tuple[str, str] | None = None


def _wait(processes: dict[int, Any], folder: Path, time_limit: float, check: Callable[[], None] | None) -> None:
    end = time.monotonic() + time_limit
    open_ranks = dict(processes)
    while open_ranks:
        left = max(0.0, end - time.monotonic())
        sentinels = [process.sentinel for process in open_ranks.values()]
        ready = wait(sentinels, timeout=left if check is None else min(left, CHECK_SECONDS))
        if not ready and check is not None and left:
            check()
            continue
        if not ready:
            first = min(open_ranks)
            raise RankFailureError(first, "time", f"not done in {time_limit:.0f} s", _read_log(folder, first))
        for rank, process in list(open_ranks.items()):
            if process.is_alive():
                continue
            process.join()
            del open_ranks[rank]
            if process.exitcode:
                if process.exitcode > 0:  # a rank that a signal ended is itself the cause
                    time.sleep(CAUSE_WAIT_SECONDS)
                raise _find_killed(processes, folder) or _find_first(folder) or _describe_end(process, rank, folder)


def _find_killed(processes: dict[int, Any], folder: Path) -> RankFailureError | None:
    """A rank that a signal ended wrote no failure; the others then fail because it is gone."""
    for rank, process in processes.items():
        if process.exitcode is not None and process.exitcode < 0:
            return _describe_end(process, rank, folder)
    return None


def _describe_end(process: Any, rank: int, folder: Path) -> RankFailureError:
    is_memory = process.exitcode == OUT_OF_MEMORY_EXIT
    reason = "by the system, most likely for memory" if is_memory else f"exit code {process.exitcode}"
    return RankFailureError(rank, "killed", reason, _read_log(folder, rank))


def _find_first(folder: Path) -> RankFailureError | None:
    """The earliest failure; ranks that waited for the failed one fail later."""
    failures = [pickle.loads(file.read_bytes()) for file in folder.glob("error-*")]  # noqa: S301 - likewise
    if not failures:
        return None
    _, rank, *details = min(failures)
    return RankFailureError(rank, *details)


def _read_log(folder: Path, rank: int) -> str:
    try:
        return (folder / f"log-{rank}").read_text(errors="replace")[-4000:]
    except OSError:
        return ""


def _serve(place: RankPlace, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Runs one rank. The output of the rank and its libraries goes to its log."""
    rank, num_ranks, folder = place.rank, place.num_ranks, place.folder
    log = os.open(Path(folder) / f"log-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(place.local_rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(place.num_here), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    try:
        device = torch.device(place.device, place.local_rank) if place.device == "cuda" else torch.device("cpu")
        if place.device == "cuda":
            torch.cuda.set_device(device)
        else:
            num_cores = len(os.sched_getaffinity(0))
            most = int(os.environ.get("OMP_NUM_THREADS") or num_cores)  # the user's choice
            torch.set_num_threads(max(1, min(most, num_cores // place.num_here)))
        if place.meeting is None:
            rank_store = importlib.import_module("ulysses_cli.train.processes.store")
            store = rank_store.open_file_store(str(Path(folder) / "rendezvous"), num_ranks)
        else:
            machines = importlib.import_module("ulysses_cli.prove.machines")
            store = machines.open_rank_store(*place.meeting, timedelta(seconds=CONNECT_SECONDS))
        dist.init_process_group(
            "nccl" if place.device == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=place.time_limit),  # the caller ends the rank then
        )
        result = function(device, *args)
        if rank == 0:
            write_whole(Path(folder) / "result", pickle.dumps(result))
        dist.barrier()
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        lines = str(error).strip().splitlines() or [""]
        problems = error.problems if isinstance(error, RecipeError) else ()
        failure = (time.monotonic(), rank, type(error).__name__, lines[0][:400], traceback.format_exc(), problems)
        write_whole(Path(folder) / f"error-{rank}", pickle.dumps(failure))
        sys.stderr.flush()
        os._exit(1)  # other ranks may hang in a collective; this one must not wait for them
    os._exit(0)  # without waiting for threads and exit handlers of libraries
