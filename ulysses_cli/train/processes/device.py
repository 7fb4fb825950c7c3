"""Where this rank computes: the device, and the GPU of the hardware table that it is. Takes plain arguments."""

from __future__ import annotations

import os

import torch

from ulysses_cli.plan.hardware import Gpu, Hardware
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.train.processes.cpu_affinity import bind_to_device
from ulysses_cli.train.processes.host_memory import count_host_bytes


class StartError(ValueError):
    """Something that the recipe needs is not there."""


class GpuMemoryError(RuntimeError):
    """A run did not fit: what was tried, and the smallest change of the recipe that fits."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def choose_device(*, wants_cpu: bool) -> torch.device:
    """One GPU per process of this machine. The process's threads move to its share of the cores near it."""
    if wants_cpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise StartError("torch sees no GPU: set run.device: cpu, or see what `nvidia-smi` says")
    here = count_processes_here()
    if here > torch.cuda.device_count():
        has = format_count(torch.cuda.device_count(), "GPU")
        raise StartError(f"{format_count(here, 'process')} on this machine, but {has}")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    bind_to_device(device, here)
    return device


def recognise_gpu(device: torch.device, hardware: Hardware) -> tuple[Gpu | None, bool]:
    """(the table's entry, or one made of what the device says of itself; whether the table knows it)."""
    if device.type != "cuda":
        return None, False
    facts = torch.cuda.get_device_properties(device)
    host_bytes = count_host_bytes()
    return hardware.recognise(facts.name, facts.total_memory, host_bytes // count_processes_here())


def count_processes_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
