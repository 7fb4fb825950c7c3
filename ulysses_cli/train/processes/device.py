"""Chooses this rank's device and finds its GPU in the hardware table. Takes plain arguments."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

import torch

from ulysses_cli.plan.hardware import Gpu, Hardware
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.train.processes.cpu_affinity import bind_to_device
from ulysses_cli.train.processes.host_memory import count_usable_bytes


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
