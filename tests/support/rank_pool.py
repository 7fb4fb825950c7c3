"""Starts N gloo ranks once and runs functions on them.

Ranks are forked from one server and meet through a file. Each call has a time limit; a failure raises the first failing
rank's trace. A test passes a function of its own module; it runs as `function(*args)` on each rank and returns what can
be pickled. The next test uses the same ranks. A rank that fails or hangs ends its whole pool, so that no test inherits
a broken group.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ulysses_cli.prove.ranks import start_process
from ulysses_cli.run.host import FOLDER, get_builds_folder, list_dead_locks, list_locks

TIME_LIMIT = 300.0
START_LIMIT = 180.0
STALE_SECONDS = 120.0
BUILD_SECONDS = 60.0
END_SECONDS = 2.0  # for what a signal lets a rank write down, as coverage does
_pools: dict[int, Pool] = {}


class RankError(AssertionError):
    """Holds one rank's trace."""


def run_on_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, time_limit: float = TIME_LIMIT) -> list[Any]:
    """Runs `function(*args)` on every rank of a gloo world; returns the results in the order of the ranks."""
    if num_ranks not in _pools:
        _pools[num_ranks] = Pool(num_ranks)
    try:
        return _pools[num_ranks].run(function, args, time_limit)
    except BaseException:
        _pools.pop(num_ranks).kill()
        raise


def clear_stale_locks() -> None:
    """Removes the lock that a process leaves when it is killed while it builds one of DeepSpeed's operators. All others
    would wait for it."""
    for lock in list_dead_locks(os.environ, STALE_SECONDS):
        lock.unlink(missing_ok=True)


def is_building() -> bool:
    """Returns whether an operator of DeepSpeed is being built. That takes minutes on a busy machine, once."""
    clear_stale_locks()
    return bool(list_locks(os.environ))


class Pool:
    def __init__(self, num_ranks: int) -> None:
        clear_stale_locks()
        self.folder = tempfile.TemporaryDirectory()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(num_ranks):
            own, reference = multiprocessing.Pipe()
            process = start_process(_serve, (rank, num_ranks, self.folder.name, reference))
            reference.close()
            self.pipes.append(own)
            self.processes.append(process)
        self.collect(START_LIMIT)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], time_limit: float) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((list(sys.path), function.__module__, function.__qualname__, args))
        return self.collect(time_limit)

    def collect(self, time_limit: float) -> list[Any]:
        """Waits for all ranks. The first failure wins, since the others then hang in a collective."""
        end = time.monotonic() + time_limit
        results: dict[int, Any] = {}
        while len(results) < len(self.pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in results}
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready and is_building():
                end = time.monotonic() + BUILD_SECONDS
            elif not ready:
                raise RankError(
                    f"ranks {sorted(waiting.values())} did not finish in {time_limit} s\n{self.read_stacks()}"
                )
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    is_fine, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    self.processes[rank].join(5)
                    code = self.processes[rank].exitcode
                    raise RankError(f"rank {rank} died with exit code {code}") from None
                if not is_fine:
                    raise RankError(f"rank {rank} failed\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(len(self.pipes))]

    def read_stacks(self) -> str:
        """Returns each rank's stack, requested by signal."""
        import signal

        for process in self.processes:
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        texts = [(path.name, path.read_text()) for path in sorted(Path(self.folder.name).glob("stack-*"))]
        return "\n".join(f"{name}\n{text}" for name, text in texts)

    def stop(self) -> None:
        for pipe in self.pipes:
            try:
                pipe.send(None)
            except OSError:
                pass
        for process in self.processes:
            process.join(20)
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(END_SECONDS)
            process.kill()
            process.join()
        self.folder.cleanup()


def _serve(rank: int, num_ranks: int, folder: str, pipe: Connection) -> None:
    import signal
    from datetime import timedelta

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu", FOLDER: str(get_builds_folder(os.environ))}
    stack = open(Path(folder) / f"stack-{rank}", "w")  # noqa: SIM115 - open as long as the rank lives
    faulthandler.register(signal.SIGUSR1, stack)
    import torch
    import torch.distributed as dist

    from ulysses_cli.train.processes.store import open_file_store

    torch.set_num_threads(1)
    store = open_file_store(str(Path(folder) / "rendezvous"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=TIME_LIMIT))
    pipe.send((True, None))
    while True:
        task = pipe.recv()
        if task is None:
            break
        sys.path[:], module, name, args = task
        try:
            function = __import__(module, fromlist=["_"])
            for part in name.split("."):
                function = getattr(function, part)
            value = function(*args)
            dist.barrier()
            pipe.send((True, value))
        except BaseException:  # noqa: BLE001 - the test that asked gets it
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


@atexit.register
def stop_pools() -> None:
    while _pools:
        _pools.popitem()[1].stop()
