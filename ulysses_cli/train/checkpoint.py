"""The checkpoint's directory format: save, verify, find, load on any number of ranks. Nothing else knows it.

step-N/rank-R.safetensors (this rank's shares of float32 weights and moments, no gathering), state.json, and last of all
manifest.json with sizes and hashes. The folder has its final name only when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ulysses_cli.train.shards import MOMENTS, Shard, get_masters, get_state, list_shards, set_step_count
from ulysses_cli.train.tensor_file import read_metadata, sync_folder, write_tensors

MANIFEST, STATE = "manifest.json", "state.json"
NAME = re.compile(r"step-(\d+)")
KINDS = ("master", *MOMENTS)
HASH_CHUNK_BYTES = 1 << 24


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or one that must not be read."""


@dataclass(frozen=True, eq=False)
class Owner:
    """Whose state it is: the engine's module and optimizer on this rank, and how to wait for the others."""

    module: nn.Module
    optimizer: Any
    rank: int
    world_size: int
    wait: Callable[[], None]  # a barrier of all ranks
    tell_all: Callable[[Any], list[Any]]  # everyone's plain value


def save_checkpoint(owner: Owner, run_dir: Path, step: int, state: Mapping[str, Any]) -> Path:
    """Collective over all ranks. Each writes its own file; rank 0 the rest. A failure on one is a failure on all."""
    final = run_dir / "checkpoints" / f"step-{step}"
    beside = final.with_name(f"{final.name}.writing")
    problem, entry = "", {}
    try:
        if owner.rank == 0:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
        owner.wait()
        file = beside / f"rank-{owner.rank:05d}.safetensors"
        shards = list_shards(owner.module, owner.optimizer, owner.rank)
        facts = {"shards": json.dumps([[s.name, list(s.shape), s.start, s.numel] for s in shards])}
        digest = write_tensors(file, _walk_tensors(owner, shards), {**facts, "rng": json.dumps(_read_rng())})
        entry = {file.name: {"bytes": file.stat().st_size, "sha256": digest}}
    except OSError as error:
        problem = f"rank {owner.rank}: {error.strerror or error} ({beside})"
    results = owner.tell_all((problem, entry))
    problems = [found for found, _ in results if found]
    if not problems and owner.rank == 0:
        try:
            _finish(beside, final, state, results)
        except OSError as error:
            problems = [f"{error.strerror or error} ({beside})"]
    problems = owner.tell_all(problems)[0]
    if problems:
        if owner.rank == 0:
            shutil.rmtree(beside, ignore_errors=True)
        raise CheckpointError(f"checkpoint step-{step} was not written: {problems[0]}")
    return final


def _finish(beside: Path, final: Path, state: Mapping[str, Any], results: list[tuple[str, dict[str, Any]]]) -> None:
    files = {name: entry for _, entries in results for name, entry in entries.items()}
    text = json.dumps(state, indent=1, default=str)
    _write_text(beside / STATE, text)
    files[STATE] = {"bytes": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    _write_text(beside / MANIFEST, json.dumps({"format": 1, "files": files}, indent=1))
    sync_folder(beside)
    if final.exists():
        shutil.rmtree(final)
    os.replace(beside, final)
    sync_folder(final.parent)


def _write_text(file: Path, text: str) -> None:
    with open(file, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _walk_tensors(owner: Owner, shards: list[Shard]) -> Iterator[tuple[str, Tensor]]:
    masters = get_masters(owner.optimizer)
    for shard in shards:
        for kind in KINDS:
            yield f"{shard.name}|{kind}", _view(owner.optimizer, masters, shard, kind)
    yield "rng|torch", torch.get_rng_state()
    if torch.cuda.is_available():
        yield "rng|cuda", torch.cuda.get_rng_state()


def _view(optimizer: Any, masters: list[Tensor], shard: Shard, kind: str) -> Tensor:
    master = masters[shard.flat]
    whole = master.data if kind == "master" else get_state(optimizer, master)[kind]
    return whole.view(-1).narrow(0, shard.offset, shard.numel)


def _read_rng() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    return {"python": [version, list(numbers), gauss]}


def prune_checkpoints(run_dir: Path, keep: int | None) -> None:
    """On rank 0. The newest `keep` stay; what a dead run left half written goes."""
    folder = run_dir / "checkpoints"
    for stale in folder.glob("*.writing"):
        shutil.rmtree(stale, ignore_errors=True)
    for old in list_checkpoints(run_dir)[keep:] if keep is not None else []:
        os.replace(old / MANIFEST, old / f"{MANIFEST}.gone")  # invalid from here on, whatever happens
        shutil.rmtree(old, ignore_errors=True)


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Newest first; whole or not."""
    found = [path for path in (run_dir / "checkpoints").glob("step-*") if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: -int(path.name.removeprefix("step-")))


def find_damage(path: Path) -> str:
    """What is wrong with a checkpoint, or ''. Reads every byte."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
    except FileNotFoundError:
        return f"{MANIFEST} is missing: it was never finished"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    for name, entry in files.items():
        if Path(name).name != name:
            return f"{MANIFEST} names {name}, which is outside the checkpoint"
        file = path / name
        try:
            size = file.stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != entry["bytes"]:
            return f"{name} has {size:,} bytes instead of {entry['bytes']:,}"
        if _hash_file(file) != entry["sha256"]:
            return f"{name} does not have the content that was written (sha256 differs)"
    return ""


def _hash_file(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while chunk := stream.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def find_newest_valid(run_dir: Path, tell: Callable[[str], None]) -> Path | None:
    for path in list_checkpoints(run_dir):
        damage = find_damage(path)
        if not damage:
            return path
        tell(f"{path} is passed over: {damage}")
    return None


def load_state(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    return state


@dataclass(frozen=True)
class Source:
    """Where elements [start, start + numel) of a parameter lie."""

    file: Path
    start: int
    numel: int


def index_sources(path: Path) -> tuple[dict[str, list[Source]], dict[str, tuple[int, ...]]]:
    """Every parameter's pieces in a checkpoint, and its shape."""
    sources: dict[str, list[Source]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(path.glob("rank-*.safetensors")):
        for name, shape, start, numel in json.loads(read_metadata(file)["shards"]):
            sources.setdefault(name, []).append(Source(file, start, numel))
            shapes[name] = tuple(shape)
    return sources, shapes


def read_range(sources: list[Source], key: str, start: int, numel: int) -> Tensor:
    """Elements [start, start + numel) of a flattened parameter, from whichever files hold them."""
    out = torch.empty(numel)
    filled = 0
    for source in sources:
        low, high = max(start, source.start), min(start + numel, source.start + source.numel)
        if low < high:
            with safe_open(source.file, "pt") as opened:
                part = opened.get_slice(key)[low - source.start : high - source.start]
            out[low - start : high - start] = part
            filled += high - low
    if filled != numel:
        raise CheckpointError(f"{key} is incomplete: {filled} of {numel} elements")
    return out


def load_checkpoint(owner: Owner, path: Path) -> dict[str, Any]:
    """Collective over all ranks -> the saved state. Any layout, stage or offload may have written it."""
    sources, shapes = index_sources(path)
    masters = get_masters(owner.optimizer)
    for shard in list_shards(owner.module, owner.optimizer, owner.rank):
        if shapes.get(shard.name) != shard.shape:
            raise CheckpointError(f"{path} holds {shard.name} as {shapes.get(shard.name)}, the model has {shard.shape}")
        for kind in KINDS:
            part = read_range(sources[shard.name], f"{shard.name}|{kind}", shard.start, shard.numel)
            _view(owner.optimizer, masters, shard, kind).copy_(part)
    state = load_state(path)
    set_step_count(owner.optimizer, int(state["optimizer_steps"]))
    _refresh_weights(owner, sources)
    if state["world_size"] == owner.world_size:
        _set_rng(path / f"rank-{owner.rank:05d}.safetensors")
    owner.wait()
    return state


def _refresh_weights(owner: Owner, sources: dict[str, list[Source]]) -> None:
    """The weights that layers compute with follow the float32 ones."""
    masters = get_masters(owner.optimizer)
    shards = {shard.name: shard for shard in list_shards(owner.module, owner.optimizer, owner.rank)}
    for name, parameter in owner.module.named_parameters():
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_tensor"):
            if name in shards:
                shard = shards[name]
                held = parameter.ds_tensor.data.view(-1).narrow(0, 0, shard.numel)
                held.copy_(_view(owner.optimizer, masters, shard, "master"))
        else:
            whole = read_range(sources[name], f"{name}|master", 0, parameter.numel())
            parameter.data.copy_(whole.view(parameter.shape))
    small = getattr(owner.optimizer, "persistent_parameters", [])
    if small:  # kept whole on every rank: let go and fetched anew
        small[0].partition(small)
        small[0].all_gather(small)
    if hasattr(owner.optimizer, "invalidate_secondary_tensor"):
        owner.optimizer.invalidate_secondary_tensor()


def _set_rng(file: Path) -> None:
    version, numbers, gauss = json.loads(read_metadata(file)["rng"])["python"]
    random.setstate((version, tuple(numbers), gauss))
    with safe_open(file, "pt") as opened:
        torch.set_rng_state(opened.get_tensor("rng|torch"))
        if "rng|cuda" in opened.keys() and torch.cuda.is_available():  # noqa: SIM118 - not a mapping
            torch.cuda.set_rng_state(opened.get_tensor("rng|cuda"))
