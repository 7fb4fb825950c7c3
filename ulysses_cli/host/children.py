"""Starts child processes of this package. Each ends with its parent, in whatever way the parent ends, and gets enough
open files. A child's output besides its answer goes to a file or the terminal, never into a pipe that nobody reads.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ulysses_cli.plan.exit_codes import get_signal_code
from ulysses_cli.plan.problem import Problem, RecipeError

INTERRUPT_SECONDS = 3  # for a child that a terminal has interrupted as well; then SIGTERM
PR_SET_PDEATHSIG = 1  # linux/prctl.h
CORE_FILES = "ULYSSES_CORE_FILES"  # 1: a crash may write a core file, up to the user's limit
OPEN_FILES, OPEN_FILES_PER_RANK = 128, 8  # pipes, sockets to the others in several groups, weight files, libraries


def start_module(module: str, words: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Starts `python -m module words...` with text on its pipes. The child gets SIGTERM when this process ends. Raises
    RecipeError if too few files may be open."""
    if shortage := find_file_shortage(1):
        raise RecipeError([shortage])
    bind = partial(_end_with_parent, os.getpid(), ctypes.CDLL(None))
    command = [sys.executable, "-m", module, *words]
    return subprocess.Popen(command, text=True, encoding="utf-8", preexec_fn=bind, **options)


def _end_with_parent(parent: int, libc: ctypes.CDLL) -> None:
    """Runs between fork and exec: only system calls, since locks of other threads may be held forever."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent has ended since the fork
        os._exit(get_signal_code(signal.SIGTERM))


@contextmanager
def ending(child: subprocess.Popen[str]) -> Iterator[None]:
    """Ends the child together with this block, in whatever way the block ends; the child removes its partial output."""

    def stop(number: int, _: object) -> None:
        sys.exit(get_signal_code(number))

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:  # a terminal sends it to the child as well
        try:
            child.wait(INTERRUPT_SECONDS)
        except subprocess.TimeoutExpired:
            child.terminate()
        raise
    except BaseException:
        child.terminate()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def find_file_shortage(num_ranks: int) -> Problem | None:
    """Raises the limit of open files if needed and allowed; children inherit it. The problem if it is too low."""
    needed = OPEN_FILES + OPEN_FILES_PER_RANK * num_ranks
    soft, hard = (limit if limit != resource.RLIM_INFINITY else sys.maxsize for limit in _get_limits())
    if soft >= needed:
        return None
    if hard >= needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, _get_limits()[1]))
        return None
    where = "ulimit -n, LimitNOFILE of systemd, or --ulimit nofile of a container"
    return Problem("", f"a process may open {hard} files here, and {needed} are needed", f"raise it: {where}")


def _get_limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def refuse_core_files(environ: Mapping[str, str]) -> None:
    """For this process and its children: a crash must neither write memory (weights, documents, access tokens) to a
    file nor pass it to the system's collector. A limit of 1 byte prevents both; 0 would prevent only files."""
    if environ.get(CORE_FILES) not in (None, "", "0"):
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if soft and hard:
        resource.setrlimit(resource.RLIMIT_CORE, (1, hard))


def narrow_umask(folder: Path) -> int:
    """The user's umask together with the permissions that the folder denies to others, so that a file copied out of it
    stays as private as it was inside. For processes that write there."""
    mask = os.umask(0o077)
    os.umask(mask)
    while not folder.is_dir():
        folder = folder.parent
    return mask | (~stat.S_IMODE(folder.stat().st_mode) & 0o077)
