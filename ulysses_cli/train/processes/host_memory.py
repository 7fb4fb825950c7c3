"""Counts host memory: the machine's, and what this process may still take, in a container or outside one."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def count_host_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def read_memory_limit() -> int:
    """A container's limit; very large where there is none."""
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            return int((CGROUP / file).read_text())
        except (OSError, ValueError):
            continue
    return 1 << 60


def count_free_bytes() -> int:
    """What a new process may still take: the system's file cache counts as free, and a container has no more than is
    left of its limit."""
    free = _read_table(Path("/proc/meminfo")).get("MemAvailable:", 0) * 1024
    file_cache = _read_table(CGROUP / "memory.stat").get("inactive_file", 0)
    try:
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        used = 0
    return max(0, min(free or count_host_bytes(), read_memory_limit() - used + file_cache))


def _read_table(file: Path) -> dict[str, int]:
    """Reads lines of a name and a number."""
    try:
        rows = [line.split() for line in file.read_text().splitlines()]
        return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
    except OSError:
        return {}
