"""The GPUs of this machine, by NVIDIA's driver, without torch."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DRIVER = "libcuda.so.1"
QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
QUERY_SECONDS = 20
ASK_DRIVER = """
import ctypes, sys
NO_DEVICE, VIRTUAL_MEMORY = 100, 102  # cuda.h: an error, an attribute
driver, count, able = ctypes.CDLL(sys.argv[1]), ctypes.c_int(0), []
error = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
if error not in (0, NO_DEVICE):
    raise SystemExit(1)
for device in range(0 if error else count.value):
    value = ctypes.c_int(1)
    driver.cuDeviceGetAttribute(ctypes.byref(value), VIRTUAL_MEMORY, device)
    able.append(value.value)
print(len(able), int(all(able)))
"""


@dataclass(frozen=True)
class DriverFacts:
    """What NVIDIA's driver says to a process. `maps_memory`: torch can grow a piece of memory in place
    (expandable_segments), which some virtual machines refuse."""

    num_gpus: int
    maps_memory: bool = True


@dataclass(frozen=True)
class FoundGpu:
    """A GPU as the driver names it."""

    name: str
    memory_bytes: int


def ask_driver(environ: Mapping[str, str], driver: str = DRIVER, devices: Path = Path("/dev")) -> DriverFacts:
    """What a process with this environment sees. The driver makes its device files when it is first used, and a
    container may have none; they are counted where the driver is missing or fails. Another process asks it: one that
    has used it cannot fork any more."""
    files = DriverFacts(sum(file.name.removeprefix("nvidia").isdecimal() for file in devices.glob("nvidia*")))
    try:
        ctypes.CDLL(driver)
    except OSError:  # the usual machine without a GPU, at no cost
        return files
    command = [sys.executable, "-I", "-S", "-c", ASK_DRIVER, driver]
    try:
        done = subprocess.run(command, env=dict(environ), capture_output=True, text=True, timeout=QUERY_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return files
    words = done.stdout.split()
    return DriverFacts(int(words[0]), words[1] == "1") if done.returncode == 0 and len(words) == 2 else files


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
