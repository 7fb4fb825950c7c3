"""Processes for ranks. On the CPU they are forked from one server that has torch and DeepSpeed loaded, so that eight
of them cost one import; a GPU's context cannot be forked, so ranks on GPUs begin anew. The server computes nothing.

No rank outlives the process that asked for it, however that one ends.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any

from ulysses_cli.run_folder.seal import KEY, find_seal

PRELOADED = ["ulysses_cli.prove.verify.recorded_run", "deepspeed", "peft"]
ON_CPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}  # DeepSpeed decides when it is imported
ABANDONED = 143


def warm_up() -> None:
    """Start the server, which then imports while the caller does other things."""
    forkserver.set_forkserver_preload(PRELOADED)
    with _environment(ON_CPU):
        forkserver.ensure_running()


def start_process(target: Callable[..., None], args: tuple[Any, ...], device: str = "cpu") -> BaseProcess:
    """`target(*args)` in a process of its own."""
    if device == "cpu":
        warm_up()
    context: Any = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
    process = context.Process(target=_live, args=(target, args, find_seal().key), daemon=True)
    process.start()
    return process


def _live(target: Callable[..., None], args: tuple[Any, ...], key: str) -> None:
    """Ranks of one parent have one key."""
    os.environ[KEY] = key
    threading.Thread(target=_end_with_parent, daemon=True).start()
    target(*args)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(ABANDONED)  # whatever this rank waits for will not come


@contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    """The server inherits this process's environment as it is when it starts."""
    kept = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
