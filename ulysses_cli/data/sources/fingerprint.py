"""Hashes the content of files, and caches the hashes by the files' stat so that an unchanged file is not read again."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from ulysses_cli.plan.files.whole_files import write_whole

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
