"""The device of a benchmark: a GPU, or a CPU on which the benchmark's code is rehearsed in miniature. A rehearsal
measures nothing: its memory is a line in the row's length, so that a search under a cap has an end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity

OutOfMemoryError = torch.cuda.OutOfMemoryError  # of the device; the host's is another failure
ROW_BYTES = 1 << 20  # of a token, in a rehearsal


@dataclass(frozen=True)
class Facts:
    name: str
    total_memory: int


class Gpu:
    """The first GPU that torch sees."""

    torch_device = torch.device("cuda", 0)
    activity, event_type = ProfilerActivity.CUDA, torch.autograd.DeviceType.CUDA

    def read_facts(self) -> Facts:
        facts = torch.cuda.get_device_properties(0)
        return Facts(facts.name, facts.total_memory)

    def limit(self, num_bytes: float) -> None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / self.read_facts().total_memory))

    def begin_row(self, num_tokens: int) -> None:
        torch.cuda.synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def read_peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def read_reserved(self) -> int:
        return torch.cuda.max_memory_reserved()

    def read_used(self) -> int:
        """By all processes, with what torch does not count: the context, and buffers of NCCL."""
        free, total = torch.cuda.mem_get_info()
        return total - free

    def free_cache(self) -> None:
        torch.cuda.empty_cache()

    def measure_link(self, num_bytes: int = 1 << 30) -> float:
        """Returns bytes per second from the device to page-locked memory, one way."""
        device = torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        start = time.perf_counter()
        host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        return num_bytes / (time.perf_counter() - start)


class Rehearsal:
    """A CPU in the place of a GPU."""

    torch_device = torch.device("cpu")
    activity: Any = ProfilerActivity.CPU
    event_type = torch.autograd.DeviceType.CPU

    def __init__(self) -> None:
        self.cap, self.peak = float("inf"), 0

    def read_facts(self) -> Facts:
        return Facts("a rehearsal on a CPU", 1 << 34)

    def limit(self, num_bytes: float) -> None:
        self.cap = num_bytes

    def begin_row(self, num_tokens: int) -> None:
        if ROW_BYTES * num_tokens > self.cap:
            raise OutOfMemoryError(f"a row of {num_tokens} tokens is over the rehearsal's cap")
        self.peak = max(self.peak, ROW_BYTES * num_tokens)

    def synchronize(self) -> None:
        pass

    def forget_peak(self) -> None:
        self.peak = 0

    def read_peak(self) -> int:
        return self.peak

    read_reserved = read_used = read_peak

    def free_cache(self) -> None:
        pass

    def measure_link(self) -> float:
        return 1e9
