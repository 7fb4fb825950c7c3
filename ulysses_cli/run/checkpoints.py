"""A run's checkpoints on disk: reads their manifest.json and state.json, lists and checks them, finds the newest
valid one, deletes old ones. No torch.

A folder is a checkpoint by its name and its manifest. Any other content of these files raises a ValueError that says
what is wrong; no other code may read them unchecked. Repairs what a killed process left unfinished."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ulysses_cli.plan.files import open_regular, read_regular, remove_own
from ulysses_cli.plan.rules.files import CHECKPOINT_MANIFEST
from ulysses_cli.plan.schedule import LOSS_MEASURE, MEASURES, Measured, choose_best, describe_measure, name_measure
from ulysses_cli.run.records import read_measured

MANIFEST, STATE = CHECKPOINT_MANIFEST, "state.json"
FORMAT = 1  # of a checkpoint
SHARE = re.compile(r"rank-(\d{5,})\.safetensors", re.ASCII)
MODEL_FACTS = "ulysses.json"  # in an exported model
MAX_BYTES = 16 << 20  # a manifest names a file for each rank; a state contains a recipe
SHOWN_CHARS = 120
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Several = Annotated[int, Field(ge=1, lt=1 << 31)]


class _Part(BaseModel):
    """Strict types; keys that other versions add are kept."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")


class FileEntry(_Part):
    num_bytes: Count = Field(alias="bytes")
    sha256: str


class Manifest(_Part):
    """Sizes and hashes of the checkpoint's files, by name."""

    format: Count
    files: dict[str, FileEntry]


class _Train(_Part):
    per_device_train_batch_size: Several
    gradient_accumulation_steps: Several


class _Run(_Part):
    seed: int


class _Recipe(_Part):
    model: dict[str, Any]
    data: dict[str, Any]
    train: _Train
    run: _Run
    lora: dict[str, Any] | None = None


class State(_Part):
    """A run's progress, and its recipe."""

    world_size: Several
    step: Count
    position: Count
    optimizer_steps: Count
    bad_steps: Count
    hours: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    rows_per_step: Several
    data: str
    recipe: _Recipe
    eval_losses: dict[str, float | None] = {}
    eval_scores: dict[str, Annotated[float, Field(allow_inf_nan=False)] | None] = {}
    eval_accuracies: dict[str, float | None] = {}
    eval_margins: dict[str, float | None] = {}


def name_share(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def load_manifest(path: Path) -> dict[str, FileEntry]:
    """Size and hash by name: of state.json and of the files of ranks 0 to n - 1, no more and no less."""
    manifest = _load(path / MANIFEST, Manifest)
    if manifest.format != FORMAT:
        raise ValueError(f"{MANIFEST} has format {manifest.format}, and this version of ulysses reads format {FORMAT}")
    entries = manifest.files
    for name in entries:
        if name != STATE and not SHARE.fullmatch(name):
            raise ValueError(f"{MANIFEST} names {shorten(name)}, which is outside the checkpoint")
    if STATE not in entries:
        raise ValueError(f"{MANIFEST} does not name {STATE}")
    missing = next((name for rank in range(len(entries) - 1) if (name := name_share(rank)) not in entries), None)
    if missing:
        raise ValueError(f"{MANIFEST} does not name {missing}")
    return entries


class ModelFacts(_Part):
    """The checkpoint that an exported model was made from, and the step that its run had done by then."""

    step: Count
    run_step: Count | None = None  # left out: the same

    @property
    def steps(self) -> tuple[int, int]:
        return self.step, self.step if self.run_step is None else self.run_step


def read_model_steps(model: Path) -> tuple[int, int] | None:
    """(step of the weights, step that the run had done) of an exported model. None: there is no model, or this tool did
    not export it."""
    try:
        return ModelFacts.model_validate_json(read_regular(model / MODEL_FACTS, MAX_BYTES)).steps
    except (OSError, ValueError):
        return None


def load_state(path: Path) -> dict[str, Any]:
    """The checked content of state.json, as plain data."""
    return _load(path / STATE, State).model_dump()


def load_measured(state: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Returns what a checkpoint's state holds of each measure, by step; infinity stands for what is not finite."""
    return {
        name: {
            int(step): math.inf if value is None else measure.order(value)
            for step, value in state.get(measure.state_key, {}).items()
            if step.isdecimal()
        }
        for name, measure in MEASURES.items()
    }


def name_own_measure(state: Mapping[str, Any]) -> str:
    """What the run of a checkpoint goes by."""
    return str(state["recipe"]["run"].get("keep_best") or LOSS_MEASURE)


def dump_measured(measured: Measured) -> dict[str, dict[str, float | None]]:
    """Returns what a checkpoint's state holds; JSON has no infinity."""
    return {
        MEASURES[name].state_key: {
            str(step): MEASURES[name].order(value) if math.isfinite(value) else None for step, value in values.items()
        }
        for name, values in measured.items()
    }


_M = TypeVar("_M", bound=BaseModel)


def _load(file: Path, model: type[_M]) -> _M:
    if file.is_symlink():
        raise ValueError(f"{file.name} is a link, which leads outside the checkpoint")
    try:
        return model.model_validate_json(read_regular(file, MAX_BYTES))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"{file.name} cannot be read: {shorten((f'{place}: ' if place else '') + first['msg'])}"
        ) from None


def shorten(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."


WRITING = ".writing"
REPLACED = ".replaced"
GONE = ".gone"
ASIDE = ".set-aside"
EVALUATIONS = "evaluations"  # what `ulysses evaluate` found on the run's model and checkpoints, for its report
NAME = re.compile(r"step-(\d+)")
HASH_CHUNK_BYTES = 1 << 24
NUM_HASH_THREADS = 8


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or must not be read."""


def get_folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def get_step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Newest first, valid or not."""
    paths = [path for path in get_folder(run_dir).glob("step-*") if NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: -get_step(path))


def find_run_dir(path: Path) -> Path | None:
    """The run directory that `path` is, or whose `checkpoints` folder it is; None for any other folder."""
    if (folder := get_folder(path)).is_dir():
        return folder.parent
    return path.parent if path.name == folder.name and list_checkpoints(path.parent) else None


def tidy_folder(run_dir: Path) -> None:
    """Repairs what a process left that was killed during a save, a replacement or a removal. On one rank, before a
    run."""
    for old in get_folder(run_dir).glob(f"step-*{REPLACED}"):
        final = old.with_name(old.name.removesuffix(REPLACED))
        if not final.exists():
            os.replace(old, final)
    for suffix in (WRITING, REPLACED, GONE):
        for stale in get_folder(run_dir).glob(f"step-*{suffix}"):
            remove_own(stale)


def put_in_place(temporary: Path, final: Path) -> None:
    """Renames a finished checkpoint to its final name. An older one of that name stays until then."""
    replaced = final.with_name(f"{final.name}{REPLACED}")
    if final.exists():
        remove_own(replaced)
        os.replace(final, replaced)
    os.replace(temporary, final)
    sync(final.parent)
    remove_own(replaced)


def prune_checkpoints(run_dir: Path, keep: int | None, losses: Mapping[int, float] | None = None) -> None:
    """Deletes all but the newest `keep` and the one with the lowest of `losses`. Called after a save, so that the
    newest one is valid."""
    paths = list_checkpoints(run_dir)
    best = choose_best(losses or {}, [get_step(path) for path in paths])
    for old in paths[keep:] if keep is not None else []:
        if get_step(old) == best:
            continue
        gone = old.with_name(f"{old.name}{GONE}")
        remove_own(gone)
        os.replace(old, gone)  # from here on it does not count as a checkpoint, even if the deletion is interrupted
        remove_own(gone)


def set_aside(run_dir: Path, path: Path, report: Callable[[str], None]) -> None:
    """Renames checkpoints later than `path`, from which a run resumes. The run writes its own later checkpoints: older
    attempts at them, and damaged ones, must neither be resumed from nor cause good ones to be deleted."""
    is_own = path.resolve().parent == get_folder(run_dir).resolve()
    last = get_step(path) if is_own else -1
    for other in list_checkpoints(run_dir):
        if get_step(other) > last:
            aside = other.with_name(f"{other.name}{ASIDE}")
            remove_own(aside)
            os.replace(other, aside)
            report(f"{other} is later than {path}, where the run goes on: it is kept as {aside.name}, and not used")


def find_damage(path: Path, *, is_quick: bool = False) -> str:
    """What is wrong with a checkpoint, or ''. Reads every byte; if `is_quick`, all but the ranks' files."""
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
        hashes = [entry.sha256 for entry in hashed.values()]
        problems = pool.map(_compare_hash, [path / name for name in hashed], hashes)
        if problem := next(filter(None, problems), ""):
            return problem
    try:
        world_size = load_state(path)["world_size"]
    except (OSError, ValueError) as error:
        return str(error)
    num_shares = len(entries) - 1
    return "" if world_size == num_shares else f"{MANIFEST} names the files of {num_shares} ranks, not of {world_size}"


def _compare_hash(file: Path, expected: str) -> str:
    """'' if the file has this sha256, else what is wrong."""
    digest, why = hashlib.sha256(), "sha256 differs"
    try:
        with open_regular(file) as stream:
            while chunk := stream.read(HASH_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        why = error.strerror or str(error)
    else:
        if digest.hexdigest() == expected:
            return ""
    return f"{file.name} does not have the content that was written ({why})"


def list_shares(path: Path) -> list[Path]:
    """The ranks' files, as the manifest names them."""
    return [path / name for name in sorted(load_manifest(path)) if name != STATE]


def find_newest_valid(run_dir: Path, report: Callable[[str], None], *, is_quick: bool = False) -> Path | None:
    """`report` gets a line for each newer checkpoint that is damaged. `is_quick`: by the sizes of the ranks' files."""
    for path in list_checkpoints(run_dir):
        damage = find_damage(path, is_quick=is_quick)
        if not damage:
            return path
        report(f"{path} is skipped: {damage}")
    return None


def choose_checkpoint(path: Path, report: Callable[[str], None], *, wants_best: bool = False) -> Path:
    """A valid checkpoint: `path` itself, or the newest one if `path` is a run, or the one of that run with the lowest
    evaluation loss. Raises CheckpointError."""
    run_dir = find_run_dir(path)
    if run_dir is None:
        if wants_best:
            raise CheckpointError(f"{path} is one checkpoint: name a run's output_dir to choose its best")
        if damage := find_damage(path):
            raise CheckpointError(f"{path} is no whole checkpoint: {damage}")
        return path
    if (newest := find_newest_valid(run_dir, report)) is None:
        raise CheckpointError(f"{path} has no valid checkpoint")
    if wants_best:
        return _choose_best(run_dir, newest, report)
    report(f"the newest valid checkpoint is {newest}")
    return newest


def choose_last(path: Path, count: int, report: Callable[[str], None]) -> list[Path]:
    """The newest `count` valid checkpoints of a run, newest first. Raises CheckpointError."""
    if (run_dir := find_run_dir(path)) is None:
        raise CheckpointError(f"{path} is no run: --last takes a run's output_dir")
    found: list[Path] = []
    for each in list_checkpoints(run_dir):
        if damage := find_damage(each):
            report(f"{each} is skipped: {damage}")
        else:
            found.append(each)
        if len(found) == count:
            report(f"the last valid checkpoints are {', '.join(one.name for one in reversed(found))}")
            return found
    kept = "run.save_total_limit says how many a run keeps, run.save_steps how often it saves"
    raise CheckpointError(f"{path} has {len(found)} valid checkpoints, not {count}\n\nhint: {kept}")


def collect_measured(run_dir: Path, path: Path) -> dict[str, dict[int, float]]:
    """By measure and step up to a checkpoint of this run: what its state holds, and what was recorded since."""
    since = read_measured(run_dir, get_step(path))
    return {name: values | since[name] for name, values in load_measured(load_state(path)).items()}


def _choose_best(run_dir: Path, newest: Path, report: Callable[[str], None]) -> Path:
    paths = {get_step(path): path for path in list_checkpoints(run_dir)}
    try:
        measure = name_own_measure(load_state(newest))
        losses = collect_measured(run_dir, newest)[measure]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{newest} cannot be exported: {error}") from error
    while (best := choose_best(losses, paths)) is not None:
        if not (damage := find_damage(paths[best])):
            lowest = choose_best(losses, losses)
            if lowest != best:
                report(f"step {lowest} was the best by {name_measure(measure)}, but its checkpoint was not kept")
            report(f"the best checkpoint is {paths[best]}, with {describe_measure(measure, losses[best])}")
            return paths[best]
        report(f"{paths.pop(best)} is skipped: {damage}")
    raise CheckpointError(
        f"{run_dir} has no valid checkpoint with an evaluation: set run.keep_best, or name a checkpoint"
    )


def sync(path: Path) -> None:
    """Makes a file's content durable; for a folder, the renames in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
