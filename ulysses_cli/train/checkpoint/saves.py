"""Decides when a run writes and reads checkpoints, and what their state.json says. Uploads checkpoints and the model to
run.checkpoint_uri while steps go on; the layout there is in run/remote_checkpoints.py. format.py holds the format.
A thread of each machine's first rank uploads what the ranks of that machine wrote. No collective happens in a
thread."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ulysses_cli.plan.schedule import choose_best, describe_measure, name_measure
from ulysses_cli.plan.units import format_bytes
from ulysses_cli.run.bucket import REPORT_SECONDS, Bucket, BucketError, format_transfer
from ulysses_cli.run.checkpoints import (
    MANIFEST,
    CheckpointError,
    choose_checkpoint,
    dump_measured,
    find_damage,
    get_folder,
    get_step,
    list_checkpoints,
    load_manifest,
    name_share,
    prune_checkpoints,
    set_aside,
)
from ulysses_cli.run.remote_checkpoints import (
    CHECKPOINTS,
    MODEL,
    Sending,
    has_checkpoint,
    prune_remote,
    set_remote_aside,
)
from ulysses_cli.run.resume import ResumePoint
from ulysses_cli.train.checkpoint.collection import Collector
from ulysses_cli.train.checkpoint.format import (
    BackgroundSave,
    CheckpointContext,
    HostCopies,
    load_checkpoint,
    load_start,
    open_folder,
    save_checkpoint,
    take_share,
)
from ulysses_cli.train.loop import StepResult, TrainState
from ulysses_cli.train.metrics import BadSteps
from ulysses_cli.train.processes.device import StartError
from ulysses_cli.train.record import Record

WAIT_SECONDS = 1.0
POLL_SECONDS = 0.05


class NoUploads:
    """The uploads of a run without run.checkpoint_uri."""

    def begin(self, last_step: int) -> None:
        """Collective over all ranks. The run goes on from `last_step`, or starts anew where that is -1."""

    def start(self, folder: Path, save: BackgroundSave | None = None) -> None:
        """Called on every rank when a checkpoint is in its place, or while `save` is still writing it."""

    def start_missing(self, folder: Path) -> None:
        """Called on every rank with a checkpoint that an earlier process wrote: uploads it unless it is there."""

    def start_model(self, folder: Path) -> None:
        """Called on every rank when the model is complete on the first one's disk."""

    def wait(self, show: Callable[[str], None], is_over: Callable[[], bool] = lambda: False) -> str:
        """Collective over all ranks. Returns when no upload is in progress: what went wrong on any machine, or ''. When
        `is_over` of any rank says so it returns before; `is_behind` is True then."""
        return ""

    @property
    def is_behind(self) -> bool:
        """The same on all ranks, and False after a `wait` that was not cut short."""
        return False

    def cancel(self) -> None:
        """The checkpoint that is waited for will not be written."""

    def read_problem(self) -> str:
        """What has gone wrong on this rank so far; no collective."""
        return ""


class Uploads(NoUploads):
    """At most one upload is in progress; one that starts after a `wait` that was cut short follows it. `machines` names
    each rank's machine. `losses`: evaluation losses by step, as the run learns them; the checkpoint with the lowest one
    is kept."""

    def __init__(
        self, bucket: Bucket, context: CheckpointContext, machines: Sequence[str], keep: int | None,
        report: Callable[[str], None], losses: Mapping[int, float] | None = None,
    ) -> None:  # fmt: skip
        self.bucket = bucket
        self.context = context
        self.keep = keep
        self.report = report
        self.losses = {} if losses is None else losses
        numbers = {name: number for number, name in enumerate(dict.fromkeys(machines))}
        self.machine_of = [numbers[name] for name in machines]
        self.machine = self.machine_of[context.rank]
        self.is_sender = self.machine_of.index(self.machine) == context.rank
        self.thread: threading.Thread | None = None
        self.is_cancelled = threading.Event()
        self.sending = Sending(bucket)
        self.problem = ""
        self.what = ""
        self.seconds = 0.0
        self.began = 0.0
        self.following: tuple[str, Callable[[], None]] | None = None

    @property
    def is_behind(self) -> bool:
        return bool(self.what)

    def begin(self, last_step: int) -> None:
        problem = ""
        if self.context.rank == 0:
            try:
                set_remote_aside(self.bucket, last_step, self.report)
            except (BucketError, OSError) as error:
                problem = str(error)
        if problem := self.context.gather(problem)[0]:
            raise CheckpointError(f"run.checkpoint_uri: {problem}")

    def start(self, folder: Path, save: BackgroundSave | None = None) -> None:
        def send() -> None:
            if self._is_complete(folder, save):
                self._send_checkpoint(folder)

        self._start(f"{CHECKPOINTS}/{folder.name}", send)

    def start_missing(self, folder: Path) -> None:
        def send() -> None:
            if not has_checkpoint(self.bucket, folder):
                self._send_checkpoint(folder)

        self._start(f"{CHECKPOINTS}/{folder.name}", send)

    def start_model(self, folder: Path) -> None:
        def send() -> None:
            if self.context.rank == 0:
                self.sending.send_model(folder)

        self._start(MODEL, send)

    def wait(self, show: Callable[[str], None], is_over: Callable[[], bool] = lambda: False) -> str:
        problem = self._wait_for_one(show, is_over)
        while self.following is not None and not self.is_behind:
            following, self.following = self.following, None
            self._start(*following)
            problem = self._wait_for_one(show, is_over) or problem
        return problem

    def _wait_for_one(self, show: Callable[[str], None], is_over: Callable[[], bool]) -> str:
        started = time.monotonic()
        while True:
            is_running = self.thread is not None and self.thread.is_alive()
            counted = self.sending.num_bytes, self.sending.total_bytes
            answers = self.context.gather((is_running, is_over(), self.problem, *counted))
            running, over, problems, counts, totals = zip(*answers, strict=True)
            problem = next(filter(None, problems), "")
            if not any(running):
                break
            if any(over):
                return ""
            if problem:
                self.is_cancelled.set()
            if self.thread is not None:
                self.thread.join(WAIT_SECONDS)
            done = format_transfer(sum(counts), sum(totals), time.monotonic() - self.began)
            show(f"{self.what}: {done}")
        if self.what and not problem:
            waited = f", {time.monotonic() - started:.1f} s of it waited for" if self.context.rank == 0 else ""
            self.report(f"uploaded {self.bucket.address}/{self.what} in {self.seconds:.1f} s{waited}")
        what = self.what
        self.what = ""
        self.thread = None
        self.problem = ""
        return f"{self.bucket.address}/{what} was not uploaded: {problem}" if problem else ""

    def cancel(self) -> None:
        self.is_cancelled.set()

    def read_problem(self) -> str:
        return self.problem

    def _start(self, what: str, send: Callable[[], None]) -> None:
        if self.is_behind:
            self.following = what, send
            return
        self.what, self.problem, self.began = what, "", time.monotonic()
        self.is_cancelled = threading.Event()
        self.sending = Sending(self.bucket, self.is_cancelled.is_set)
        if not self.is_sender:
            return

        def run() -> None:
            started = time.monotonic()
            try:
                send()
            except (BucketError, OSError, ValueError) as error:
                self.problem = str(error) or type(error).__name__
            self.seconds = time.monotonic() - started

        # a rank that fails does not wait for it: what it uploads is on its disk
        self.thread = threading.Thread(target=run, name="upload", daemon=True)
        self.thread.start()

    def _is_complete(self, folder: Path, save: BackgroundSave | None) -> bool:
        """Waits until the checkpoint has its name. Returns False where it will never have it."""
        if save is None:
            return True
        save.thread.join()
        while not (folder / MANIFEST).exists():
            if save.problem or self.is_cancelled.wait(POLL_SECONDS):
                return False
        return True

    def _send_checkpoint(self, folder: Path) -> None:
        shares = {rank: name_share(rank) for rank in range(len(load_manifest(folder)) - 1)}
        own = [name for rank, name in shares.items() if self._find_machine(rank) == self.machine]
        self.sending.send_checkpoint(folder, own, self.machine, len(set(self.machine_of)))
        if self.context.rank == 0:
            prune_remote(self.bucket, int(folder.name.removeprefix("step-")), self.keep, self.losses)

    def _find_machine(self, rank: int) -> int:
        """Another layout may have written the share."""
        return self.machine_of[rank] if rank < len(self.machine_of) else 0


def open_uploads(
    address: str | None, context: CheckpointContext, keep: int | None, report: Callable[[str], None],
    losses: Mapping[int, float] | None,
) -> NoUploads:  # fmt: skip
    """Collective over all ranks where there is an `address`: run.checkpoint_uri."""
    if address is None:
        return NoUploads()
    machines = context.gather(os.environ.get("GROUP_RANK", "0"))
    return Uploads(Bucket(address), context, machines, keep, report, losses)


STATE_BYTES = 12  # per trained parameter: its float32 value and two moments
HEADER_SHARE = 1.01
SAVING = "saving"  # a phase


@dataclass(frozen=True)
class SavePolicy:
    """How a run saves. `total_limit`: checkpoints to keep; None keeps all. `continue_on_error`: a failed save is only a
    warning, except the last one. `keeps_best`: the one with the lowest evaluation loss is kept too. `stop_seconds`:
    what a signal leaves to a save."""

    total_limit: int | None = None
    is_async: bool = False
    continue_on_error: bool = False
    keeps_best: bool = False
    stop_seconds: float = float("inf")


class Saves:
    """The checkpoints of one run. `facts` are the parts of a checkpoint's state that never change."""

    def __init__(
        self,
        context: CheckpointContext,
        record: Record,
        policy: SavePolicy,
        facts: Mapping[str, Any],
        bad_steps: BadSteps,
        uploads: NoUploads | None = None,
        is_hurried: Callable[[], bool] = lambda: False,
    ) -> None:
        self.context = context
        self.record = record
        self.policy = policy
        self.facts = facts
        self.bad_steps = bad_steps
        self.is_hurried, self.is_slowness_told = is_hurried, False
        self.last_step: int | None = None
        self.uploads = uploads or NoUploads()
        self.pending: BackgroundSave | None = None
        self.copies = HostCopies()

    def save(self, state: TrainState) -> None:
        """A post-step hook. Collective over all ranks. A failed earlier save does not prevent this one."""
        if state.step in (self.last_step, self.pending.step if self.pending is not None else None):
            return
        state.phase = SAVING
        save = self._start if self.policy.is_async else self._save
        for part in (self.wait_for_pending, partial(self.wait_for_upload, state), partial(save, state)):
            self._or_continue(part)

    def save_last(self, state: TrainState) -> None:
        """Collective over all ranks. When it returns, the present step is on disk."""
        state.phase = SAVING
        for part in (self.wait_for_pending, partial(self.wait_for_upload, state)):
            try:
                part()
            except CheckpointError as error:
                self.record.warn(str(error))
        self._save(state)

    def finish_uploads(self, state: TrainState, model: Path | None = None) -> None:
        """Collective over all ranks. When it returns, the last checkpoint, and the model if there is one, are where
        run.checkpoint_uri says, or a warning says why not: after a signal there may be no time for it."""
        self._or_continue(partial(self.wait_for_upload, state, self.is_hurried))
        if self.uploads.is_behind:
            self.record.warn(
                f"{self.get_last_path()} is not uploaded yet: after a signal there is no time to wait for it; "
                "--resume auto on this machine uploads it, another machine finds an earlier one"
            )
        if model is not None:
            self.uploads.start_model(model)
            self._or_continue(partial(self.wait_for_upload, state))

    def _or_continue(self, part: Callable[[], None]) -> None:
        try:
            part()
        except CheckpointError as error:
            if not self.policy.continue_on_error:
                raise
            self.record.warn(f"{error}; the run continues (run.on_save_error: continue)")

    def check_pending(self, state: TrainState, _: StepResult) -> None:
        """A post-step hook while saves or uploads are in the background: on this rank, without a collective."""
        if (problem := self.uploads.read_problem()) and not self.policy.continue_on_error:
            raise CheckpointError(f"run.checkpoint_uri: a checkpoint was not uploaded: {problem}")
        pending = self.pending
        if pending is not None and pending.is_done and pending.problem and not self.policy.continue_on_error:
            raise CheckpointError(f"checkpoint step-{pending.step} was not written: {pending.problem}")

    def wait_for_pending(self) -> None:
        """Collective over all ranks. When it returns, a save in progress is durable; raises if the save failed."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        if problem := pending.wait():
            self.uploads.cancel()
            raise CheckpointError(f"checkpoint step-{pending.step} was not written: {problem}")
        self.last_step = pending.step
        self._report_saved(self.get_last_path(), pending.seconds)

    def wait_for_upload(self, state: TrainState, is_over: Callable[[], bool] | None = None) -> None:
        """Collective over all ranks. When it returns, an upload in progress is complete; raises if it failed. Does not
        go on waiting when a rank's `is_over` says so, by default when the run is asked to stop: a save is due then."""
        told = float("-inf")

        def show(progress: str) -> None:
            nonlocal told
            if time.monotonic() - told >= REPORT_SECONDS:
                told = time.monotonic()
                self.record.report(f"waiting for the upload of {progress}")
            state.phase = f"{SAVING}: {progress}"  # the watchdog sees that it changes

        state.phase = SAVING
        problem = self.uploads.wait(show, is_over or state.stop.is_asked)
        state.phase = SAVING
        if problem:
            raise CheckpointError(problem)

    def _save(self, state: TrainState) -> None:
        if self.last_step == state.step:
            return
        started = time.perf_counter()
        path = save_checkpoint(self.context, self.record.run_dir, state.step, self.read_state(state))
        self.last_step = state.step
        self.prune(state)
        self._report_saved(path, time.perf_counter() - started)
        self.uploads.start(path)

    def _report_saved(self, path: Path, seconds: float) -> None:
        self.record.emit(event="saved", path=str(path), seconds=seconds)
        if seconds > self.policy.stop_seconds and not self.is_slowness_told:
            self.is_slowness_told = True
            self.record.warn(
                f"a save takes {seconds:.0f} s, but a signal leaves {self.policy.stop_seconds:.0f} s to the step and "
                "its save: set a longer run.stop_timeout, or a run told to stop goes back to its last checkpoint"
            )

    def _start(self, state: TrainState) -> None:
        folder = open_folder(self.context, self.record.run_dir, state.step)
        share = self.copies.copy(take_share(self.context))
        prune = partial(prune_checkpoints, self.record.run_dir, self._get_limit(), self._list_losses(state))
        self.pending = BackgroundSave(self.context, folder, state.step, share, self.read_state(state), prune)
        self.uploads.start(self.get_path(state.step), self.pending)

    def prune(self, state: TrainState) -> None:
        """Deletes checkpoints that the policy does not keep."""
        if self.context.owns_disk:
            prune_checkpoints(self.record.run_dir, self._get_limit(), self._list_losses(state))

    def _get_limit(self) -> int | None:
        """No limit while an older checkpoint is still being uploaded from its folder."""
        return None if self.uploads.is_behind else self.policy.total_limit

    def _list_losses(self, state: TrainState) -> dict[int, float]:
        return dict(state.measured) if self.policy.keeps_best else {}

    def bring_for_export(self, state: TrainState, *, wants_best: bool) -> Path:
        """Collective over all ranks. The last checkpoint, or the best one that is on rank 0's disk, with all of its
        files there."""
        checkpoint = self._choose_for_export(state, wants_best=wants_best)
        if self.context.is_spread:
            collector = Collector(self.context.disk_owners, self.context.rank, state.groups.host_group)
            if problem := collector.collect(checkpoint, [0]):
                raise CheckpointError(f"{checkpoint} cannot be exported: {problem}")
        return checkpoint

    def _choose_for_export(self, state: TrainState, *, wants_best: bool) -> Path:
        steps = [get_step(path) for path in list_checkpoints(self.record.run_dir)]
        best = self.context.gather(choose_best(state.measured, steps))[0]
        if not wants_best or best is None:
            return self.get_last_path()
        lowest = choose_best(state.measured, state.measured)
        if lowest != best:
            by = name_measure(state.measure)
            self.record.warn(f"step {lowest} was the best by {by}, but its checkpoint was not kept")
        self.record.report(
            f"the model is that of step {best}, with {describe_measure(state.measure, state.measured[best])}"
        )
        return self.get_path(best)

    def read_state(self, state: TrainState) -> dict[str, Any]:
        return {
            "step": state.step,
            "position": state.position,
            "optimizer_steps": state.optimizer_steps,
            "bad_steps": self.bad_steps.count,
            "hours": state.stop.hours,
            **dump_measured(state.evaluated),
            **self.facts,
        }

    def check_disk(
        self, num_trained: int, model_bytes: int, num_steps: int, save_steps: int | None, judged_steps: int | None
    ) -> None:
        """Collective over all ranks: a rank of each disk checks, all follow. Reports a disk that will be full before
        the first of `num_steps` steps. `judged_steps`: how often a model may become the best one."""
        num_saves, limit = -(-num_steps // save_steps) if save_steps else 1, self.policy.total_limit
        if self.policy.keeps_best:
            num_saves += num_steps // (judged_steps or num_steps)
            limit = None if limit is None else limit + 1
        find = partial(find_shortage, self.record.run_dir, num_trained, model_bytes, limit)
        shortage = next(filter(None, self.context.gather(find(num_saves) if self.context.owns_disk else "")), "")
        if shortage and not self.policy.continue_on_error:
            raise StartError(shortage)
        if shortage:
            self.record.warn(shortage)

    def begin(self) -> None:
        """Collective over all ranks. The run starts at step 1."""
        if self.context.is_spread and self.context.owns_disk:  # the command has looked after the first machine's disk
            set_aside(self.record.run_dir, self.record.run_dir, self.record.warn)
        self.uploads.begin(-1)

    def start_from(self, state: TrainState, folder: str, *, with_moments: bool) -> None:
        """Collective over all ranks. Takes the weights of run.start_from, and its optimizer's moments. Rank 0 chooses
        the checkpoint; no rank loads it unless all see it."""
        found: Path | str = ""
        if self.context.rank == 0:
            try:
                found = choose_checkpoint(Path(os.path.expanduser(folder)), self.record.report)
            except (CheckpointError, OSError) as error:
                found = str(error)
        found = self.context.gather(found)[0]
        unseen = find_damage(found, is_quick=True) if isinstance(found, Path) else found
        if problem := next(filter(None, self.context.gather(unseen)), ""):
            raise StartError(f"run.start_from: {problem}")
        assert isinstance(found, Path)
        saved = load_start(self.context, found, with_moments=with_moments)
        state.optimizer_steps = int(saved["optimizer_steps"]) if with_moments else 0
        what = "weights and moments" if with_moments else "weights"
        self.record.report(f"step 1 starts from the {what} of {found}, after its step {saved['step']}")

    def resume(self, state: TrainState, resume_point: ResumePoint) -> None:
        """Collective over all ranks."""
        path = resume_point.path
        if path is None:
            raise AssertionError("a fresh run has nothing to resume from")
        saved = load_checkpoint(self.context, path)
        if self.context.owns_disk:
            set_aside(self.record.run_dir, path, self.record.warn)
        state.step, state.position = int(saved["step"]), int(saved["position"])
        state.optimizer_steps = int(saved["optimizer_steps"])
        self.bad_steps.count = int(saved["bad_steps"])
        state.stop.hours_before = float(saved["hours"])
        state.last_eval_step = resume_point.last_eval_step
        state.last_sample_step = resume_point.last_sample_step
        for name, values in resume_point.measured.items():
            state.evaluated[name].update(values)
        if resume_point.is_own:
            self.last_step = state.step
        self.uploads.begin(state.step if resume_point.is_own else -1)
        if resume_point.is_own:
            self.uploads.start_missing(path)
        self.record.report(f"resumed from {path} after step {state.step}")

    def get_path(self, step: int) -> Path:
        return get_folder(self.record.run_dir) / f"step-{step}"

    def get_last_path(self) -> Path:
        return self.get_path(self.last_step or 0)


def compute_needed_bytes(
    num_trained: int, model_bytes: int, total_limit: int | None, num_saves: int, num_existing: int
) -> int:
    """The most that a run will still write to disk: one checkpoint more than it keeps, or the kept ones and the
    model."""
    checkpoint_bytes = int(STATE_BYTES * num_trained * HEADER_SHARE)
    num_kept = num_saves if total_limit is None else min(total_limit, num_saves)
    num_while_saving = min(num_kept + 1, num_saves) if total_limit is not None else num_saves
    return max(
        max(1, num_while_saving - num_existing) * checkpoint_bytes,
        max(0, num_kept - num_existing) * checkpoint_bytes + model_bytes,
    )


def find_shortage(run_dir: Path, num_trained: int, model_bytes: int, total_limit: int | None, num_saves: int) -> str:
    """'' when the disk has room for what will be saved; else what is wrong and what to do."""
    run_dir.mkdir(parents=True, exist_ok=True)
    needed = compute_needed_bytes(num_trained, model_bytes, total_limit, num_saves, len(list_checkpoints(run_dir)))
    free = shutil.disk_usage(run_dir).free
    if needed <= free:
        return ""
    size = format_bytes(STATE_BYTES * num_trained)
    return (
        f"{run_dir} has {format_bytes(free)} free, checkpoints of {size} each and the model will take "
        f"{format_bytes(needed)}: make room, choose another run.output_dir, or lower run.save_total_limit"
    )
