"""Compressed files, opened for reading. How far one expands is bounded: two megabytes can hold gigabytes of nothing."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ulysses_cli.data.problems import DataError
from ulysses_cli.plan.problem import Problem, Where
from ulysses_cli.plan.regular_files import open_regular

MAX_EXPANSION = 200  # texts that repeat themselves much come to 50
FREE_BYTES = 256 << 20  # a file that holds no more may expand as it likes


def open_file(file: Path) -> BinaryIO:
    """Plain, or what is inside of a .gz or .zst."""
    openers: dict[str, Callable[[Path], BinaryIO]] = {".gz": _open_gzip, ".zst": _open_zstd}
    opener = openers.get(file.suffix.lower())
    return open_regular(file) if opener is None else io.BufferedReader(_Bounded(file, opener(file)))


def _open_gzip(file: Path) -> BinaryIO:
    return gzip.open(open_regular(file), "rb")  # type: ignore[return-value]


def _open_zstd(file: Path) -> BinaryIO:
    import pyarrow

    return pyarrow.CompressedInputStream(open_regular(file), "zstd")


class _Bounded(io.RawIOBase):
    """Counts what comes out."""

    def __init__(self, file: Path, inside: BinaryIO) -> None:
        self.file, self.inside, self.num_bytes = file, inside, 0
        self.limit = max(FREE_BYTES, MAX_EXPANSION * file.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        found = self.inside.read(len(buffer))
        self.num_bytes += len(found)
        if self.num_bytes > self.limit:
            message = f"expands to more than {self.limit / 2**20:,.0f} MiB, {MAX_EXPANSION} times what it takes on disk"
            hint = "leave it out, or unpack it yourself where it is meant"
            raise DataError([Problem("", message, hint, Where(str(self.file)))])
        buffer[: len(found)] = found
        return len(found)

    def close(self) -> None:
        if not self.closed:
            self.inside.close()
        super().close()
