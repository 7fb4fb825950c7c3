"""What answers are compared with: the log-probability that the model gives each of them before step 1.

It is computed once, by the forward of training, on the steps of the first epoch, and kept in the run's folder: no
second model is loaded. A run that resumes has loaded the same weights before its checkpoint's.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ulysses_cli.data.steps import NO_ROW, Batching, Rows, StepPlan, get_shared, plan_step, read_micro_batch
from ulysses_cli.plan.files import open_own
from ulysses_cli.train.engine import Engine
from ulysses_cli.train.loop import StepResult, StopConditions, TrainState
from ulysses_cli.train.preferences import PreferenceObjective
from ulysses_cli.train.processes.consistency import compare_facts
from ulysses_cli.train.processes.groups import Groups

SAVE_SECONDS = 60
HEADER_BYTES = 1 << 14  # of the file beside its numbers
TOLERANCE = 0.01  # of a log-probability, for another layout's rounding; another model differs by more


class ReferenceMismatchError(RuntimeError):
    """The model is not the one that its reference was computed with."""


class ReferencedRows:
    """Rows with a number for each of their documents, 0 until it is known."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.offsets = np.cumsum([0, *(len(rows.get_lengths(row)) for row in range(len(rows)))])
        self.values = np.zeros(self.offsets[-1])
        self.is_known = np.zeros(len(rows), bool)

    def __len__(self) -> int:
        return len(self.rows)

    def get_lengths(self, row: int) -> tuple[int, ...]:
        return self.rows.get_lengths(row)

    def count_targets(self, row: int) -> int:
        return self.rows.count_targets(row)

    def read(self, row: int, start: int, stop: int) -> Any:
        return self.rows.read(row, start, stop)

    def get_shared(self, row: int) -> tuple[int, ...]:
        return get_shared(self.rows, row)

    def get_reference(self, row: int) -> NDArray[np.float64]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def keep(self, plan: StepPlan, found: NDArray[np.float64]) -> None:
        """`found`: of all documents of the step, in the order of its rows."""
        at = 0
        for row in plan.rows:
            number = self.offsets[row + 1] - self.offsets[row]
            self.get_reference(row)[:] = found[at : at + number]
            self.is_known[row] = True
            at += number


class ReferenceFile:
    """The values of one split in the run's folder, which rank 0 reads and writes. `key` names what decides them,
    `layout` what changes their rounding."""

    def __init__(self, path: Path, key: Mapping[str, Any], layout: Mapping[str, Any]) -> None:
        self.path = path
        self.key, self.layout = (
            hashlib.sha256(json.dumps(each, sort_keys=True, default=str).encode()).hexdigest() for each in (key, layout)
        )

    def load(self, rows: ReferencedRows, engine: Engine, groups: Groups, *, same_layout: bool) -> None:
        """Collective over all ranks: all get what rank 0 has read."""
        values, is_known = np.zeros_like(rows.values), np.zeros(len(rows))
        if groups.is_first and (stored := self._read(rows, same_layout=same_layout)):
            values, is_known = stored
        sent = engine.sum_over_ranks(torch.from_numpy(np.concatenate([values, is_known]))).cpu().numpy()
        rows.values[:], rows.is_known[:] = sent[: len(values)], sent[len(values) :] > 0

    def _read(
        self, rows: ReferencedRows, *, same_layout: bool
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        most_bytes = rows.values.nbytes + rows.is_known.nbytes + HEADER_BYTES
        try:
            with open(self.path, "rb", opener=open_own) as stream, zipfile.ZipFile(stream) as archive:
                if sum(member.file_size for member in archive.infolist()) > most_bytes:
                    return None
                stream.seek(0)
                stored = np.load(stream)
                if str(stored["key"]) != self.key or (same_layout and str(stored["layout"]) != self.layout):
                    return None
                values, is_known = (stored[name].astype(np.float64) for name in ("values", "is_known"))
        except Exception:  # noqa: BLE001 - whatever is wrong with the file, all is computed anew
            return None
        if values.shape != rows.values.shape or is_known.shape != rows.is_known.shape or not np.isfinite(values).all():
            return None
        return values, is_known

    def save(self, rows: ReferencedRows) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        with open(partial, "wb", opener=open_own) as stream:
            np.savez(stream, key=self.key, layout=self.layout, values=rows.values, is_known=rows.is_known)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, self.path)


def compute_reference(
    engine: Engine,
    groups: Groups,
    rows: ReferencedRows,
    batching: Batching,
    end: int,
    stop: StopConditions,
    *,
    save: Callable[[], None],
    is_fresh: bool,
    report: Callable[[str], None] = lambda _: None,
) -> bool:
    """Collective over all ranks, before step 1's weights change. Fills in what a run of `end` rows needs and does not
    know yet. The first step is computed in any case and compared with what is known: a run that begins trusts its own
    bits alone, one that goes on stops where its reference was another model. Returns False when any rank has a reason
    to stop."""
    end_of_epoch, position, saved = min(end, len(rows)), 0, time.monotonic()
    while position < end_of_epoch:
        plan = plan_step(rows, batching, position, end)
        is_new = not all(rows.is_known[row] for row in plan.rows)
        if is_new or not position:
            report(f"reference, row {position + 1:,} of {end_of_epoch:,}")
            if stop.name(compare_facts(plan.list_facts(), groups.host_group, *stop.read_flags())):
                break
            found = _compute_step(engine, groups, rows, plan)
            known = np.concatenate([rows.get_reference(row) for row in plan.rows])
            if not is_new and not is_fresh:
                _compare(known, found)
            elif not is_new and not np.array_equal(known, found):  # the same on all ranks, as both are
                rows.is_known[:] = False
            if not all(rows.is_known[row] for row in plan.rows):
                rows.keep(plan, found)
        position = plan.next_position
        if time.monotonic() - saved > SAVE_SECONDS:
            save()
            saved = time.monotonic()
    save()
    return position >= end_of_epoch


def _compute_step(engine: Engine, groups: Groups, rows: Rows, plan: StepPlan) -> NDArray[np.float64]:
    """Collective over all ranks: the log-probability of each document of a step, told by one rank of each group."""
    objective = engine.objective
    assert isinstance(objective, PreferenceObjective)
    starts = np.cumsum([0, *map(len, plan.lengths)])
    found, axis = torch.zeros(int(starts[-1]), dtype=torch.float64, device=engine.device), groups.sp_axis
    for micro_step in range(plan.num_micro_steps):
        batch = read_micro_batch(rows, plan, groups.dp_index, micro_step, axis.rank, axis.size)
        losses, loaded = engine.compute_token_losses(batch)
        if not batch.num_members:
            continue
        sums = objective.sum_answers(losses, loaded["answers"]).log_probs
        members = [member for member in plan.shares[groups.dp_index][micro_step] if member != NO_ROW]
        sizes = [len(plan.lengths[member]) for member in members]
        for member, part in zip(members, sums.split(sizes), strict=True):
            if not axis.rank:
                found[starts[member] : starts[member + 1]] = part
    return engine.sum_over_ranks(found).cpu().numpy()


def _compare(known: NDArray[np.float64], found: NDArray[np.float64]) -> None:
    if not np.allclose(known, found, rtol=TOLERANCE, atol=TOLERANCE):
        raise ReferenceMismatchError(
            "the reference in this run's folder was computed with other weights than model.name_or_path now holds: "
            "start again with --overwrite, or with the weights of before"
        )


class References:
    """What the answers of a run are compared with, as stages of its start. Here with nothing."""

    def __init__(self, eval_rows: Rows | None, eval_batching: Batching) -> None:
        self.eval_rows, self.eval_batching = eval_rows, eval_batching

    def fill(self, state: TrainState, report: Callable[[str], None], *, is_fresh: bool) -> None:
        """Collective over all ranks, before a checkpoint is loaded."""

    def check(self, state: TrainState, result: StepResult) -> None:
        """A post-step hook."""


class ComputedReferences(References):
    """With the model before step 1. From here on the state's rows know their references, 0 until these are filled
    in."""

    def __init__(
        self, eval_rows: Rows | None, eval_batching: Batching, state: TrainState, files: Sequence[ReferenceFile]
    ) -> None:
        super().__init__(None if eval_rows is None else ReferencedRows(eval_rows), eval_batching)
        state.rows = ReferencedRows(state.rows)
        self.files = files  # of training, of evaluation
        self.is_fresh = False

    def fill(self, state: TrainState, report: Callable[[str], None], *, is_fresh: bool) -> None:
        self.is_fresh = is_fresh
        parts = [(state.rows, state.batching, state.end)]
        parts += [(self.eval_rows, self.eval_batching, len(self.eval_rows))] if self.eval_rows is not None else []
        for (rows, batching, end), file in zip(parts, self.files, strict=False):
            assert isinstance(rows, ReferencedRows)
            file.load(rows, state.engine, state.groups, same_layout=is_fresh)
            save = partial(file.save, rows) if state.groups.is_first else _save_nothing
            arguments = (state.engine, state.groups, rows, batching, end, state.stop)
            if not compute_reference(*arguments, save=save, report=report, is_fresh=is_fresh):
                return  # the loop finds the same reason to stop

    def check(self, state: TrainState, result: StepResult) -> None:
        """The model of step 1 is its own reference: any difference is a fault of this tool or of the model, such as
        dropout."""
        if state.step != 1 or not self.is_fresh or len(set(result.plan.rows)) < len(result.plan.rows):
            return
        rewards = [result.measures[f"rewards/{name}"] for name in ("chosen", "rejected")]
        if any(rewards):
            raise ReferenceMismatchError(
                f"answers have rewards of {rewards[0]} and {rewards[1]} at step 1, where the model is its own "
                "reference and both are 0: its forward is not the same twice"
            )


def _save_nothing() -> None:
    """On ranks that keep no file."""
