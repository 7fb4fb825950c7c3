"""Stands in for tiles, chunks of heads and the file on a disk, in runs that compute no value. Tiles are alike, and so
are chunks: the first, one more and the last show what all of them take. The file (train/memory/offload.py) counts
bytes and writes nothing: a tensor that leaves stays on the device until somebody waits for its last chunk, the latest
time at which a run frees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ulysses_cli.plan.levers import SWAP_CHUNK_BYTES, SWAP_THREADS
from ulysses_cli.train.attention import ulysses
from ulysses_cli.train.attention.heads import HeadPlan
from ulysses_cli.train.memory import offload, tiled_loss, tiled_mlp, tiling
from ulysses_cli.train.memory.offload import Extents

MAX_TILES = 3


def keep_few_tiles() -> None:
    """Replaces what cuts tokens into tiles and heads into chunks, wherever this package does."""
    ulysses.plan_heads = _keep_few_chunks(ulysses.plan_heads)  # type: ignore[assignment, attr-defined]
    offload.list_chunks = _keep_few(offload.list_chunks)
    for tiled in (tiled_mlp, tiling):
        tiled.split_tokens = _keep_few(tiled.split_tokens)  # type: ignore[attr-defined]
    tiled_loss.TiledLoss.walk_tiles = _keep_few(tiled_loss.TiledLoss.walk_tiles)  # type: ignore[method-assign]
    tiled_loss.TiledLoss.compute_losses_in_tiles = _compute_losses  # type: ignore[method-assign]


T = TypeVar("T")


def _keep_few(split: Callable[..., list[slice]]) -> Callable[..., list[slice]]:
    return lambda *args: _choose_few(split(*args))


def _keep_few_chunks(plan_heads: Callable[..., HeadPlan]) -> Callable[..., HeadPlan]:
    def few(*args: Any) -> HeadPlan:
        plan = plan_heads(*args)
        return replace(plan, chunks=tuple(_choose_few(plan.chunks)))

    return few


def _choose_few(parts: Sequence[T]) -> list[T]:
    return [*parts] if len(parts) <= MAX_TILES else [*parts[: MAX_TILES - 1], parts[-1]]


@torch.no_grad()
def _compute_losses(
    loss: Any, tokens: Tensor, labels: Tensor, places: Any, rule: Any, *, is_measured: bool = False
) -> Tensor:
    """One loss per target, though only a few tiles are computed."""
    found = map(places.find, loss.walk_tiles(len(places)))
    losses = [loss.compute_tile(tokens[each], labels[each], rule, is_measured=is_measured) for each in found]
    return losses[0].new_empty((*losses[0].shape[:-1], len(places)))


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
    from ulysses_cli.train.memory import offload
    from ulysses_cli.train.model import loss_model

    def get_buffer(self: Any) -> Tensor:
        if not hasattr(self, "buffers"):
            sizes = [SWAP_CHUNK_BYTES] * SWAP_THREADS
            self.buffers = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        buffer: Tensor = self.buffers[0]
        return buffer

    def view_memory(buffer: Tensor) -> memoryview:
        """A tensor without data has none."""
        return memoryview(b"")

    loss_model.open_disk = lambda *_: file  # type: ignore[assignment]
    offload.Offloader.get_buffer = get_buffer  # type: ignore[method-assign]
    offload.view_memory = view_memory
