"""Bounds how far a file may expand when it is read: two megabytes can hold gigabytes of zeros.

Counts the bytes that are read, and limits the memory of libraries that decode a part at once. A file beyond the bound
raises DataError with its name.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ulysses_cli.plan.problem import Problem, Where
from ulysses_cli.readers.problems import DataError

MAX_EXPANSION = 200  # very repetitive texts reach about 50
FREE_BYTES = 256 << 20  # up to this size any expansion is allowed
LIBRARY_BYTES = 1 << 30  # for a library that reads a file: metadata, and two copies of what it decodes


class Expansion:
    """Counts the bytes that one file has expanded to."""

    def __init__(self, file: Path) -> None:
        self.file, self.num_bytes = file, 0
        self.limit = max(FREE_BYTES, MAX_EXPANSION * file.stat().st_size)

    def add(self, num_bytes: int) -> None:
        """Counts bytes that were read from the file."""
        self.num_bytes += num_bytes
        self.check(self.num_bytes)

    def check(self, num_bytes: int) -> None:
        """Raises if so many bytes in all are too many."""
        if num_bytes > self.limit:
            raise self.refuse(f"expands to more than {self.describe_limit()}")

    def describe_limit(self) -> str:
        return f"{self.limit / 2**20:,.0f} MiB, {MAX_EXPANSION} times what it takes on disk"

    def refuse(self, message: str) -> DataError:
        hint = "leave it out, or unpack it yourself if its content is intended"
        return DataError([Problem("", message, hint, Where(str(self.file)))])

    @contextmanager
    def limit_memory(self) -> Iterator[None]:
        """Limits the address space of this process while a library decodes, so that it fails with MemoryError instead
        of taking all memory. The limit is what the process has now, plus the file's bound, plus LIBRARY_BYTES."""
        with open("/proc/self/statm", encoding="ascii") as stream:
            current = int(stream.read().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = current + LIBRARY_BYTES + self.limit
        resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
        try:
            yield
        except MemoryError:
            message = f"cannot be read: it is damaged, or expands to more than {self.describe_limit()}"
            raise self.refuse(message) from None
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
