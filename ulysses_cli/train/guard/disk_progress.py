"""What ranks read from disks and write to them while no step is done. By it the watchdog tells a slow disk from a lost
machine. No collective happens here: ranks exchange their counts over the agent's store.
"""

from __future__ import annotations

import torch.distributed as dist


class ByteCount:
    """The bytes that this process has moved. Several threads add to it; a lost update only makes the count smaller."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, num_bytes: int) -> None:
        self.total += num_bytes


MOVED = ByteCount()


class SharedCount:
    """The bytes that all ranks have moved, as one of them knows it. `total` changes only when bytes have moved and each
    rank has given a sign since the last change: it stands still when a machine is lost, even if others still write."""

    def __init__(self, world_size: int, prefix: str) -> None:
        self.world_size, self.prefix = world_size, prefix
        self.total = self.num_told = self.num_signs = 0
        self.is_complete = True  # the round of signs that this rank has last taken part in

    def exchange(self, store: dist.Store, num_moved: int) -> None:
        """Raises RuntimeError where the store is gone. It may hang where the store's machine is lost."""
        total = store.add(f"{self.prefix}moved", num_moved - self.num_told)
        self.num_told = num_moved
        self.num_signs += self.is_complete
        num_signs = store.add(f"{self.prefix}signs", int(self.is_complete))
        self.is_complete = num_signs >= self.world_size * self.num_signs
        if self.is_complete:
            self.total = total
