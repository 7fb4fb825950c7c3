"""Patterns of file names -> paths, as a shell with `**` would. A folder is entered once, however many links lead to it:
a link to a folder above would else be followed in circles.
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
    found: set[str] = set()
    for top in sorted(glob.glob(os.path.join(head, ""))) if head else [""]:
        for folder in _walk_folders(top):
            found.update(expand_pattern(os.path.join(glob.escape(folder), *tail)))
    return sorted(found)


def _walk_folders(top: str) -> Iterator[str]:
    """The folder itself, and all below."""
    seen: set[tuple[int, int]] = set()
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        try:
            mark = os.stat(folder or os.curdir)
            entries = sorted(os.scandir(folder or os.curdir), key=lambda entry: entry.name)
        except OSError:
            continue  # not to be read, or a link that leads nowhere
        if (mark.st_dev, mark.st_ino) in seen:
            continue
        seen.add((mark.st_dev, mark.st_ino))
        yield folder
        inside = [entry.name for entry in entries if not entry.name.startswith(".") and os.path.isdir(entry.path)]
        waiting += [os.path.join(folder, name) for name in reversed(inside)]
