"""Which cores are near a GPU, and the rank's threads bound to them: work on the host then crosses no socket."""

from __future__ import annotations

import os
from pathlib import Path

import torch

PCI_DEVICES = Path("/sys/bus/pci/devices")


def find_near_cores(address: str, devices: Path = PCI_DEVICES) -> set[int]:
    """Cores on the GPU's side of the machine, as the kernel says; none where it does not say."""
    try:
        return read_list((devices / address / "local_cpulist").read_text())
    except (OSError, ValueError):
        return set()


def read_list(text: str) -> set[int]:
    """The kernel's notation: 0-15,64-79."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def bind_to_device(device: torch.device) -> int:
    """-> how many cores this process may use. What it was not allowed before stays forbidden."""
    allowed = os.sched_getaffinity(0)
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        address = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
        near = find_near_cores(address) & allowed
        if near:
            os.sched_setaffinity(0, near)
            return len(near)
    return len(allowed)
