"""A run's checkpoints on disk: which there are, what is wrong with one, the newest valid, which go. No torch.

A folder counts by its name and its manifest; whatever a dead process left half done is recognised and put right.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ulysses_cli.plan.files.regular_files import open_regular
from ulysses_cli.run_folder.manifest import MANIFEST, STATE, load_manifest, load_state

WRITING, REPLACED, GONE, ASIDE = ".writing", ".replaced", ".gone", ".set-aside"
NAME = re.compile(r"step-(\d+)")
HASH_CHUNK_BYTES = 1 << 24
NUM_HASH_THREADS = 8


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or one that must not be read."""


def get_folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def get_step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Newest first; whole or not."""
    found = [path for path in get_folder(run_dir).glob("step-*") if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: -get_step(path))


def find_run_dir(path: Path) -> Path | None:
    """The run that a folder is, or whose checkpoints it holds; None for any other folder."""
    if (folder := get_folder(path)).is_dir():
        return folder.parent
    return path.parent if path.name == folder.name and list_checkpoints(path.parent) else None


def tidy_folder(run_dir: Path) -> None:
    """What a process left that died in the middle of a save, a replacement or a removal. On one rank, before a run."""
    for old in get_folder(run_dir).glob(f"step-*{REPLACED}"):
        final = old.with_name(old.name.removesuffix(REPLACED))
        if not final.exists():
            os.replace(old, final)
    for suffix in (WRITING, REPLACED, GONE):
        for stale in get_folder(run_dir).glob(f"step-*{suffix}"):
            shutil.rmtree(stale, ignore_errors=True)


def put_in_place(beside: Path, final: Path) -> None:
    """A checkpoint gets its name. An older one of that name stays until then."""
    replaced = final.with_name(f"{final.name}{REPLACED}")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(final, replaced)
    os.replace(beside, final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def prune_checkpoints(run_dir: Path, keep: int | None) -> None:
    """The newest `keep` stay. Called after a save, so that the newest one is valid."""
    for old in list_checkpoints(run_dir)[keep:] if keep is not None else []:
        gone = old.with_name(f"{old.name}{GONE}")
        shutil.rmtree(gone, ignore_errors=True)
        os.replace(old, gone)  # no checkpoint from here on, whatever happens
        shutil.rmtree(gone, ignore_errors=True)


def set_aside(run_dir: Path, path: Path, tell: Callable[[str], None]) -> None:
    """A run that goes on from `path` writes its own later checkpoints: older attempts at them, and damaged ones, must
    neither be found by the next resume nor push good ones out."""
    is_here = path.resolve().parent == get_folder(run_dir).resolve()
    last = get_step(path) if is_here else -1
    for other in list_checkpoints(run_dir):
        if get_step(other) > last:
            aside = other.with_name(f"{other.name}{ASIDE}")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(other, aside)
            tell(f"{other} is of another train_state than {path}: it is kept as {aside.name}, and not used")


def find_damage(path: Path, *, is_quick: bool = False) -> str:
    """What is wrong with a checkpoint, or ''. Reads every byte, or, when it must be quick, all but the shares."""
    try:
        entries = load_manifest(path)
    except FileNotFoundError:
        return f"{MANIFEST} is missing: it was never finished"
    except OSError as error:
        return f"{MANIFEST} cannot be read: {error.strerror or error}"
    except ValueError as error:
        return str(error)
    for name, entry in entries.items():
        file = path / name
        if file.is_symlink():
            return f"{MANIFEST} names {name}, which is outside the checkpoint"
        try:
            size = file.stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != entry.num_bytes:
            return f"{name} has {size:,} bytes instead of {entry.num_bytes:,}"
    hashed = {STATE: entries[STATE]} if is_quick else entries
    with ThreadPoolExecutor(NUM_HASH_THREADS) as pool:
        found = pool.map(_compare_hash, [path / name for name in hashed], [entry.sha256 for entry in hashed.values()])
        if problem := next(filter(None, found), ""):
            return problem
    try:
        world_size = load_state(path)["world_size"]
    except (OSError, ValueError) as error:
        return str(error)
    num_shares = len(entries) - 1
    return "" if world_size == num_shares else f"{MANIFEST} names the files of {num_shares} ranks, not of {world_size}"


def _compare_hash(file: Path, wanted: str) -> str:
    """'' when the file has this sha256."""
    digest, why = hashlib.sha256(), "sha256 differs"
    try:
        with open_regular(file) as stream:
            while chunk := stream.read(HASH_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        why = error.strerror or str(error)
    else:
        if digest.hexdigest() == wanted:
            return ""
    return f"{file.name} does not have the content that was written ({why})"


def list_shares(path: Path) -> list[Path]:
    """The ranks' files, as the manifest names them."""
    return [path / name for name in sorted(load_manifest(path)) if name != STATE]


def find_newest_valid(run_dir: Path, tell: Callable[[str], None]) -> Path | None:
    for path in list_checkpoints(run_dir):
        damage = find_damage(path)
        if not damage:
            return path
        tell(f"{path} is passed over: {damage}")
    return None


def choose_checkpoint(path: Path, tell: Callable[[str], None]) -> Path:
    """A whole checkpoint: the one that is named, or the newest of the run that is. Raises CheckpointError."""
    run_dir = find_run_dir(path)
    if run_dir is None:
        if damage := find_damage(path):
            raise CheckpointError(f"{path} cannot be exported: {damage}")
        return path
    if (newest := find_newest_valid(run_dir, tell)) is None:
        raise CheckpointError(f"{path} has no valid checkpoint")
    tell(f"the newest valid checkpoint is {newest}")
    return newest


def sync(path: Path) -> None:
    """A file's content is durable then; a rename is once its folder is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
