"""Binds a rank's threads to its share of the cores near its GPU: work on the host (Adam under offload) crosses no
socket, and no two ranks work on one core.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence, Set
from pathlib import Path

import torch

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
