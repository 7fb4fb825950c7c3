"""Brings a checkpoint's files together where each machine has only what its own ranks wrote, and finds out which
ranks write on the same disk.

Collectives depend on what all ranks have gathered, never on what one disk does: a rank whose disk fails goes on
taking part, and the failure is gathered at the end."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from ulysses_cli.plan.files import open_own, remove_own, write_whole
from ulysses_cli.run.checkpoints import (
    ASIDE,
    MANIFEST,
    find_damage,
    get_folder,
    get_step,
    list_checkpoints,
    load_manifest,
    sync,
)
from ulysses_cli.train.processes.consistency import gather_values
from ulysses_cli.train.processes.watchdog import MOVED


@dataclass(frozen=True)
class Disks:
    """For each rank, the first rank on the same disk: its owner, which makes folders and gives names there."""

    owners: tuple[int, ...]

    @property
    def is_shared(self) -> bool:
        return len(set(self.owners)) == 1

    def describe(self, setting: str, consequence: str) -> str:
        if self.is_shared:
            return f"{setting} is shared by all machines"
        return f"{setting} is on {len(set(self.owners))} disks that machines do not share: {consequence}"


def find_disks(folder: Path, rank: int, gather: Callable[[Any], list[Any]]) -> Disks:
    """Collective over all ranks. The first rank of each machine writes a token, and all look for all tokens. Raises
    OSError on all ranks where one machine cannot write."""
    token, problem = "", ""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        token = f".disk-{rank}-{secrets.token_hex(8)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / token).touch()
        except OSError as error:
            problem = f"rank {rank}: {folder}: {error.strerror or error}"
    tokens: list[tuple[str, str]] = gather((token, problem))
    is_seen = [bool(name) and os.path.lexists(folder / name) for name, _ in tokens]
    owners = gather(is_seen.index(True) if any(is_seen) else rank)
    if token:
        with suppress(OSError):  # one rank must not fail alone; the first file that is written fails on all
            (folder / token).unlink()
    if found := next((text for _, text in tokens if text), ""):
        raise OSError(found)
    return Disks(tuple(owners))


CHUNK_BYTES = 64 << 20
PART = ".part"


@dataclass(frozen=True)
class Holding:
    """What one disk has of a checkpoint. `writers`: the machine that wrote each file, as the manifest says."""

    manifest: bytes
    sizes: dict[str, int]
    writers: dict[str, str]
    present: frozenset[str]


def find_holding(folder: Path) -> Holding | None:
    """None where the disk has no readable manifest."""
    try:
        entries, manifest = load_manifest(folder), (folder / MANIFEST).read_bytes()
    except (OSError, ValueError):
        return None
    sizes = {name: entry.num_bytes for name, entry in entries.items()}
    writers = {name: str((entry.model_extra or {}).get("machine", "")) for name, entry in entries.items()}
    present = frozenset(name for name, size in sizes.items() if _has_size(folder / name, size))
    return Holding(manifest, sizes, writers, present)


def _has_size(file: Path, num_bytes: int) -> bool:
    try:
        return file.stat().st_size == num_bytes
    except OSError:
        return False


class Collector:
    """Collects checkpoints over a group of all ranks. `owners`: for each rank, the first one on its disk."""

    def __init__(self, owners: tuple[int, ...], rank: int, group: dist.ProcessGroup) -> None:
        self.rank, self.group = rank, group
        self.disks = sorted(set(owners))
        self.is_owner = rank in self.disks

    def gather(self, value: Any) -> list[Any]:
        return gather_values(value, self.group)

    def collect_newest(self, run_dir: Path, report: Callable[[str], None]) -> None:
        """Collective over all ranks. The newest checkpoint of which all files are valid somewhere is then whole on
        every disk. `report` gets a line for each newer one."""
        own = [get_step(path) for path in list_checkpoints(run_dir)] if self.is_owner else []
        steps = sorted({step for listed in self.gather(own) for step in listed}, reverse=True)
        for step in steps:
            path = get_folder(run_dir) / f"step-{step}"
            if not (problem := self.collect(path, self.disks)):
                return
            report(f"{path} is skipped: {problem}")

    def collect(self, folder: Path, receivers: Collection[int]) -> str:
        """Collective over all ranks. The checkpoint is then whole on the disks of `receivers`. Returns what is wrong,
        the same on all ranks, or ''."""
        holdings = self.gather(find_holding(folder) if self.is_owner else None)
        first = next((holding for holding in holdings if holding is not None), None)
        if first is None:
            return f"{MANIFEST} is missing on all machines: it was never finished"
        same = {rank: held for rank, held in enumerate(holdings) if held and held.manifest == first.manifest}
        holders = {name: [rank for rank, held in same.items() if name in held.present] for name in first.sizes}
        if missing := [name for name, ranks in holders.items() if not ranks]:
            wrote = first.writers[missing[0]]
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            where = f"; {wrote} wrote it on a disk of its own" if wrote else ""
            return f"{missing[0]}{more} is missing on all machines{where}"
        problem = self._open(folder, is_new=self.rank in receivers and self.rank not in same)
        for name, ranks in holders.items():
            if lacking := [rank for rank in receivers if rank not in ranks]:
                problem = self._send(folder / name, first.sizes[name], ranks[0], lacking) or problem
        if self.rank in receivers:
            try:
                if self.rank not in same and not problem:
                    write_whole(folder / MANIFEST, first.manifest)
                    sync(folder)
                problem = problem or find_damage(folder)
            except OSError as error:
                problem = error.strerror or str(error)
        problems = self.gather(f"{socket.gethostname()}: {problem}" if problem else "")
        return next(filter(None, problems), "")

    def _open(self, folder: Path, *, is_new: bool) -> str:
        """Makes room for a checkpoint that this disk has nothing of, or only another attempt at it."""
        try:
            if is_new and folder.exists():
                aside = folder.with_name(f"{folder.name}{ASIDE}")
                remove_own(aside)
                os.replace(folder, aside)
            if is_new:
                folder.mkdir(parents=True)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _send(self, file: Path, num_bytes: int, sender: int, receivers: Collection[int]) -> str:
        """Collective over all ranks. Returns what is wrong on this rank."""
        problem, stream, part = "", None, file.with_name(f"{file.name}{PART}")
        buffer = torch.empty(min(CHUNK_BYTES, num_bytes), dtype=torch.uint8)
        try:
            if self.rank == sender or self.rank in receivers:
                path, mode = (file, "rb") if self.rank == sender else (part, "wb")
                stream = open(path, mode, opener=open_own)  # noqa: SIM115 - closed below
        except OSError as error:
            problem = error.strerror or str(error)
        for start in range(0, num_bytes, CHUNK_BYTES):
            chunk = buffer[: min(CHUNK_BYTES, num_bytes - start)]
            if self.rank == sender:
                problem = problem or self._move(stream, chunk, is_read=True)
            dist.broadcast(chunk, sender, group=self.group)  # every rank is here: sizes are the manifest's
            if self.rank != sender:
                problem = problem or self._move(stream, chunk, is_read=False)
            MOVED.add(len(chunk))
        if stream is not None:
            try:
                stream.close()
                if self.rank in receivers:
                    sync(part)
                    os.replace(part, file)
            except OSError as error:
                problem = problem or error.strerror or str(error)
        return problem

    @staticmethod
    def _move(stream: IO[bytes] | None, chunk: torch.Tensor, *, is_read: bool) -> str:
        try:
            if stream is not None and is_read:
                stream.readinto(chunk.numpy())  # type: ignore[attr-defined]
            elif stream is not None:
                stream.write(chunk.numpy())
        except OSError as error:
            return error.strerror or str(error)
        return ""
