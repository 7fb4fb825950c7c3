"""Offloads what layers save for the backward to host memory, or through it to a file on a local disk: copied out on a
separate stream while later layers compute, and back while the backward of the layer above computes.  Takes tensors
and a device. On a CPU the same steps run with plain copies, so that values and bytes can be tested. The file has no
name once it is open, so the system frees its space however the process ends."""

from __future__ import annotations

import errno
import math
import mmap
import os
import threading
import time
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ulysses_cli.plan.hardware import GIB
from ulysses_cli.plan.levers import SWAP_CHUNK_BYTES, SWAP_THREADS
from ulysses_cli.train.clock import part_of_step
from ulysses_cli.train.processes.host import count_free_bytes

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


# The newest runs of layers whose copies may still be in progress: their tensors are still on the device.
MAX_LEAVING = 2
LEFT_FREE_BYTES = GIB  # for everything else on the machine
PIECE_BYTES, GROWS_WITHIN_SECONDS = 64 << 20, 2.0  # of memory that a machine shows only when it is used


class HostPool:
    """Host buffers, page-locked for a GPU once and reused in every step. Each has its own whole pages: a page that two
    buffers share cannot be locked twice. A lack of host memory is an error here, before the system kills a process for
    it. `piece_bytes` and `patience`, in seconds: how it looks whether the machine shows more memory than at first."""

    def __init__(
        self,
        *,
        is_pinned: bool,
        count_free: Callable[[], int] | None = None,
        piece_bytes: int = PIECE_BYTES,
        patience: float = GROWS_WITHIN_SECONDS,
    ) -> None:
        self.is_pinned, self.count_free = is_pinned, count_free or count_free_bytes
        self.piece_bytes, self.patience = piece_bytes, patience
        self.num_bytes = 0
        self._free: list[Tensor] = []
        self._given_back: deque[Tensor] = deque()
        self._lock = threading.Lock()  # threads that write to a disk take buffers too
        self._locked: dict[int, mmap.mmap] = {}  # by address; pages are unlocked before they are freed
        weakref.finalize(self, _unlock, self._locked, self._locked)

    def take(self, num_bytes: int) -> Tensor:
        """Takes the smallest free buffer that is large enough; else frees one that is too small and makes a new one."""
        num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            self._take_back()
            fitting = [buffer for buffer in self._free if buffer.numel() >= num_bytes]
            if fitting:
                smallest = min(fitting, key=Tensor.numel)
                self._free = [buffer for buffer in self._free if buffer is not smallest]
                return smallest
            if self._free:
                self._release(self._free.pop())
        pages, free = map_pages(num_bytes), self.count_free()
        if num_bytes + LEFT_FREE_BYTES > free and not self._grow_into(pages):
            raise MemoryError(
                f"what layers save needs {num_bytes / GIB:.2f} GiB of host memory on top of this rank's "
                f"{self.num_bytes / GIB:.2f}, and {free / GIB:.2f} are free: offload fewer layers "
                "(memory.activation_offloading)"
            )
        buffer = torch.frombuffer(pages, dtype=torch.uint8)
        if self.is_pinned:  # torch's own allocator of pinned memory would round up to a power of two
            _check(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), num_bytes, 0), num_bytes)
            self._locked[buffer.data_ptr()] = pages
        self.num_bytes += num_bytes
        return buffer

    def _grow_into(self, pages: mmap.mmap) -> bool:
        """Whether the machine has room for these pages. Some show little memory, and more as it is used (gVisor, or a
        guest that gets memory from its host when it needs some): pages are used in pieces, each when there is room."""
        buffer = torch.frombuffer(pages, dtype=torch.uint8)
        for piece in buffer.split(self.piece_bytes):
            latest = time.monotonic() + self.patience
            while piece.numel() + LEFT_FREE_BYTES > self.count_free():
                if time.monotonic() >= latest:
                    return False
                time.sleep(self.patience / 100)
            piece.zero_()
        return True

    def give_back(self, buffer: Tensor) -> None:
        """Takes no lock: a finalizer calls it, at any place of any thread, also in one that holds the lock."""
        self._given_back.append(buffer)

    def _take_back(self) -> None:
        while self._given_back:
            self._free.append(self._given_back.popleft())

    def close(self) -> None:
        """Call after the last step, when no copy is in progress."""
        self._take_back()
        while self._free:
            self._release(self._free.pop())

    def _release(self, buffer: Tensor) -> None:
        if self.is_pinned:
            torch.cuda.synchronize()
            _unlock(self._locked, [buffer.data_ptr()])
        self.num_bytes -= buffer.numel()


def map_pages(num_bytes: int) -> mmap.mmap:
    """This process's own memory, in huge pages where the system has them: 512 times fewer to lock. A forked child gets
    none of it, since a page that both have would move when it is written, away from what the GPU knows."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        with suppress(OSError):  # a kernel without it
            pages.madvise(advice)
    return pages


def _unlock(locked: dict[int, mmap.mmap], addresses: Iterable[int]) -> None:
    for address in tuple(addresses):
        torch.cuda.cudart().cudaHostUnregister(address)
        del locked[address]


def _check(status: Any, num_bytes: int) -> None:
    if int(status) != 0:
        raise MemoryError(
            f"{num_bytes / GIB:.2f} GiB of host memory cannot be page-locked (CUDA error {int(status)}): offload fewer "
            "layers (memory.activation_offloading), or give the container more memory"
        )


class Offloader:
    """The streams, the pool, and the runs of layers whose tensors are in host memory, newest last. A backward that
    fails ends the process, and nothing waits for the copies that it had started."""

    def __init__(self, device: torch.device, num_layers: int, disk: DiskFile | None = None) -> None:
        """`num_layers` counts from the first layer, whose tensors wait longest for their backward. The last
        MAX_LEAVING layers are not counted: their backward begins before their copy to the host would be finished.
        With a disk, tensors wait there, and host memory holds a chunk for each thread that moves them."""
        is_cuda = device.type == "cuda"
        if is_cuda and device.index is None:  # tensors' devices always have an index
            device = torch.device(device.type, torch.cuda.current_device())
        self.device, self.num_layers = device, num_layers
        self.pool = HostPool(is_pinned=is_cuda)
        self.offload: Callable[[int, Tensor], Waiting] = partial(OffloadedTensor, self)
        if disk is not None:
            self.offload = partial(SwappedTensor, self, disk)
        self.out_stream = torch.cuda.Stream(device) if is_cuda else None
        self.in_stream = torch.cuda.Stream(device) if is_cuda else None
        self.leaving: deque[tuple[int, Any, Tensor]] = deque()  # run, event after the copy, what is copied
        self.writing: deque[tuple[int, list[Future[None]]]] = deque()  # run, and the chunks that go to the disk
        self._buffers = threading.local()
        self._newest: weakref.ref[HostStorage] | None = None
        self._given: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._given_to: dict[int, int] = {}  # the first run that was given each of these tensors
        self._num_runs = 0

    def make_storage(self, layer: int) -> HostStorage:
        """The storage for what one run of a layer saves. Layers above the offloaded ones leave tensors on the device,
        but their backward starts the copies of the run before."""
        previous = self._newest() if self._newest is not None else None
        storage = HostStorage(self, previous, self._num_runs, is_offloaded=layer < self.num_layers)
        self._newest = weakref.ref(storage)
        self._num_runs += 1
        return storage

    def remember(self, run: int, tensor: Tensor) -> bool:
        """Returns whether an earlier run was given this very tensor."""
        if self._given.get(id(tensor)) is not tensor:
            self._given[id(tensor)], self._given_to[id(tensor)] = tensor, run
        return self._given_to[id(tensor)] != run

    def copy_out(self, run: int, tensor: Tensor, destination: Tensor) -> Any:
        """Starts the copy. Returns an event after it, None on a CPU."""
        if self.out_stream is None:
            destination.copy_(tensor)
            return None
        self.out_stream.wait_stream(torch.cuda.current_stream(self.device))  # that stream computes the tensor
        with torch.cuda.stream(self.out_stream):
            destination.copy_(tensor, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self.leaving.append((run, done, tensor))
        return done

    def release(self, first_kept: int) -> None:
        """Releases the device tensors of all runs before this one. Compute waits for their copies, so that the memory
        can be written again; for those that go to a disk, this thread waits."""
        while self.leaving and self.leaving[0][0] < first_kept:
            torch.cuda.current_stream(self.device).wait_event(self.leaving.popleft()[1])
        while self.writing and self.writing[0][0] < first_kept:
            for chunk in self.writing.popleft()[1]:
                chunk.result()

    def release_all(self) -> None:
        self.release(self._num_runs)

    def make_room(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory for a tensor that comes back. It is allocated on the stream that computes, and freed there
        afterwards; copies back that start later wait for what that stream does now."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        if self.in_stream is not None:
            self.in_stream.wait_stream(torch.cuda.current_stream(self.device))
        return tensor

    def record_event(self) -> Any:
        """After what is computed now; None on a CPU."""
        if self.in_stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def get_buffer(self) -> Tensor:
        """The calling thread's own buffer of one chunk."""
        if not hasattr(self._buffers, "buffer"):
            self._buffers.buffer = self.pool.take(SWAP_CHUNK_BYTES)
        buffer: Tensor = self._buffers.buffer
        return buffer

    def copy_chunk(self, stream: Any, source: Tensor, target: Tensor, after: Any) -> None:
        """Copies on the stream after an event, and returns when the copy is done."""
        if stream is None:
            target.copy_(source)
            return
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        done.synchronize()

    def copy_in(self, source: Tensor, target: Tensor) -> Any:
        """Starts the copy back. Returns an event after it, None on a CPU."""
        if self.in_stream is None:
            target.copy_(source)
            return None
        with torch.cuda.stream(self.in_stream):
            target.copy_(source, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        return arrived


class Waiting(Protocol):
    """A tensor that is not on the device, or is being copied back."""

    def start(self) -> None:
        """Starts its way back."""

    def finish(self) -> Tensor:
        """Returns the tensor, once, on the stream that computes."""


class OffloadedTensor:
    """One tensor in host memory."""

    def __init__(self, offloader: Offloader, run: int, tensor: Tensor) -> None:
        self.offloader, self.shape, self.dtype = offloader, tensor.shape, tensor.dtype
        self.tensor: Tensor | None = None
        self.arrived: Any = None
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        buffer = offloader.pool.take(num_bytes)
        self.give_back = weakref.finalize(self, offloader.pool.give_back, buffer)  # also when no backward runs
        self.host_tensor = buffer[:num_bytes].view(self.dtype).view(self.shape)
        self.copied_out = offloader.copy_out(run, tensor.contiguous(), self.host_tensor)

    def start(self) -> None:
        offloader = self.offloader
        offloader.release_all()
        self.tensor = offloader.make_room(self.shape, self.dtype)
        if offloader.in_stream is not None:
            offloader.in_stream.wait_event(self.copied_out)
        self.arrived = offloader.copy_in(self.host_tensor, self.tensor)
        if offloader.out_stream is not None:  # a later step's copy into this buffer must come after this one
            offloader.out_stream.wait_event(self.arrived)
        self.give_back()

    def finish(self) -> Tensor:
        tensor = _take(self)
        if self.arrived is not None:
            torch.cuda.current_stream(self.offloader.device).wait_event(self.arrived)
        return tensor


class SwappedTensor:
    """One tensor on a disk, on its way there and back in chunks, each by a thread of its own through that thread's
    buffer. The device's memory is free when the disk has all of it."""

    def __init__(self, offloader: Offloader, disk: DiskFile, run: int, tensor: Tensor) -> None:
        self.offloader = offloader
        self.disk = disk
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.num_bytes = math.prod(self.shape) * self.dtype.itemsize
        self.offset, self.size = self._reserve()
        self.tensor: Tensor | None = None
        self.reading: list[Future[None]] = []
        source, offset = tensor.contiguous().view(-1).view(torch.uint8), self.offset
        computed = offloader.record_event()

        def write(part: slice) -> None:
            buffer, size = offloader.get_buffer(), part.stop - part.start
            offloader.copy_chunk(offloader.out_stream, source[part], buffer[:size], computed)
            disk.write(view_memory(buffer[: round_to_blocks(size)]), offset + part.start)

        writing = [disk.start(partial(write, part)) for part in list_chunks(self.num_bytes)]
        offloader.writing.append((run, writing))
        self.give_back = weakref.finalize(self, disk.release, self.offset, self.size, writing)

    def start(self) -> None:
        offloader, disk, offset = self.offloader, self.disk, self.offset
        offloader.release_all()
        self.tensor = offloader.make_room(self.shape, self.dtype)
        target, allocated = self.tensor.view(-1).view(torch.uint8), offloader.record_event()

        def read(part: slice) -> None:
            buffer, size = offloader.get_buffer(), part.stop - part.start
            disk.read(view_memory(buffer[: round_to_blocks(size)]), offset + part.start)
            offloader.copy_chunk(offloader.in_stream, buffer[:size], target[part], allocated)

        self.reading = [disk.start(partial(read, part)) for part in list_chunks(self.num_bytes)]

    def finish(self) -> Tensor:
        for chunk in self.reading:
            chunk.result()
        self.give_back()
        return _take(self)

    def _reserve(self) -> tuple[int, int]:
        size = round_to_blocks(self.num_bytes)
        return self.disk.reserve(size), size


def view_memory(buffer: Tensor) -> memoryview:
    return memoryview(buffer.numpy())


def _take(item: OffloadedTensor | SwappedTensor) -> Tensor:
    tensor, item.tensor = item.tensor, None
    if tensor is None:
        raise RuntimeError("an offloaded tensor is fetched a second time: a layer's backward can run once")
    return tensor


class HostStorage:
    """What one run of one layer saves in host memory or on a disk. Fetching the first tensor starts the copies of the
    others, and of those of the run before it, whose backward is next."""

    def __init__(self, offloader: Offloader, previous: HostStorage | None, run: int, *, is_offloaded: bool) -> None:
        self.offloader = offloader
        self.previous = previous
        self.run = run
        self.is_offloaded = is_offloaded
        self.waiting: list[Waiting] = []

    def store(self, tensor: Tensor) -> Waiting | Tensor:
        """What another run has been given too, such as an embedding that all layers read, stays where it is."""
        was_given = self.offloader.remember(self.run, tensor)
        tensor = tensor.detach()
        with part_of_step("offload"):
            self.offloader.release(self.run - MAX_LEAVING + 1)
            if not self.is_offloaded or was_given or tensor.device != self.offloader.device or not tensor.numel():
                return tensor
            item = self.offloader.offload(self.run, tensor)
        self.waiting.append(item)
        return item

    def fetch(self, stored: Waiting | Tensor) -> Tensor:
        with part_of_step("offload"):
            self.start_copies()
            if self.previous is not None:
                self.previous.start_copies()
            return stored if isinstance(stored, Tensor) else stored.finish()

    def start_copies(self) -> None:
        """Starts the copies of all tensors that are still in host memory."""
        for item in self.waiting:
            item.start()
        self.waiting = []
