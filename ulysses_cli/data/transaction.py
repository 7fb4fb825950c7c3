"""A folder that is there as a whole or not at all: written beside, synced, renamed, under a lock.

Two processes at once: the second waits and finds the first one's work. A killed one leaves a partial folder that the
next one removes.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ulysses_cli.data.problems import DataError
from ulysses_cli.plan.problem import Problem

MANIFEST = "manifest.json"
HINTS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room there, or name another folder"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it writable, or name another folder"),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "a file stands in the way: remove it, or name another folder"),
}


def make_folder(
    target: Path, build: Callable[[Path], Mapping[str, Any]], on_wait: Callable[[], None], *, is_whole: bool = False
) -> bool:
    """Have `build` fill the folder unless it is there already; what it returns becomes the manifest, written last.

    True when it was built now. `is_whole` says that the caller looked and found it; then nothing is locked.
    """
    if is_whole:
        return False
    try:
        return _make(target, build, on_wait)
    except OSError as error:  # readers have errors of their own, so this is about what is written
        hint = HINTS.get(error.errno or 0, "name another folder")
        message = f"{error.filename or target.parent} cannot be written: {error.strerror or error}"
        raise DataError([Problem("data.store_dir", message, hint)]) from None


def _make(target: Path, build: Callable[[Path], Mapping[str, Any]], on_wait: Callable[[], None]) -> bool:
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target)
    with lock(target.with_name(f".{target.name}.lock"), on_wait):
        if find_damage(target) is None:
            return False
        for stale in target.parent.glob(f".{target.name}.*.partial"):
            shutil.rmtree(stale, ignore_errors=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        partial.mkdir()
        try:
            manifest = dict(build(partial))
            sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
            for name in sizes:
                sync(partial / name)
            write_json(partial / MANIFEST, {**manifest, "sizes": sizes})
            sync(partial)
            if target.exists():  # damaged: find_damage said so
                shutil.rmtree(target)
            os.rename(partial, target)
            sync(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return True


def _sweep(target: Path) -> None:
    """Remove what killed processes left under other names: partial folders and locks that nobody holds."""
    beside = target.parent
    names = {found.name[1:].split(".")[0] for end in ("partial", "lock") for found in beside.glob(f".*.{end}")}
    for name in sorted(names - {target.name}):
        with suppress(OSError), lock(beside / f".{name}.lock", _give_way):
            for stale in beside.glob(f".{name}.*.partial"):
                shutil.rmtree(stale, ignore_errors=True)


def _give_way() -> None:
    raise BlockingIOError


def find_damage(folder: Path) -> str | None:
    """What is missing from a folder that make_folder made, in words; None when it is whole."""
    try:
        sizes = read_manifest(folder)["sizes"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{folder} has no readable {MANIFEST}"
    for name, size in sizes.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            return f"{folder / name} is missing"
        if found != size:
            return f"{folder / name} has {found:,} bytes, not {size:,}"
    return None


def read_manifest(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{folder / MANIFEST} holds no mapping")
    return found


def write_json(file: Path, value: Any) -> None:
    with open(file, "w", encoding="utf-8") as stream:
        json.dump(value, stream, ensure_ascii=False, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock(file: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Held by one process at a time; the system lets go of it when that process ends, however it ends. The file is
    removed by its holder, so who gets the lock looks whether it is still that of the name."""
    while True:
        with open(file, "a") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(stream, fcntl.LOCK_EX)
            if not _is_at(file, stream.fileno()):
                continue
            try:
                yield
            finally:
                with suppress(OSError):
                    file.unlink()
            return


def _is_at(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False
