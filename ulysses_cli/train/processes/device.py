"""Chooses this rank's device, finds its GPU in the hardware table, binds its threads to a share of the cores near
that GPU, and seeds, saves and restores its random number generators. Takes plain arguments."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ulysses_cli.plan.hardware import Gpu, Hardware
from ulysses_cli.plan.units import format_count
from ulysses_cli.train.processes.host import count_usable_bytes

PCI_DEVICES = Path("/sys/bus/pci/devices")
CPUS = Path("/sys/devices/system/cpu")


def find_near_cores(address: str, devices: Path = PCI_DEVICES) -> set[int]:
    """The cores on the GPU's socket by the kernel's list; none where it has no such list."""
    try:
        return read_list((devices / address / "local_cpulist").read_text())
    except (OSError, ValueError):
        return set()


def read_list(text: str) -> set[int]:
    """Parses the kernel's notation: 0-15,64-79."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def find_siblings(core: int, cpus: Path = CPUS) -> frozenset[int]:
    """The logical cores of the kernel's count that are one physical core."""
    try:
        return frozenset(read_list((cpus / f"cpu{core}" / "topology" / "thread_siblings_list").read_text()))
    except (OSError, ValueError):
        return frozenset({core})


def take_share(near: Sequence[Set[int]], index: int, find: Callable[[int], Set[int]] = find_siblings) -> set[int]:
    """The cores near GPU `index` that its rank uses: GPUs with the same near cores share them evenly, in whole physical
    cores. All of them where there are too few."""
    near_cores = near[index]
    neighbours = [other for other, cores in enumerate(near) if cores == near_cores]
    physical_cores = sorted({tuple(sorted(find(core) & near_cores)) for core in near_cores})
    num_cores = len(physical_cores) // len(neighbours)
    if not num_cores:
        return set(near_cores)
    place = neighbours.index(index)
    return {core for cores in physical_cores[place * num_cores : (place + 1) * num_cores] for core in cores}


def bind_to_device(device: torch.device, num_ranks: int = 1) -> int:
    """Returns how many cores this process may use, always among those it was allowed before. `num_ranks`: ranks of this
    machine, on GPU 0, 1, ..."""
    allowed = os.sched_getaffinity(0)
    if device.type == "cuda":
        near = [find_near_cores(_read_address(rank)) & allowed for rank in range(num_ranks)]
        share = take_share(near, device.index)
        if share:
            os.sched_setaffinity(0, share)
            return len(share)
    return len(allowed)


def _read_address(index: int) -> str:
    facts = torch.cuda.get_device_properties(index)
    return f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"


class StartError(ValueError):
    """Something that the recipe needs is missing."""


class GpuMemoryError(RuntimeError):
    """A run did not fit into GPU memory. `hint` names the smallest change of the recipe that fits."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def choose_device(*, wants_cpu: bool) -> torch.device:
    """One GPU per process of this machine. Binds the process's threads to its share of the cores near it."""
    if wants_cpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise StartError("torch sees no GPU: set run.device: cpu, or see what `nvidia-smi` says")
    num_processes = count_local_processes()
    if num_processes > torch.cuda.device_count():
        gpus = format_count(torch.cuda.device_count(), "GPU")
        raise StartError(f"{format_count(num_processes, 'process')} on this machine, but {gpus}")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    bind_to_device(device, num_processes)
    return device


def enter_device(device: torch.device) -> None:
    """Called first in a thread of one's own: torch keeps the current GPU for each thread, and a new thread begins at
    GPU 0, where any call would open a context."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def recognise_gpu(device: torch.device, hardware: Hardware) -> tuple[Gpu | None, bool]:
    """Returns the table's entry, or one made from the device's properties, and whether the table has the GPU."""
    if device.type != "cuda":
        return None, False
    facts = torch.cuda.get_device_properties(device)
    num_processes = count_local_processes()
    return hardware.recognise(facts.name, facts.total_memory, count_usable_bytes(num_processes) // num_processes)


def find_least(gpus: Iterable[Gpu | None]) -> Gpu | None:
    """Rank 0's kind of GPU with the least memory, and the least host memory, that any rank has; None on a CPU."""
    found = [gpu for gpu in gpus if gpu is not None]
    if not found:
        return None
    least = {name: min(getattr(gpu, name) for gpu in found) for name in ("memory_bytes", "host_bytes_per_gpu")}
    return replace(found[0], **least)


def count_local_processes() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def get_rng_states(device: torch.device) -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_rng_states(states: tuple[Any, ...], device: torch.device) -> None:
    python, numpy, cpu, cuda = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, device)
