"""Starts the processes of ranks. On the CPU they are forked from one server that has torch and DeepSpeed loaded, so
that eight of them cost one import. A GPU's context cannot be forked, so each rank on a GPU is a new process.

The server computes nothing. No rank outlives the process that started it, however that process ends.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from multiprocessing.popen_forkserver import Popen
from multiprocessing.process import BaseProcess
from typing import Any

from ulysses_cli.run_folder.seal import KEY, find_seal

PRELOADED = ["ulysses_cli.prove.verify.recorded_run", "deepspeed", "peft"]
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
