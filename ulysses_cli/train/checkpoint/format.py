"""The checkpoint format: saves a checkpoint, also while steps continue, and loads it on any number of ranks.

step-N/ holds rank-R.safetensors (this rank's shares of float32 weights and moments, no gathering), state.json, and,
written last, manifest.json with sizes and hashes. The folder gets its final name only when it is complete. No
collective happens in the thread that writes. run/checkpoints.py manages folders."""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ulysses_cli.plan.files import open_own, remove_own, write_whole
from ulysses_cli.plan.models.model_files import read_metadata
from ulysses_cli.run.checkpoints import (
    FORMAT,
    MANIFEST,
    STATE,
    WRITING,
    CheckpointError,
    get_folder,
    list_shares,
    load_state,
    name_share,
    put_in_place,
    sync,
)
from ulysses_cli.train.optimizer.shards import Shard, list_shards
from ulysses_cli.train.optimizer.states import (
    KINDS,
    Flat,
    is_on_disk,
    list_flats,
    reset_moments,
    set_step_count,
    walk_chunks,
    write_weight,
)
from ulysses_cli.train.processes.watchdog import MOVED
from ulysses_cli.train.record import mask_facts
from ulysses_cli.train.tensor_file import WORDS, LazyTensor, get_tensor, is_finite, write_tensors

Entries = dict[str, dict[str, Any]]  # by file name: bytes and sha256


@dataclass(frozen=True, eq=False)
class CheckpointContext:
    """The engine's module and optimizer on this rank, and the collectives of a save."""

    module: nn.Module
    optimizer: Any
    rank: int
    world_size: int
    wait: Callable[[], None]  # a barrier of all ranks
    gather: Callable[[Any], list[Any]]  # every rank's plain value; collective over all ranks
    disk_owners: tuple[int, ...] = ()  # for each rank, the first one on the same disk; empty: all share one

    @property
    def owns_disk(self) -> bool:
        """This rank makes folders and gives names on its disk."""
        return self.rank == (self.disk_owners[self.rank] if self.disk_owners else 0)

    @property
    def is_spread(self) -> bool:
        """A checkpoint's files are on several disks; the manifest is on all of them."""
        return len(set(self.disk_owners)) > 1


@dataclass(frozen=True)
class Share:
    """What one rank writes. `tensors` are views of the engine's, copies of them on the host, or made when written."""

    tensors: list[tuple[str, Tensor | LazyTensor]]
    facts: dict[str, str]


def take_share(context: CheckpointContext) -> Share:
    shards = list_shards(context.module, context.optimizer, context.rank)
    facts = {"shards": json.dumps([[s.name, list(s.shape), s.start, s.numel] for s in shards])}
    return Share(list(_walk_tensors(context, shards)), {**facts, "rng": json.dumps(_read_rng())})


def open_folder(context: CheckpointContext, run_dir: Path, step: int) -> Path:
    """Collective over all ranks. Returns the folder to write in, which is renamed to its final name later."""
    folder = get_folder(run_dir) / f"step-{step}{WRITING}"
    problem = ""
    if context.owns_disk:
        try:
            remove_own(folder)
            folder.mkdir(parents=True)
        except OSError as error:
            problem = f"{error.strerror or error} ({folder})"
    problem = next(filter(None, context.gather(problem)), "")
    if problem:
        raise CheckpointError(f"checkpoint step-{step} was not written: {problem}")
    return folder


def write_share(folder: Path, rank: int, share: Share) -> Entries:
    file = folder / name_share(rank)
    digest = write_tensors(file, share.tensors, share.facts)
    return {file.name: {"bytes": file.stat().st_size, "sha256": digest}}


def finish_folder(folder: Path, state: Mapping[str, Any], entries: Entries) -> Path:
    """Runs on one rank when all have written: writes the manifest last, then renames the folder."""
    text = json.dumps(mask_facts(dict(state)), indent=1, default=str)
    _write_text(folder / STATE, text)
    files = entries | {STATE: {"bytes": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()}}
    _write_text(folder / MANIFEST, json.dumps({"format": FORMAT, "files": files}, indent=1))
    sync(folder)
    final = folder.with_name(folder.name.removesuffix(WRITING))
    put_in_place(folder, final)
    return final


def save_checkpoint(context: CheckpointContext, run_dir: Path, step: int, state: Mapping[str, Any]) -> Path:
    """Collective over all ranks. Each writes its own file; rank 0 the rest. A failure on one rank fails on all."""
    folder = open_folder(context, run_dir, step)
    problem, entries = "", {}
    try:
        entries = write_share(folder, context.rank, take_share(context))
        if context.is_spread:
            entries = {name: entry | {"machine": socket.gethostname()} for name, entry in entries.items()}
    except OSError as error:
        problem = f"rank {context.rank}: {error.strerror or error} ({folder})"
    if context.is_spread:  # hours differ from rank to rank; the manifest is the same on all disks
        state = context.gather(dict(state))[0]
    results = context.gather((problem, entries))
    problem = next((rank_problem for rank_problem, _ in results if rank_problem), "")
    if not problem and context.owns_disk:
        try:
            finish_folder(folder, state, {name: entry for _, part in results for name, entry in part.items()})
        except OSError as error:
            problem = f"{error.strerror or error} ({folder})"
    problem = next(filter(None, context.gather(problem)), "")
    if problem:
        if context.owns_disk:
            remove_own(folder)
        raise CheckpointError(f"checkpoint step-{step} was not written: {problem}")
    return folder.with_name(f"step-{step}")


def _write_text(file: Path, text: str) -> None:
    with open(file, "w", encoding="utf-8", opener=open_own) as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _walk_tensors(context: CheckpointContext, shards: list[Shard]) -> Iterator[tuple[str, Tensor | LazyTensor]]:
    flats = list_flats(context.optimizer)
    for shard in shards:
        for kind in ("master", *flats[shard.flat].moments):
            yield f"{shard.name}|{kind}", flats[shard.flat].read(kind, shard.offset, shard.numel)
    yield "rng|torch", torch.get_rng_state()
    if torch.cuda.is_available():
        yield "rng|cuda", torch.cuda.get_rng_state()


def _read_rng() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return {"python": [version, list(numbers), gauss], "numpy": [str(kind), np.asarray(keys).tolist(), *rest]}


Count = Annotated[int, Field(ge=0, lt=1 << 63)]
_PIECES = TypeAdapter(list[tuple[str, list[Count], Count, Count]])  # name, shape, first element, number of elements


@dataclass(frozen=True)
class TensorSource:
    """The file that holds elements [start, start + numel) of a parameter."""

    file: Path
    start: int
    numel: int


def index_sources(path: Path) -> tuple[dict[str, list[TensorSource]], dict[str, tuple[int, ...]]]:
    """Every parameter's pieces in a checkpoint, and its shape."""
    sources: dict[str, list[TensorSource]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in list_shares(path):
        try:
            pieces = _PIECES.validate_json(read_metadata(file)["shards"])
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{file} has no valid list of the parameters it holds: {error}") from None
        for name, shape, start, numel in pieces:
            sources.setdefault(name, []).append(TensorSource(file, start, numel))
            shapes[name] = tuple(shape)
    return sources, shapes


@lru_cache(
    maxsize=4
)  # a file's header names every tensor: reading it for each would take time quadratic in their number
def _open(file: Path, identity: tuple[int, ...]) -> Any:
    """`identity`: a file that was replaced is another one."""
    return safe_open(file, "pt")


def _identify(file: Path) -> tuple[int, ...]:
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_range(sources: list[TensorSource], key: str, start: int, numel: int) -> Tensor:
    """Reads elements [start, start + numel) of a flattened parameter from the files that hold them."""
    out = torch.empty(numel)
    filled = 0
    for source in sources:
        low, high = max(start, source.start), min(start + numel, source.start + source.numel)
        if low < high:
            try:
                saved = _open(source.file, _identify(source.file)).get_slice(key)
            except SafetensorError:
                raise CheckpointError(
                    f"{source.file} has no {key}: another train.optim wrote it, which has no such moment; start from "
                    "its weights alone, with run.start_moments: false"
                ) from None
            part = saved[low - source.start : high - source.start]
            if not is_finite(part):
                raise CheckpointError(f"{source.file} holds {WORDS} in {key}: use an older checkpoint")
            out[low - start : high - start] = part
            filled += high - low
            MOVED.add(part.nbytes)
    if filled != numel:
        raise CheckpointError(f"{key} is incomplete: {filled} of {numel} elements")
    return out


def load_checkpoint(context: CheckpointContext, path: Path) -> dict[str, Any]:
    """Collective over all ranks. Returns the saved state. A run of any layout, stage or offload may have written it."""
    state = _load_tensors(context, path, KINDS)
    set_step_count(context.optimizer, int(state["optimizer_steps"]))
    if state["world_size"] == context.world_size:
        _set_rng(path / name_share(context.rank))
    context.wait()
    return state


def load_start(context: CheckpointContext, path: Path, *, with_moments: bool) -> dict[str, Any]:
    """Collective over all ranks. Loads weights, and the optimizer's moments or zeros, and nothing of the run's course.
    Returns the saved state."""
    state = _load_tensors(context, path, KINDS if with_moments else KINDS[:1])
    if with_moments:
        set_step_count(context.optimizer, int(state["optimizer_steps"]))
    else:
        reset_moments(context.optimizer)
    context.wait()
    return state


def _load_tensors(context: CheckpointContext, path: Path, kinds: Sequence[str]) -> dict[str, Any]:
    sources, shapes = index_sources(path)
    shards = list_shards(context.module, context.optimizer, context.rank)
    for shard in shards:
        if shapes.get(shard.name) != shard.shape:
            raise CheckpointError(f"{path} holds {shard.name} as {shapes.get(shard.name)}, the model has {shard.shape}")
    for index, flat in enumerate(list_flats(context.optimizer)):
        _fill(flat, [shard for shard in shards if shard.flat == index], sources, kinds)
    _refresh_weights(context, sources)
    return load_state(path)


def _fill(flat: Flat, shards: list[Shard], sources: dict[str, list[TensorSource]], kinds: Sequence[str]) -> None:
    """Writes in chunks: quantization needs whole blocks, a disk whole ranges, and memory has no room for all at
    once."""
    for start, numel in walk_chunks(flat):
        for kind in (kind for kind in kinds if kind in ("master", *flat.moments)):
            values = torch.zeros(numel)
            for shard in shards:
                low, high = max(start, shard.offset), min(start + numel, shard.offset + shard.numel)
                if low < high:
                    begin = shard.start + low - shard.offset
                    part = read_range(sources[shard.name], f"{shard.name}|{kind}", begin, high - low)
                    values[low - start : high - start] = part
            flat.write(kind, start, values)


def _refresh_weights(context: CheckpointContext, sources: dict[str, list[TensorSource]]) -> None:
    """Copies the float32 weights into those that layers compute with."""
    flats = list_flats(context.optimizer)
    shards = {shard.name: shard for shard in list_shards(context.module, context.optimizer, context.rank)}
    for name, parameter in context.module.named_parameters():
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_tensor"):
            if name in shards:
                shard = shards[name]
                values = get_tensor(flats[shard.flat].read("master", shard.offset, shard.numel))
                if is_on_disk(parameter):
                    write_weight(parameter, values)
                else:
                    parameter.ds_tensor.data.view(-1).narrow(0, 0, shard.numel).copy_(values)
        else:
            whole = read_range(sources[name], f"{name}|master", 0, parameter.numel())
            parameter.data.copy_(whole.view(parameter.shape))
    small = getattr(context.optimizer, "persistent_parameters", [])
    if small:  # whole on every rank: released and gathered again
        small[0].partition(small)
        small[0].all_gather(small)
    if hasattr(context.optimizer, "invalidate_secondary_tensor"):
        context.optimizer.invalidate_secondary_tensor()


def _set_rng(file: Path) -> None:
    saved = json.loads(read_metadata(file)["rng"])
    version, numbers, gauss = saved["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = saved["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    with safe_open(file, "pt") as opened:
        torch.set_rng_state(opened.get_tensor("rng|torch"))
        if "rng|cuda" in opened.keys() and torch.cuda.is_available():  # noqa: SIM118 - not a mapping
            torch.cuda.set_rng_state(opened.get_tensor("rng|cuda"))


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
        self.context = context
        self.folder = folder
        self.step = step
        self.prune = prune
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
