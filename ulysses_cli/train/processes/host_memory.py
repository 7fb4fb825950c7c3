"""Counts host memory: the machine's, and what this process may still take, in a container or a job, or outside them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
UNLIMITED = 1 << 60


class Controller(NamedTuple):
    """Files of a memory controller: where its groups are, their limit, their use, and the name of the idle cache."""

    folder: str
    limit: str
    use: str
    idle_cache: str


CONTROLLERS = (  # of cgroup versions 2 and 1 (kernel: admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst)
    Controller("", "memory.max", "memory.current", "inactive_file"),
    Controller("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def count_host_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def read_memory_limit() -> int:
    """The smallest limit of this process's groups (a container's, or a job's of a scheduler); very large where there is
    none."""
    return min((limit for _, _, limit in _walk_limits()), default=UNLIMITED)


def count_free_bytes() -> int:
    """What a new process may still take: the system's file cache counts as free, and a container has no more than is
    left of its limit."""
    free = _read_table(Path("/proc/meminfo")).get("MemAvailable:", 0) * 1024
    left = [free or count_host_bytes()]
    for group, controller, limit in _walk_limits():
        idle_cache = _read_table(group / "memory.stat").get(controller.idle_cache, 0)
        left.append(limit - (_read_number(group / controller.use) or 0) + idle_cache)
    return max(0, min(left))


def count_usable_bytes(num_running: int = 0) -> int:
    """What a run on this machine may hold in all. `num_running`: its processes that have started, this one among them.
    What they hold belongs to the run; each is taken to hold as much as this one."""
    held = _read_table(Path("/proc/self/status")).get("RssAnon:", 0) * 1024
    return min(count_host_bytes(), read_memory_limit(), count_free_bytes() + num_running * held)


def _walk_limits() -> Iterator[tuple[Path, Controller, int]]:
    """Each group that this process is in and that has a limit. In a container the root of the tree is its own group."""
    for controller in CONTROLLERS:
        root = CGROUP / controller.folder
        path = _find_own_group(controller)
        for group in dict.fromkeys(root / part for part in (path, *path.parents)):
            if (limit := _read_number(group / controller.limit)) is not None:
                yield group, controller, limit


def _find_own_group(controller: Controller) -> PurePosixPath:
    """Its path below the controller's folder. A line is number:controllers:path; version 2 names no controllers."""
    try:
        lines = [line.split(":", 2) for line in OWN_GROUPS.read_text().splitlines()]
    except OSError:
        lines = []
    paths = (path for _, names, path in lines if controller.folder in names.split(","))
    return PurePosixPath(next(paths, "/").lstrip("/"))


def _read_number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # there is none, or it is `max`
        return None


def _read_table(file: Path) -> dict[str, int]:
    """Reads lines of a name and a number."""
    try:
        rows = [line.split() for line in file.read_text().splitlines()]
        return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
    except OSError:
        return {}
