"""Opens plain and compressed files for reading. Bounds how far a compressed one may expand."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ulysses_cli.plan.files.regular_files import open_regular
from ulysses_cli.readers.expansion import Expansion

PACKED = (".gz", ".zst")


def open_file(file: Path) -> BinaryIO:
    """Opens a plain file, or the content of a .gz or .zst file."""
    openers: dict[str, Callable[[Path], BinaryIO]] = {".gz": _open_gzip, ".zst": _open_zstd}
    opener = openers.get(file.suffix.lower())
    return open_regular(file) if opener is None else io.BufferedReader(_Bounded(file, opener(file)))


def _open_gzip(file: Path) -> BinaryIO:
    return gzip.open(open_regular(file), "rb")  # type: ignore[return-value]


def _open_zstd(file: Path) -> BinaryIO:
    import pyarrow

    stream: BinaryIO = pyarrow.CompressedInputStream(open_regular(file), "zstd")
    return stream


class _Bounded(io.RawIOBase):
    """A stream that raises when a file expands too far."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self.stream, self.expansion = stream, Expansion(file)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.stream.read(len(buffer))
        self.expansion.add(len(data))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self.stream.close()
        super().close()
