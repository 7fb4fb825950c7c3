"""Keeps choices of kernels on disk, by GPU, versions, need and this package's own code, so that only the first run on a
machine tries them. A file that cannot be read or written changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ulysses_cli.plan.files.whole_files import write_whole


def get_folder(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "ulysses" / "kernels"


@cache
def digest_code(folder: Path) -> str:
    """Of a folder's modules. After a change of any of them, kernels are tried again: what an earlier version found to
    be exact and fast was found with other calls."""
    files = sorted(folder.glob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


class ChoiceCache:
    """`facts`: everything that the choice depends on besides this package's own code, of which a digest is added:
    `sources` is the folder of modules that say how kernels are called, and by which rule they are tried."""

    def __init__(self, folder: Path, sources: Path, facts: Mapping[str, Any]) -> None:
        self.facts = {"code": digest_code(sources), **facts}
        written = json.dumps(self.facts, sort_keys=True, default=str)
        self.file = folder / f"{hashlib.sha256(written.encode()).hexdigest()[:32]}.json"

    def read(self) -> tuple[str, str] | None:
        """Returns the kernel's name and the reason."""
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"))
            return str(content["name"]), str(content["reason"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, name: str, reason: str) -> None:
        content = {"name": name, "reason": reason, "facts": self.facts}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.file, json.dumps(content, indent=1, default=str))
        except OSError:
            pass
