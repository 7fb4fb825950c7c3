"""Checks the folder in which torch builds DeepSpeed's operators at their first use: locks that killed builders left,
and whether this user may write there. Runs before anything waits for a build. No torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

BUILD_SECONDS = 600  # no operator takes this long to build
HINT = "name a folder of your own that you can write: TORCH_EXTENSIONS_DIR=FOLDER"


def get_builds_folder(environ: Mapping[str, str]) -> Path:
    """The folder that torch would use."""
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions"))


def find_write_problem(environ: Mapping[str, str]) -> str:
    """What keeps an operator from being built, or ''."""
    folder = existing = get_builds_folder(environ)
    while not os.path.lexists(existing):
        existing = existing.parent
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return ""
    why = "cannot be written" if existing == folder else f"cannot be made in {existing}"
    return f"{folder}, where operators of DeepSpeed are built, {why}"


def list_dead_locks(environ: Mapping[str, str]) -> list[Path]:
    """Old locks that no process here holds open. A builder keeps its lock open, which is surer than the lock's age,
    since the clock may have jumped. The age is for builders on other machines, whose open files are not visible."""
    locks = [lock for lock in sorted(get_builds_folder(environ).rglob("lock")) if _is_old(lock)]
    held = _list_open_files() if locks else set()
    return [lock for lock in locks if _identify(lock) not in held]


def _is_old(lock: Path) -> bool:
    try:
        return abs(time.time() - lock.stat().st_mtime) > BUILD_SECONDS
    except OSError:
        return False  # its builder is done


def _identify(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _list_open_files() -> set[tuple[int, int] | None]:
    """Open files of all processes that this user may inspect."""
    return {_identify(handle) for folder in Path("/proc").glob("[0-9]*/fd") for handle in _list(folder)}


def _list(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
