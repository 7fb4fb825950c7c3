"""Keeps choices of kernels on disk, by GPU, versions and need, so that only the first run on a machine tries kernels.
A file that cannot be read or written changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ulysses_cli.plan.files.whole_files import write_whole

FORMAT = 1  # changes when kernels are called in another way or tried by another rule


def get_folder(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "ulysses" / "kernels"


class ChoiceCache:
    """`facts`: everything that the choice depends on."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self.facts = {"format": FORMAT, **facts}
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
