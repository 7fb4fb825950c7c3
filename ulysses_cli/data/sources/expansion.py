"""How far a file may expand when it is read: two megabytes can hold gigabytes of nothing. What comes out is counted,
and what a library makes in one go has room for so much and no more. One problem with the file's name otherwise.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ulysses_cli.data.problems import DataError
from ulysses_cli.plan.problem import Problem, Where

MAX_EXPANSION = 200  # texts that repeat themselves much come to 50
FREE_BYTES = 256 << 20  # a file that holds no more may expand as it likes
LIBRARY_BYTES = 1 << 30  # of a library that reads one: metadata, two copies of what it decodes


class Expansion:
    """Of one file."""

    def __init__(self, file: Path) -> None:
        self.file, self.num_bytes = file, 0
        self.limit = max(FREE_BYTES, MAX_EXPANSION * file.stat().st_size)

    def add(self, num_bytes: int) -> None:
        """What has come out of it."""
        self.num_bytes += num_bytes
        self.check(self.num_bytes)

    def check(self, num_bytes: int) -> None:
        """What will come out of it, or has."""
        if num_bytes > self.limit:
            raise self.explain()

    def explain(self) -> DataError:
        message = f"expands to more than {self.limit / 2**20:,.0f} MiB, {MAX_EXPANSION} times what it takes on disk"
        hint = "leave it out, or unpack it yourself where it is meant"
        return DataError([Problem("", message, hint, Where(str(self.file)))])

    @contextmanager
    def give_room(self) -> Iterator[None]:
        """What runs inside may take as much memory beside what this process has, and fails for want of it beyond."""
        with open("/proc/self/statm", encoding="ascii") as stream:
            own = int(stream.read().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        room = own + LIBRARY_BYTES + self.limit
        resource.setrlimit(resource.RLIMIT_AS, (room if soft == resource.RLIM_INFINITY else min(room, soft), hard))
        try:
            yield
        except MemoryError:
            raise self.explain() from None
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
