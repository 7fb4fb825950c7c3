"""What a file holds, as a hash, remembered by the file's stat so that an unchanged file is not read again."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from ulysses_cli.plan.files.whole_files import write_whole

SETTLED_SECONDS = 2.0  # a file that changed later than this before it was hashed may change again within one tick


class FileHashes:
    """Content hashes by absolute path. Kept in one JSON file of the store directory."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._known: dict[str, list[object]] = {}
        self._seen: dict[str, tuple[int, ...]] = {}
        self._is_changed = False
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return  # nothing remembered
        if isinstance(found, dict):
            self._known = {name: known for name, known in found.items() if _is_known(known)}

    def hash_file(self, path: Path) -> str:
        """sha256 of the content."""
        name, stat = str(path.absolute()), read_stat(path)
        self._seen[name] = stat
        known = self._known.get(name)
        if known is not None and known[0] == list(stat):
            return str(known[1])
        with open(path, "rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if time.time() - max(stat[1], stat[2]) / 1e9 > SETTLED_SECONDS:
            self._known[name] = [list(stat), found]
            self._is_changed = True
        return found

    def find_changed(self) -> str | None:
        """A file that is no longer what it was when it was hashed."""
        for name, stat in self._seen.items():
            try:
                if read_stat(Path(name)) != stat:
                    return name
            except OSError:
                return name
        return None

    def save(self) -> None:
        """Saves time later, no more: a store that cannot be written to may be read all the same."""
        if not self._is_changed:
            return
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.file, json.dumps(self._known))


def _is_known(known: object) -> bool:
    """[the file's stat, its hash]."""
    return isinstance(known, list) and [type(part) for part in known] == [list, str]


def read_stat(path: Path) -> tuple[int, ...]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev


def hash_parts(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
