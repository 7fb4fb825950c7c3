"""Stands in for the file on a disk where what layers save may wait (train/memory/disk.py): it counts the file's bytes
and writes nothing. A tensor that leaves stays on the device until somebody waits for its last chunk, the latest time at
which a run frees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from ulysses_cli.plan.tiles import SWAP_CHUNK_BYTES, SWAP_THREADS
from ulysses_cli.train.memory.disk import Extents


class LateTransfer(Future[None]):
    """A transfer that runs when its result is asked for."""

    def __init__(self, transfer: Callable[[], None]) -> None:
        super().__init__()
        self._transfer: Callable[[], None] | None = transfer

    def result(self, timeout: float | None = None) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer()
            self.set_result(None)
        return super().result(timeout)


class CountedFile:
    """Has what the offloader calls of a DiskFile."""

    def __init__(self) -> None:
        self._extents = Extents()

    @property
    def num_bytes(self) -> int:
        return self._extents.end

    def reserve(self, num_bytes: int) -> int:
        offset = self._extents.find(num_bytes)
        return self._extents.append(num_bytes) if offset is None else offset

    def release(self, offset: int, num_bytes: int, _: Sequence[Future[None]] = ()) -> None:
        self._extents.release(offset, num_bytes)

    def start(self, transfer: Callable[[], None]) -> Future[None]:
        return LateTransfer(transfer)

    def write(self, buffer: memoryview, offset: int) -> None: ...

    def read(self, buffer: memoryview, offset: int) -> None: ...


def replace_file(file: CountedFile) -> None:
    """The next model's offloader gets this file, and a buffer for each thread of a run."""
    from ulysses_cli.train.assembly import levers
    from ulysses_cli.train.memory import offload

    def get_buffer(self: Any) -> Tensor:
        if not hasattr(self, "buffers"):
            sizes = [SWAP_CHUNK_BYTES] * SWAP_THREADS
            self.buffers = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        buffer: Tensor = self.buffers[0]
        return buffer

    def view_memory(buffer: Tensor) -> memoryview:
        """A tensor without data has none."""
        return memoryview(b"")

    levers.open_disk = lambda *_: file  # type: ignore[assignment]
    offload.Offloader.get_buffer = get_buffer  # type: ignore[method-assign]
    offload.view_memory = view_memory
