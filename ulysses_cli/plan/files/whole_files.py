"""Writes a file atomically: to a temporary file in the same folder, which is then renamed."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(file: Path, content: str | bytes) -> None:
    """Until the rename, readers see the old content. A process that dies leaves a hidden temporary file."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
