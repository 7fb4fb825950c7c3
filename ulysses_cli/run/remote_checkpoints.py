"""A run's checkpoints and model in a bucket: uploads them, fetches the newest valid one, deletes old ones. No torch.

The layout is that of the run folder. manifest.json is written last and deleted first: without it, objects of a
checkpoint are no checkpoint."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ulysses_cli.plan.files import remove_own
from ulysses_cli.plan.schedule import choose_best, name_measure
from ulysses_cli.plan.units import format_bytes, format_count
from ulysses_cli.run.bucket import Bucket, BucketError, count_bytes, each, watch_download
from ulysses_cli.run.checkpoints import (
    ASIDE,
    MANIFEST,
    MODEL_FACTS,
    STATE,
    WRITING,
    CheckpointError,
    ModelFacts,
    find_damage,
    find_newest_valid,
    get_folder,
    get_step,
    list_checkpoints,
    load_manifest,
    load_measured,
    load_state,
    name_own_measure,
    put_in_place,
    sync,
)

CHECKPOINTS, MODEL = "checkpoints", "model"
OBJECT = re.compile(rf"{CHECKPOINTS}/step-(\d+)/([^/]+)")
SENT = "sent"  # an object `sent-MACHINE-HASH` says that a machine's files are there
ALL = b"all"  # the content of that object; else what went wrong
NUM_HASH_CHARS = 16
POLL_SECONDS = 1.0
Report = Callable[[str], None]


def name_folder(step: int) -> str:
    return f"{CHECKPOINTS}/step-{step}"


def list_objects(bucket: Bucket) -> dict[int, set[str]]:
    """Names of the objects below each step's folder."""
    steps: dict[int, set[str]] = {}
    for name in bucket.list_names(CHECKPOINTS):
        if match := OBJECT.fullmatch(name):
            steps.setdefault(int(match[1]), set()).add(match[2])
    return steps


def list_remote_steps(bucket: Bucket) -> list[int]:
    """Newest first, valid or not; those that were never finished are left out."""
    return sorted((step for step, names in list_objects(bucket).items() if MANIFEST in names), reverse=True)


class Sending:
    """Files of one machine on their way into a bucket. `num_bytes` of `total_bytes` have arrived."""

    def __init__(
        self, bucket: Bucket, is_cancelled: Callable[[], bool] = lambda: False, poll_seconds: float = POLL_SECONDS
    ) -> None:
        self.bucket, self.is_cancelled, self.poll_seconds = bucket, is_cancelled, poll_seconds
        self.total_bytes = 0
        self.counts: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        return min(self.total_bytes, sum(list(self.counts.values())))

    def send_files(self, folder: Path, names: Sequence[str], to: str) -> None:
        from fsspec.callbacks import Callback

        self.total_bytes += sum((folder / name).stat().st_size for name in names)

        def send(name: str) -> None:
            def count(_: int | None, value: int, **__: Any) -> None:
                self.counts[name] = value

            self.bucket.put_file(folder / name, f"{to}/{name}", Callback(hooks={"count": count}))
            self.counts[name] = (folder / name).stat().st_size

        each(send, list(names), self.bucket.num_writers)

    def send_checkpoint(self, folder: Path, own: Sequence[str], machine: int, num_machines: int) -> None:
        """Uploads the files in `own`. The first machine's also waits for the others' and then writes the manifest."""
        to, manifest = name_folder(get_step(folder)), (folder / MANIFEST).read_bytes()
        attempt = hashlib.sha256(manifest).hexdigest()[:NUM_HASH_CHARS]
        if machine:
            answer = ALL
            try:
                self.send_files(folder, own, to)
            except (BucketError, OSError) as error:
                answer = str(error).encode()
                raise
            finally:
                self.bucket.put_bytes(answer, f"{to}/{SENT}-{machine}-{attempt}")
            return
        self.bucket.delete(f"{to}/{MANIFEST}")  # of an earlier attempt at this step
        self.send_files(folder, [*own, STATE], to)
        marks = [f"{to}/{SENT}-{other}-{attempt}" for other in range(1, num_machines)]
        for mark in marks:
            self._wait_for(mark)
        self.bucket.put_file(folder / MANIFEST, f"{to}/{MANIFEST}")
        for mark in marks:
            self.bucket.delete(mark)

    def _wait_for(self, mark: str) -> None:
        while not self.is_cancelled():
            try:
                answer = self.bucket.read(mark)
            except FileNotFoundError:
                time.sleep(self.poll_seconds)
                continue
            if answer != ALL:
                self.bucket.delete(mark)
                raise BucketError(answer.decode())
            return
        raise BucketError(f"{self.bucket.address}: was given up")

    def send_model(self, folder: Path) -> None:
        """Files of an older model are deleted. The file that says from which step the model is comes last."""
        names = [file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*")) if file.is_file()]
        self.bucket.delete(f"{MODEL}/{MODEL_FACTS}")
        older = [name for name in self.bucket.list_names(MODEL) if name.removeprefix(f"{MODEL}/") not in names]
        each(self.bucket.delete, older, self.bucket.num_writers)
        self.send_files(folder, [name for name in names if name != MODEL_FACTS], MODEL)
        self.send_files(folder, [MODEL_FACTS], MODEL)


def read_remote_model_steps(bucket: Bucket) -> tuple[int, int] | None:
    """As read_model_steps."""
    try:
        return ModelFacts.model_validate_json(bucket.read(f"{MODEL}/{MODEL_FACTS}")).steps
    except (FileNotFoundError, ValueError):
        return None


def has_checkpoint(bucket: Bucket, folder: Path) -> bool:
    """Whether exactly this checkpoint is complete in the bucket."""
    try:
        return bucket.read(f"{name_folder(get_step(folder))}/{MANIFEST}") == (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        return False


def prune_remote(bucket: Bucket, newest: int, keep: int | None, losses: Mapping[int, float] | None = None) -> None:
    """Deletes what is older than `newest`, which was just uploaded: all but the newest `keep` and the one with the
    lowest of `losses`, and what was never finished. Checkpoints that were set aside stay."""
    objects = list_objects(bucket)
    complete = sorted((step for step, names in objects.items() if MANIFEST in names and step <= newest), reverse=True)
    kept = {*(complete if keep is None else complete[:keep]), choose_best(losses or {}, complete)}
    for step, names in objects.items():
        if step < newest and step not in kept and f"{MANIFEST}{ASIDE}" not in names:
            for name in sorted(names, key=lambda name: name != MANIFEST):
                bucket.delete(f"{name_folder(step)}/{name}")


def set_remote_aside(bucket: Bucket, last: int, report: Report) -> None:
    """Checkpoints later than step `last`, from which a run goes on, are of other attempts: they stay in the bucket and
    are not used."""
    for step in list_remote_steps(bucket):
        if step > last:
            name = f"{name_folder(step)}/{MANIFEST}"
            bucket.put_bytes(bucket.read(name), f"{name}{ASIDE}")
            bucket.delete(name)
            report(f"{bucket.address}/{name_folder(step)} is of an earlier attempt: it is kept there, and not used")


def fetch_checkpoint(bucket: Bucket, step: int, run_dir: Path, report: Report = lambda _: None) -> str:
    """Downloads a checkpoint to its place in the run folder, or returns what is wrong with it. `report` is told how far
    it has come."""
    final = get_folder(run_dir) / f"step-{step}"
    folder = final.with_name(f"{final.name}{WRITING}")
    remove_own(folder)
    folder.mkdir(parents=True)
    try:
        damage = _fetch_files(bucket, step, folder, report) or find_damage(folder)
        if not damage:
            for file in folder.iterdir():
                sync(file)
            sync(folder)
            put_in_place(folder, final)
        return damage
    finally:
        remove_own(folder)


def _fetch_files(bucket: Bucket, step: int, folder: Path, report: Report) -> str:
    def fetch(name: str) -> None:
        try:
            bucket.get_file(f"{name_folder(step)}/{name}", folder / name)
        except FileNotFoundError:
            (folder / name).unlink(missing_ok=True)  # find_damage says that it is missing

    fetch(MANIFEST)
    try:
        entries = load_manifest(folder)
    except (OSError, ValueError) as error:
        return str(error)
    needed, free = sum(entry.num_bytes for entry in entries.values()), shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"{bucket.address}/{name_folder(step)} has {format_bytes(needed)}, and {folder.parent} only "
            f"{format_bytes(free)} free: make room, or choose another run.output_dir"
        )
    total = count_bytes(folder) + needed  # the manifest is here
    with watch_download(f"{bucket.address}/{name_folder(step)}", folder, total, report):
        each(fetch, list(entries))
    return ""


def bring_newest(bucket: Bucket, run_dir: Path, report: Report) -> None:
    """Makes the newest valid checkpoint of run folder and bucket the newest valid one of the run folder, and brings the
    best one that the run had kept. Raises CheckpointError where the bucket has checkpoints, and neither has a valid
    one."""
    if remote := list_remote_steps(bucket):
        newest = _bring_first_valid(bucket, run_dir, remote, report)
        _bring_best(bucket, run_dir, remote, newest, report)


def _bring_first_valid(bucket: Bucket, run_dir: Path, remote: Sequence[int], report: Report) -> Path:
    newest = find_newest_valid(run_dir, lambda _: None)  # the ranks report what they pass over
    local = get_step(newest) if newest is not None else -1
    for step in remote:
        if newest is not None and step <= local:
            return newest
        address = f"{bucket.address}/{name_folder(step)}"
        report(f"downloading {address}")
        if not (damage := fetch_checkpoint(bucket, step, run_dir, report)):
            return get_folder(run_dir) / f"step-{step}"
        report(f"{address} is skipped: {damage}")
    if newest is None:
        raise CheckpointError(f"of {format_count(len(remote), 'checkpoint')} in {bucket.address} none is valid")
    return newest


def _bring_best(bucket: Bucket, run_dir: Path, remote: Sequence[int], newest: Path, report: Report) -> None:
    """The best checkpoint before `newest`, where the run keeps it."""
    state = load_state(newest)
    if state["recipe"]["run"].get("keep_best") is None:
        return
    local = {get_step(path) for path in list_checkpoints(run_dir)}
    measure = name_own_measure(state)
    best = choose_best(load_measured(state)[measure], [step for step in {*remote, *local} if step <= get_step(newest)])
    if best is None or best in local:
        return
    address = f"{bucket.address}/{name_folder(best)}"
    report(f"downloading {address}, the best by {name_measure(measure)}")
    if damage := fetch_checkpoint(bucket, best, run_dir, report):
        report(f"{address} is skipped: {damage}")


def try_out(bucket: Bucket) -> str:
    """Writes, reads and deletes an object below the address. Returns what does not work, or ''."""
    name, content = f"ulysses-{os.getpid()}-{os.urandom(4).hex()}", os.urandom(64)
    doing = "written to"
    try:
        bucket.put_bytes(content, name)
        doing = "read"
        if bucket.read(name) != content:
            return "it returns other bytes than were written"
        doing = "deleted from"
        bucket.delete(name)
        if bucket.is_there(name):
            return "it does not delete what is deleted"
    except (FileNotFoundError, BucketError) as error:
        text = str(error).removeprefix(f"{bucket.address}: ") or "not found"
        return f"it cannot be {doing}: {text}"
    return ""
