"""Writes a file atomically: to a temporary file in the same folder, which is then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ulysses_cli.plan.files.regular_files import open_own, open_regular


def write_whole(file: Path, content: str | bytes) -> None:
    """Until the rename, readers see the old content. A process that dies leaves a hidden temporary file."""
    data = content.encode() if isinstance(content, str) else content
    _replace(file, lambda temporary: _write(temporary, data))


def copy_whole(source: Path, file: Path) -> None:
    """As write_whole, with another file's content."""
    _replace(file, lambda temporary: _copy(source, temporary))


def _write(file: Path, data: bytes) -> None:
    with open(file, "wb", opener=open_own) as stream:
        stream.write(data)


def _copy(source: Path, file: Path) -> None:
    with open_regular(source) as content, open(file, "wb", opener=open_own) as stream:
        shutil.copyfileobj(content, stream)


def _replace(file: Path, write: Callable[[Path], object]) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        write(temporary)
        os.replace(temporary, file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
