"""The lock of a run's folder. Every process of the run holds it, so no second run starts there while one of them
lives.

If the folder is removed, the lock is written again. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from ulysses_cli.plan.files import open_own, take_lock

VARIABLE = "ULYSSES_LOCK"  # the lock's file
MAX_FACTS_BYTES = 1 << 20


class LostFolderError(RuntimeError):
    """Another run has taken the folder."""


class RunLock:
    """Held shared from the start to the end of this process."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.handle = open_own(file, os.O_RDWR)
        take_lock(self.handle, shares=True)

    def put_back(self) -> None:
        """On one rank of a machine: if the file is gone, writes a new one with the old content. Raises LostFolderError
        if a second run holds a lock there."""
        if _is_at(self.file, self.handle):
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        handle = open_own(self.file, os.O_RDWR | os.O_CREAT)
        try:
            take_lock(handle)  # exclusive: fails if a second run holds it shared
        except BlockingIOError:
            os.close(handle)
            raise LostFolderError(
                f"{self.file.parent} was removed, and a second run has begun in it: this one leaves it to that one"
            ) from None
        facts = os.pread(self.handle, MAX_FACTS_BYTES, 0)
        os.ftruncate(handle, 0)
        os.pwrite(handle, facts, 0)
        take_lock(handle, shares=True)
        self.handle = handle


def _is_at(file: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(handle))
    except OSError:
        return False


def hold_lock() -> RunLock | None:
    """None for a rank that the command did not start."""
    file = os.environ.get(VARIABLE)
    return RunLock(Path(file)) if file else None
