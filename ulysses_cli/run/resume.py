"""Decides where a run starts: at step 1 or at a checkpoint, and whether the present recipe may resume from it.

Plain values. Rank 0 decides before the model is loaded, and its result is broadcast."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ulysses_cli.plan.files import write_own
from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.recipe.changes import list_changes, list_length_changes
from ulysses_cli.plan.schedule import LOSS_MEASURE, Measured, choose_best, has_stalled
from ulysses_cli.plan.units import format_count
from ulysses_cli.run.checkpoints import (
    CheckpointError,
    collect_measured,
    find_damage,
    find_newest_valid,
    get_folder,
    get_step,
    list_checkpoints,
    load_measured,
    load_state,
    read_model_steps,
    tidy_folder,
)
from ulysses_cli.run.records import choose_first, find_last_step, read_json

WIDTHS = ("per_device_train_batch_size", "gradient_accumulation_steps")
# Changes of these change the shapes or the names of what a checkpoint holds.
SIZES = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "num_experts", "num_local_experts"),
)
SHAPING = (
    *(f"model.config.{name}: " for name in SIZES),
    *(f"lora.{name}: " for name in ("r", "target_modules", "experts", "expert_r", "use_dora", "modules_to_save")),
    "lora: ",
)


class ResumeError(ValueError):
    """The recipe cannot resume from this checkpoint; the user decides what to change."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that rank 0 chose, and its state. `state` is empty without a checkpoint."""

    path: Path | None
    state: Mapping[str, Any]
    is_own: bool = False  # the checkpoint is in this run's folder
    last_eval_step: int = -1
    model_steps: tuple[int, int] | None = None  # of the exported model in the run's folder, as read_model_steps
    measured: Measured = field(default_factory=dict)
    measure: str | None = None  # what the present recipe's run.keep_best goes by
    best_step: int | None = None  # of the best checkpoint by that measure in the run's folder
    last_sample_step: int = -1

    @property
    def step(self) -> int:
        return int(self.state.get("step", 0))

    @property
    def position(self) -> int:
        return int(self.state.get("position", 0))

    def has_stalled(self, patience: int | None, threshold: float) -> bool:
        """Whether early stopping has ended the run here, or would have ended it with these settings."""
        values = self.measured.get(self.measure or LOSS_MEASURE, {})
        return self.path is not None and has_stalled(values, patience, threshold)

    def count_ahead(self, max_steps: int | None, num_rows: int, rows_per_step: int) -> tuple[int, int]:
        """Returns (position where the stream of rows ends, number of the last step), also if rows per step have
        changed. `num_rows`: rows of the whole run."""
        end = num_rows if max_steps is None else self.position + max(0, max_steps - self.step) * rows_per_step
        return end, self.step - (-max(0, end - self.position) // rows_per_step)


FRESH = ResumePoint(None, {})


def count_restarts(logs: Path) -> int:
    """On rank 0: how often this launch's ranks have been started before. The agent counts only its own machine's."""
    launch, file = os.environ.get("ULYSSES_LAUNCH", ""), logs / "launch.json"
    try:
        before = read_json(file)
        count = int(before["restarts"]) + 1 if launch and before["launch"] == launch else 0
    except (ValueError, KeyError, TypeError, OverflowError):
        count = 0
    write_own(file, json.dumps({"launch": launch, "restarts": count}))
    return count


def describe_restart(logs: Path, num_restarts: int, max_restarts: int) -> str:
    """Why all ranks were started again. A killed rank leaves no record; a rank that lost its peer is not the cause."""
    files = (*logs.glob("rank-*.error.json"), *logs.glob(f"rank-*.error-{num_restarts - 1}.json"))
    records = [read_json(file) for file in files]  # None where its rank has just renamed it to the other name
    first = choose_first([record for record in records if isinstance(record, dict) and record.get("is_cause")])
    why = f"rank {first['rank']} failed: {first['message']}" if first else "a rank was lost"
    return f"restart {num_restarts} of {max_restarts} (run.max_restarts): {why}"


def describe_longer_run(
    resume_point: ResumePoint,
    recipe: Mapping[str, Any],
    num_steps: int,
    make_schedule: Callable[[Mapping[str, Any], int], Callable[[int], float]],
) -> str:
    """A run whose length has changed repeats no step, but follows another learning rate schedule from here on. '' if
    nothing has changed, or if no step is left. `make_schedule` takes a recipe and its number of steps."""
    state, step = resume_point.state, resume_point.step
    changes = list_length_changes(state["recipe"], recipe) if state and step < num_steps else []
    if not changes:
        return ""
    text = f"{'; '.join(changes)}: from step {step + 1} on the learning rate follows the schedule of "
    text += f"{num_steps} steps, {make_schedule(recipe, num_steps)(step):.3g} at first"
    if step and "num_steps" in state:
        with suppress(ValueError):  # a checkpoint of another version, whose recipe is no recipe of this one
            before = make_schedule(state["recipe"], int(state["num_steps"]))
            text += f" (step {step} had {before(step - 1):.3g})"
    return text


def find_resume_point(
    run_dir: Path, wanted: str | None, num_restarts: int, report: Callable[[str], None], measure: str | None = None
) -> ResumePoint:
    """On one rank. `wanted` is a folder or `auto`. A restarted run tries its own newest checkpoint first. `measure`:
    the present recipe's run.keep_best."""
    tidy_folder(run_dir)
    path: Path | None = None
    if num_restarts or wanted == "auto":
        path = find_newest_valid(run_dir, report)
    if path is None and wanted not in (None, "auto"):
        path = Path(os.path.expanduser(str(wanted)))
        if damage := find_damage(path):
            raise CheckpointError(f"{path} cannot be resumed from: {damage}; --resume auto takes the newest valid one")
    elif path is None and wanted == "auto" and (damaged := list_checkpoints(run_dir)):
        raise CheckpointError(
            f"of {format_count(len(damaged), 'checkpoint')} in {damaged[0].parent} none is valid, the newest: "
            f"{find_damage(damaged[0])}; name an older copy with --resume PATH, or start over with --overwrite"
        )
    if path is None:
        if wanted == "auto":
            report("no checkpoint to resume from: starting at step 1")
        return FRESH
    try:
        state = load_state(path)
        is_own = path.resolve() == (get_folder(run_dir) / f"step-{int(state['step'])}").resolve()
        last_eval_step, last_sample_step = (
            find_last_step(run_dir / name, int(state["step"])) if is_own else -1
            for name in ("eval.jsonl", "samples.jsonl")
        )
        model_steps = read_model_steps(run_dir / "model") if is_own else None
        measured = collect_measured(run_dir, path) if is_own else load_measured(state)
        steps = [get_step(other) for other in list_checkpoints(run_dir)] if is_own else []
        best_step = choose_best(measured[measure or LOSS_MEASURE], steps)
        return ResumePoint(
            path, state, is_own, last_eval_step, model_steps, measured, measure, best_step, last_sample_step
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be resumed from: {error}") from error


def adapt(
    state: Mapping[str, Any],
    recipe: Mapping[str, Any],
    data: str,
    layout: Layout,
    *,
    anyway: bool,
    report: Callable[[str], None],
) -> int:
    """Returns gradient_accumulation_steps with which this recipe resumes from a checkpoint on the present layout."""
    check_changes(state, recipe, data, anyway=anyway, report=report)
    width, before = (recipe["train"][name] for name in WIDTHS)
    fitted = fit_accumulation(state, width, before, layout.dp_size, layout.sp_size, anyway=anyway)
    if fitted != before:
        report(f"{WIDTHS[1]}: {before} -> {fitted}, to keep {format_count(state['rows_per_step'], 'row')} per step")
    return fitted


def check_changes(
    state: Mapping[str, Any], recipe: Mapping[str, Any], data: str, *, anyway: bool, report: Callable[[str], None]
) -> None:
    """Changes of settings that decide values are an error; with `anyway` (--resume-anyway), a warning."""
    changes = list_changes(state["recipe"], recipe)
    most, done = recipe["train"]["max_steps"], int(state.get("step", 0))
    if most is not None and most < done:
        changes.append(f"train.max_steps: is {most}, but step {done} is done")
    if not changes and state.get("data", data) != data:
        changes = [f"the prepared data: was {state['data']}, is {data} (files behind data.datasets have changed)"]
    if not changes:
        return
    text = "\n  ".join(["the recipe has changed since the checkpoint was written:", *changes])
    if not anyway and any(change.startswith(SHAPING) for change in changes):
        raise ResumeError(f"{text}\nput it back, or start over in another run.output_dir: its tensors would not fit")
    if not anyway:
        raise ResumeError(f"{text}\nput it back, start over in another run.output_dir, or insist with --resume-anyway")
    report(text)


def fit_accumulation(
    state: Mapping[str, Any], rows_per_device: int, accumulation: int, dp_size: int, sp_size: int, *, anyway: bool
) -> int:
    """Returns gradient_accumulation_steps that keep the checkpoint's rows per optimizer step on the present layout."""
    wanted, width = int(state["rows_per_step"]), rows_per_device * dp_size
    if width * accumulation == wanted:
        return accumulation
    before = state["recipe"]["train"]
    was_rewritten = tuple(before[name] for name in WIDTHS) != (rows_per_device, accumulation)
    if was_rewritten and anyway:
        return accumulation
    if wanted % width == 0 and not was_rewritten:
        return wanted // width
    if was_rewritten:
        raise ResumeError(
            f"the recipe has changed since the checkpoint was written:\n  rows per step: was {wanted}, is "
            f"{width * accumulation} (train.per_device_train_batch_size, train.gradient_accumulation_steps)"
            "\nput it back, or insist with --resume-anyway"
        )
    counts = [size * sp_size for size in range(1, wanted + 1) if wanted % (size * rows_per_device) == 0]
    can = f"can: {', '.join(map(str, counts))}" if counts else "can: none; set train.per_device_train_batch_size to 1"
    raise ResumeError(
        f"{format_count(wanted, 'row')} per step cannot be shared by {dp_size} x "
        f"{format_count(rows_per_device, 'row')} at a time\nwith sp_size {sp_size}, process counts that {can}"
    )
