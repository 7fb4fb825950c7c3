"""A file that is there as a whole or not at all: written beside, then renamed."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(file: Path, content: str | bytes) -> None:
    """Whoever reads the file meanwhile finds what stood there before. A process that dies leaves a hidden part."""
    beside = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(beside, file)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
