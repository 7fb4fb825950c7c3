"""Finds out which ranks write on the same disk: machines may share a folder, or each may have its own."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Disks:
    """For each rank, the first rank on the same disk: its owner, which makes folders and gives names there."""

    owners: tuple[int, ...]

    @property
    def is_shared(self) -> bool:
        return len(set(self.owners)) == 1

    def describe(self, setting: str, consequence: str) -> str:
        if self.is_shared:
            return f"{setting} is shared by all machines"
        return f"{setting} is on {len(set(self.owners))} disks that machines do not share: {consequence}"


def find_disks(folder: Path, rank: int, gather: Callable[[Any], list[Any]]) -> Disks:
    """Collective over all ranks. The first rank of each machine writes a token, and all look for all tokens. Raises
    OSError on all ranks where one machine cannot write."""
    token, problem = "", ""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        token = f".disk-{rank}-{secrets.token_hex(8)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / token).touch()
        except OSError as error:
            problem = f"rank {rank}: {folder}: {error.strerror or error}"
    tokens: list[tuple[str, str]] = gather((token, problem))
    is_seen = [bool(name) and os.path.lexists(folder / name) for name, _ in tokens]
    owners = gather(is_seen.index(True) if any(is_seen) else rank)
    if token:
        with suppress(OSError):  # one rank must not fail alone; the first file that is written fails on all
            (folder / token).unlink()
    if found := next((text for _, text in tokens if text), ""):
        raise OSError(found)
    return Disks(tuple(owners))
