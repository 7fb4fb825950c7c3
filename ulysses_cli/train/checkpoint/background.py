"""Writes a checkpoint while steps continue: states are copied to the host, a thread does the rest.

No collective happens in the thread. Each rank writes a small file when its share is written; rank 0's thread waits for
all of them and gives the checkpoint its final name. Before that no reader sees the checkpoint.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ulysses_cli.plan.files.regular_files import remove_own
from ulysses_cli.plan.files.whole_files import write_whole
from ulysses_cli.train.checkpoint.format import CheckpointContext, Entries, Share, finish_folder, write_share
from ulysses_cli.train.tensor_file import LazyTensor, get_tensor

WRITTEN = ".written"
POLL_SECONDS = 0.02


@dataclass(eq=False)
class HostCopies:
    """Buffers for one share, made once; pinned where a device fills them."""

    buffers: dict[str, Tensor] = field(default_factory=dict)

    def copy(self, share: Share) -> Share:
        """Returns when the engine may change its states again."""
        copies: list[tuple[str, Tensor | LazyTensor]] = []
        for name, source in share.tensors:
            tensor = get_tensor(source)
            buffer = self.buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self.buffers[name] = buffer
            copies.append((name, buffer.copy_(tensor, non_blocking=True)))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return Share(copies, share.facts)


class BackgroundSave:
    """One save in progress. `problem` is '' until something has gone wrong."""

    def __init__(
        self,
        context: CheckpointContext,
        folder: Path,
        step: int,
        share: Share,
        state: Mapping[str, Any],
        prune: Callable[[], None],
    ) -> None:
        self.context, self.folder, self.step, self.prune = context, folder, step, prune
        self.problem, self.seconds = "", 0.0
        self.is_cancelled = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(share, state), name="save")  # ends before the process
        self.thread.start()

    @property
    def is_done(self) -> bool:
        return not self.thread.is_alive()

    def wait(self) -> str:
        """Collective over all ranks. Returns what went wrong on any of them, or ''."""
        is_first = self.context.rank == 0
        if not is_first:
            self.thread.join()
        problem = next((text for text in self.context.gather("" if is_first else self.problem) if text), "")
        if is_first:
            if problem:
                self.is_cancelled.set()
            self.thread.join()
        problem = problem or str(self.context.gather(self.problem)[0])
        if problem and is_first:  # not before: others may still be writing in it
            remove_own(self.folder)
        return problem

    def _run(self, share: Share, state: Mapping[str, Any]) -> None:
        started = time.perf_counter()
        try:
            entries = write_share(self.folder, self.context.rank, share)
            if self.context.rank == 0:
                self._finish(entries, state)
            else:
                write_whole(self.folder / f"{self.context.rank}{WRITTEN}", json.dumps(entries))
        except OSError as error:
            self.problem = f"rank {self.context.rank}: {error.strerror or error} ({self.folder})"
        self.seconds = time.perf_counter() - started

    def _finish(self, entries: Entries, state: Mapping[str, Any]) -> None:
        for rank in range(1, self.context.world_size):
            file = self.folder / f"{rank}{WRITTEN}"
            while not file.exists():
                if self.is_cancelled.wait(POLL_SECONDS):
                    return
            entries |= json.loads(file.read_text(encoding="utf-8"))
            file.unlink()
        finish_folder(self.folder, state, entries)
        self.prune()
