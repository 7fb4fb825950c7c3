"""The GPUs of this machine, by NVIDIA's driver, without torch."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
QUERY_SECONDS = 20


@dataclass(frozen=True)
class FoundGpu:
    """A GPU as the driver names it."""

    name: str
    memory_bytes: int


def list_gpus() -> list[FoundGpu]:
    """Returns no GPU where there is no driver."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return read_gpus(done.stdout)


def read_gpus(table: str) -> list[FoundGpu]:
    """Reads nvidia-smi's lines, `name, MiB`."""
    rows = [line.rpartition(",") for line in table.splitlines() if line.strip()]
    return [FoundGpu(name.strip(), int(mib) << 20) for name, _, mib in rows if mib.strip().isdecimal()]
