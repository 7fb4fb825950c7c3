"""Writes safetensors files one tensor at a time, hashed and synced: host memory holds one tensor, not all. Checks
that tensors are finite: one NaN in a weight spoils all that is computed from it, hours before anyone sees it.

The format is the library's own; files are read back with the library. A check is one pass, without a copy."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import cached_file

from ulysses_cli.plan.files import open_own
from ulysses_cli.plan.models.model_files import list_weight_files, read_header
from ulysses_cli.train.processes.watchdog import MOVED

WORDS = "NaN or infinity"


def is_finite(tensor: Tensor) -> bool:
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor.detach()))


def find_nonfinite(module: nn.Module) -> str:
    """The first parameter whose part on this rank holds NaN or infinity, or ''. Parts on a disk are not checked."""
    return next((name for name, part in _walk_parts(module) if not is_finite(part)), "")


def _walk_parts(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters():
        shard = getattr(parameter, "ds_tensor", None)
        yield name, parameter.data if shard is None else shard.data


def find_file(path: str, name: str, revision: str | None = None) -> Path | None:
    """The weight file that holds a tensor of this name. None where the files use another name."""
    try:
        folder = Path(str(cached_file(os.path.expanduser(path), "config.json", revision=revision))).parent
        return next((file for file in list_weight_files(folder) if name in read_header(file)), None)
    except (OSError, ValueError):
        return None


DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
SYNC_BYTES = 1 << 26
MAX_UNSYNCED_BYTES = 1 << 30  # a sync shows no progress before its end, which must not be far on a slow disk
MAX_CHUNKS = 2


@dataclass(frozen=True)
class LazyTensor:
    """A float32 vector that is made when it is written, since memory has no room for all at once."""

    numel: int
    make: Callable[[], Tensor]


def get_tensor(tensor: Tensor | LazyTensor) -> Tensor:
    return tensor.make() if isinstance(tensor, LazyTensor) else tensor


def write_tensors(file: Path, tensors: Iterable[tuple[str, Tensor | LazyTensor]], metadata: Mapping[str, str]) -> str:
    """Writes and syncs the file. Returns its sha256. Tensors may be views on any device."""
    listed = list(tensors)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in listed:
        if isinstance(tensor, LazyTensor):
            dtype, shape, size = torch.float32, [tensor.numel], 4 * tensor.numel
        else:
            dtype, shape, size = tensor.dtype, list(tensor.shape), tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    digest = hashlib.sha256()
    # Hashing, writing and syncing run in parallel: all three release the interpreter's lock.
    with (
        open(file, "wb", opener=open_own) as stream,
        ThreadPoolExecutor(1) as hashing,
        ThreadPoolExecutor(1) as syncing,
    ):
        hashed: deque[Future[None]] = deque()
        synced, num_unsynced = syncing.submit(_do_nothing), 0
        for chunk in chain((struct.pack("<Q", len(text)), text), _walk_bytes(listed)):
            hashed.append(hashing.submit(digest.update, chunk))
            stream.write(chunk)
            MOVED.add(len(chunk))
            num_unsynced += len(chunk)
            if num_unsynced >= MAX_UNSYNCED_BYTES or (num_unsynced >= SYNC_BYTES and synced.done()):
                synced.result()
                MOVED.add(num_unsynced)
                synced, num_unsynced = syncing.submit(os.fdatasync, stream.fileno()), 0
            if len(hashed) > MAX_CHUNKS:  # each is held in memory until then
                hashed.popleft().result()
        for future in (*hashed, synced):
            future.result()
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest()


def _do_nothing() -> None: ...


def _walk_bytes(tensors: Iterable[tuple[str, Tensor | LazyTensor]]) -> Iterator[Any]:
    for _, tensor in tensors:
        view = memoryview(get_tensor(tensor).detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        for start in range(0, len(view), SYNC_BYTES):
            yield view[start : start + SYNC_BYTES]
