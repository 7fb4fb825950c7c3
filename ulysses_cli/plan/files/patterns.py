"""Expands patterns of file names to paths, as a shell with `**` would.

Enters each folder once, however many links lead to it: a link to a folder above would be followed without end.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator


def expand_pattern(pattern: str) -> list[str]:
    """Everything that matches, sorted. `**` stands for any number of folders whose names begin with no dot."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        return sorted(glob.glob(pattern))
    at = parts.index("**")
    head, tail = os.sep.join(parts[:at]) or (os.sep if pattern.startswith(os.sep) else ""), parts[at + 1 :] or ["*"]
    paths: set[str] = set()
    for top in sorted(glob.glob(os.path.join(head, ""))) if head else [""]:
        for folder in _walk_folders(top):
            paths.update(expand_pattern(os.path.join(glob.escape(folder), *tail)))
    return sorted(paths)


def _walk_folders(top: str) -> Iterator[str]:
    """The folder itself, and all folders below it."""
    seen: set[tuple[int, int]] = set()
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        try:
            status = os.stat(folder or os.curdir)
            entries = sorted(os.scandir(folder or os.curdir), key=lambda entry: entry.name)
        except OSError:
            continue  # not readable, or a link that leads nowhere
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        yield folder
        inside = [entry.name for entry in entries if not entry.name.startswith(".") and os.path.isdir(entry.path)]
        waiting += [os.path.join(folder, name) for name in reversed(inside)]
