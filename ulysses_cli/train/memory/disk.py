"""A file on a local disk for tensors that wait there, and the threads that write and read it past the page cache.

The file has no name once it is open, so the system frees its space however the process ends. Imports no torch.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ulysses_cli.plan.hardware import GIB
from ulysses_cli.plan.tiles import SWAP_CHUNK_BYTES, SWAP_THREADS

BLOCK_BYTES = 4096  # offsets, lengths and addresses of direct transfers are multiples of it


class OffloadDiskError(RuntimeError):
    """The disk is full, or failed."""


def list_chunks(num_bytes: int) -> list[slice]:
    """What the threads move at once, of a tensor of so many bytes."""
    return [slice(start, min(start + SWAP_CHUNK_BYTES, num_bytes)) for start in range(0, num_bytes, SWAP_CHUNK_BYTES)]


def round_to_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


class Extents:
    """Free places of a file, which grows only where none is large enough. Neighbours are joined, so that rows of other
    lengths find room in later steps."""

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []  # offset, bytes; sorted

    def find(self, num_bytes: int) -> int | None:
        """Takes the first place that is large enough."""
        for index, (offset, size) in enumerate(self._free):
            if size >= num_bytes:
                self._free[index : index + 1] = [(offset + num_bytes, size - num_bytes)] if size > num_bytes else []
                return offset
        return None

    def append(self, num_bytes: int) -> int:
        offset, self.end = self.end, self.end + num_bytes
        return offset

    def release(self, offset: int, num_bytes: int) -> None:
        index = bisect(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + num_bytes:
            num_bytes += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            index -= 1
            before = self._free.pop(index)
            offset, num_bytes = before[0], num_bytes + before[1]
        self._free.insert(index, (offset, num_bytes))


Left = tuple[int, int, Sequence[Future[None]]]  # offset, bytes, and what may still write there


class DiskFile:
    """`folder` is on a disk that takes direct writes. Each place in the file is reserved before it is written, so that
    a full disk is an error of the layer that needs it and not of a later write. `begin_thread`: what each thread calls
    first."""

    def __init__(self, folder: Path, begin_thread: Callable[[], None] | None = None) -> None:
        self.folder = folder
        path = folder / f"activations-{os.getpid()}"
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
            weakref.finalize(self, os.close, self._handle)
            # where a file system cannot reserve, the C library writes single bytes, which direct transfers refuse
            self._reserving = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._reserving)
            path.unlink()
        except OSError as error:
            raise OffloadDiskError(
                f"memory.nvme_path: {folder}: a file for what layers save cannot be made: {error.strerror or error}: "
                "check the disk, name another, or set memory.activation_offload_device: cpu"
            ) from error
        self._extents, self._lock = Extents(), threading.Lock()
        self._left: deque[Left] = deque()
        self._threads = ThreadPoolExecutor(SWAP_THREADS, thread_name_prefix="offload", initializer=begin_thread)

    @property
    def num_bytes(self) -> int:
        return self._extents.end

    def reserve(self, num_bytes: int) -> int:
        """Returns the offset of a place of that size, a multiple of BLOCK_BYTES."""
        with self._lock:
            self._take_back()
            offset = self._extents.find(num_bytes)
            if offset is not None:
                return offset
            try:
                os.posix_fallocate(self._reserving, self._extents.end, num_bytes)
            except OSError as error:
                raise self._explain(error, num_bytes) from error
            return self._extents.append(num_bytes)

    def release(self, offset: int, num_bytes: int, writing: Sequence[Future[None]] = ()) -> None:
        """The place is free once nothing writes there any more. Takes no lock and waits for nothing: a finalizer calls
        it, at any place of any thread, also in a thread that holds the lock or that writes."""
        self._left.append((offset, num_bytes, writing))

    def _take_back(self) -> None:
        for _ in range(len(self._left)):
            offset, num_bytes, writing = left = self._left.popleft()
            if all(chunk.done() for chunk in writing):
                self._extents.release(offset, num_bytes)
            else:
                self._left.append(left)

    def start(self, transfer: Callable[[], None]) -> Future[None]:
        """Runs it on one of the threads, which take transfers in the order of their start."""
        return self._threads.submit(transfer)

    def write(self, buffer: memoryview, offset: int) -> None:
        self._transfer(lambda part, at: os.pwrite(self._handle, part, at), buffer, offset)

    def read(self, buffer: memoryview, offset: int) -> None:
        self._transfer(lambda part, at: os.preadv(self._handle, [part], at), buffer, offset)

    def _transfer(self, move: Callable[[memoryview, int], int], buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            try:
                moved = move(buffer[done:], offset + done)
            except OSError as error:
                raise self._explain(error, len(buffer)) from error
            if not moved or moved % BLOCK_BYTES:
                raise self._explain(OSError(errno.EIO, "the disk moved a part of a block"), len(buffer))
            done += moved

    def _explain(self, error: OSError, num_bytes: int) -> OffloadDiskError:
        what = f"{error.strerror or error}, with {self._extents.end / GIB:.2f} GiB of this rank there"
        return OffloadDiskError(
            f"memory.nvme_path: {self.folder}: {what} and {num_bytes / GIB:.2f} more to move: make room, offload fewer "
            "layers (memory.activation_offloading), or set memory.activation_offload_device: cpu"
        )
