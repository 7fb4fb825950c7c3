"""Makes a folder of tokens or rows atomically: written under another name, synced, then renamed, all under a lock.
Says whether such a folder is whole. Hashes files, and caches the hashes by the files' stat.

If two processes make the same folder, the second waits and uses the first one's work. A killed process leaves a
partial folder, which the next process removes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ulysses_cli.plan.files import take_lock, write_whole
from ulysses_cli.plan.problem import Problem
from ulysses_cli.readers.problems import DataError

SETTLED_SECONDS = 2.0  # a file that changed more recently may change again without a change of its time stamps


class FileHashes:
    """Content hashes by absolute path, cached in one JSON file of the store directory."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._known: dict[str, list[object]] = {}
        self._seen: dict[str, tuple[int, ...]] = {}
        self._is_changed = False
        try:
            cached = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return  # no cache yet
        if isinstance(cached, dict):
            self._known = {name: entry for name, entry in cached.items() if _is_entry(entry)}

    def hash_file(self, path: Path) -> str:
        """The sha256 of the file's content."""
        name, stat = str(path.absolute()), read_stat(path)
        self._seen[name] = stat
        known = self._known.get(name)
        if known is not None and known[0] == list(stat):
            return str(known[1])
        with open(path, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if time.time() - max(stat[1], stat[2]) / 1e9 > SETTLED_SECONDS:
            self._known[name] = [list(stat), digest]
            self._is_changed = True
        return digest

    def find_changed(self) -> str | None:
        """The name of a file that has changed since it was hashed; None if there is none."""
        for name, stat in self._seen.items():
            try:
                if read_stat(Path(name)) != stat:
                    return name
            except OSError:
                return name
        return None

    def save(self) -> None:
        """Writes the cache. Ignores errors: the cache only saves time, and a read-only store can still be read."""
        if not self._is_changed:
            return
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.file, json.dumps(self._known))


def _is_entry(entry: object) -> bool:
    """Whether this is [the file's stat, its hash]."""
    return isinstance(entry, list) and [type(part) for part in entry] == [list, str]


def read_stat(path: Path) -> tuple[int, ...]:
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev


def hash_parts(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


MANIFEST = "manifest.json"
HINTS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room there, or name another folder"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it writable, or name another folder"),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "a file has that name: remove it, or name another folder"),
}


def make_folder(
    target: Path, build: Callable[[Path], Mapping[str, Any]], on_wait: Callable[[], None], *, is_whole: bool = False
) -> bool:
    """Lets `build` fill the folder unless it exists. The mapping that `build` returns becomes the manifest, which is
    written last. Returns whether the folder was built now. `is_whole`: the caller has checked that the folder is whole,
    so no lock is taken.
    """
    if is_whole:
        return False
    try:
        return _make(target, build, on_wait)
    except OSError as error:  # a write failed: readers turn their errors into DataError
        hint = HINTS.get(error.errno or 0, "name another folder")
        message = f"{error.filename or target.parent} cannot be written: {error.strerror or error}"
        raise DataError([Problem("data.store_dir", message, hint)]) from None


def _make(target: Path, build: Callable[[Path], Mapping[str, Any]], on_wait: Callable[[], None]) -> bool:
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
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
            hashes = {name: _hash(partial / name) for name in sizes}
            write_json(partial / MANIFEST, {**manifest, "sizes": sizes, "sha256": hashes})
            sync(partial)
            if target.exists():  # find_damage reported damage above
                shutil.rmtree(target)
            os.rename(partial, target)
            sync(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return True


def _hash(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _remove_leftovers(target: Path) -> None:
    """Removes the partial folders and unheld locks that killed processes left next to the target, under other names."""
    parent = target.parent
    names = {path.name[1:].split(".")[0] for end in ("partial", "lock") for path in parent.glob(f".*.{end}")}
    for name in sorted(names - {target.name}):
        with suppress(OSError), lock(parent / f".{name}.lock", _raise_busy):
            for stale in parent.glob(f".{name}.*.partial"):
                shutil.rmtree(stale, ignore_errors=True)


def _raise_busy() -> None:
    raise BlockingIOError


def find_damage(folder: Path) -> str | None:
    """Describes what is missing from a folder that make_folder made; None when it is whole."""
    try:
        sizes = read_manifest(folder)["sizes"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{folder} has no readable {MANIFEST}"
    for name, size in sizes.items():
        try:
            current = (folder / name).stat().st_size
        except OSError:
            return f"{folder / name} is missing"
        if current != size:
            return f"{folder / name} has {current:,} bytes, not {size:,}"
    return None


def read_manifest(folder: Path) -> dict[str, Any]:
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if not isinstance(manifest, dict):
        raise ValueError(f"{folder / MANIFEST} holds no mapping")
    return manifest


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
    """A lock that one process holds at a time. The system releases it when that process ends, even if it is killed. The
    holder removes the file, so a process that gets the lock checks that the file still has its name."""
    while True:
        with open(file, "a") as stream:
            try:
                take_lock(stream.fileno())
            except BlockingIOError:
                on_wait()
                take_lock(stream.fileno(), waits=True)
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
