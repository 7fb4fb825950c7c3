"""First stage of a rank: reads files, packages and the machine, and reports their faults before the ranks connect."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ulysses_cli.data.batching import count_rows, make_batching
from ulysses_cli.data.rows import PackedRows, open_rows
from ulysses_cli.data.steps import Batching
from ulysses_cli.data.tokenizing.targets import list_turn_ends
from ulysses_cli.data.tokenizing.tokenizer import load_tokenizer
from ulysses_cli.plan.files.weight_files import find_weight_problem
from ulysses_cli.plan.hardware import Gpu, Hardware
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.changes import list_shared_settings
from ulysses_cli.plan.recipe.loader import Loaded
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import Resolved, resolve
from ulysses_cli.plan.secrets import mask_secrets
from ulysses_cli.run_folder.bucket import Bucket, BucketError
from ulysses_cli.run_folder.remote_archive import has_checkpoint, read_remote_model_steps
from ulysses_cli.run_folder.resume import (
    FRESH,
    ResumePoint,
    adapt,
    count_restarts,
    describe_restart,
    find_resume_point,
)
from ulysses_cli.train.assembly.model_config import load_model_config, read_shape
from ulysses_cli.train.assembly.run import RunLength
from ulysses_cli.train.guard.interruption import Interruption
from ulysses_cli.train.processes.device import StartError, choose_device, recognise_gpu
from ulysses_cli.train.processes.requirements import find_missing_package
from ulysses_cli.train.telemetry.record import Display, Record
from ulysses_cli.train.telemetry.trackers import make_trackers


@dataclass(frozen=True, eq=False)
class Launch:
    """What the process gives to its run. `leftovers` is closed however the rank ends."""

    loaded: Loaded
    options: argparse.Namespace
    open_display: Callable[[int], Display]
    load_hardware: Callable[[], Hardware]
    interruption: Interruption
    leftovers: ExitStack

    @property
    def run_dir(self) -> Path:
        return Path(os.path.expanduser(self.loaded.recipe.run.output_dir))


@dataclass(frozen=True, eq=False)
class Inputs:
    """What this rank has read. `resume_point` is set on rank 0 alone, and on one machine; the others receive it when
    ranks connect."""

    rows: PackedRows
    eval_rows: PackedRows | None
    tokenizer: Any
    shape: ModelShape
    num_own_tokens: int  # rows of the model's embedding in its files
    resolved: Resolved
    device: Any
    gpu: Gpu | None  # with this rank's memory; None on a CPU
    is_known_gpu: bool
    resume_point: ResumePoint

    @cached_property
    def turn_ends(self) -> list[str]:
        """The tokens with which the turns of its chats end."""
        return list_turn_ends(store.manifest.get("turns", {}) for store in self.rows.stores)


@dataclass(frozen=True)
class RemainingRun:
    """The run from a resume point on: the recipe as it continues, its rows per step, and its length."""

    recipe: Recipe
    batching: Batching
    length: RunLength


def read_inputs(launch: Launch, record: Record) -> Inputs:
    record.phase = "reading inputs"
    recipe, options = launch.loaded.recipe, launch.options
    if problem := find_missing_package(
        recipe.train.optim, recipe.lora.quantize_base if recipe.lora is not None else None
    ):
        raise StartError(problem)
    rows, held_out = open_rows(options.data, "train"), open_rows(options.data, "eval")
    tokenizer = load_tokenizer(recipe.model, recipe.data)
    config = load_model_config(recipe)
    shape = read_shape(recipe, config, tokenizer)
    if len(tokenizer) > shape.vocab_size:
        raise StartError(
            f"the tokenizer has {len(tokenizer):,} tokens, the model's embedding only {shape.vocab_size:,}: name the "
            "tokenizer that belongs to the model (model.tokenizer)"
        )
    folder = Path(os.path.expanduser(recipe.model.name_or_path or ""))
    if recipe.model.name_or_path and folder.is_dir() and (problem := find_weight_problem(folder)):
        raise StartError(problem)
    resolved = resolve(recipe, shape)
    device = choose_device(wants_cpu=recipe.run.device == "cpu" or options.pretend)
    gpu, is_known = recognise_gpu(device, launch.load_hardware())
    is_first = int(os.environ.get("RANK", "0")) == 0
    warnings: list[str] = []  # shown once the display is open
    resume_point = FRESH
    if is_first and not options.dry_run and count_machines() == 1:  # several machines look together, once connected
        resume_point = find_checkpoint(launch, report_restart(launch, warnings.append), warnings.append)
    inputs = Inputs(
        rows, held_out if len(held_out) else None, tokenizer, shape, config.vocab_size, resolved, device, gpu, is_known,
        resume_point,
    )  # fmt: skip
    remaining = plan_remaining(launch, inputs, resume_point, warnings.append)
    if is_first:
        trackers = make_trackers(recipe.run.report_to, launch.run_dir, get_run_name(launch), os.environ)
        record.open(launch.open_display(remaining.length.num_steps), trackers)
        for warning in warnings:
            record.warn(warning)
    return inputs


def get_run_name(launch: Launch) -> str:
    return launch.loaded.recipe.run.run_name or launch.run_dir.name


def count_machines() -> int:
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def report_restart(launch: Launch, warn: Callable[[str], None]) -> int:
    """On rank 0, once. Returns how often the ranks have been started before."""
    logs = launch.run_dir / "logs"
    restarts = count_restarts(logs)
    if restarts:
        warn(describe_restart(logs, restarts, launch.loaded.recipe.run.max_restarts))
    return restarts


def find_checkpoint(launch: Launch, restarts: int, warn: Callable[[str], None]) -> ResumePoint:
    """On rank 0, from the checkpoints on its disk."""
    point = find_resume_point(launch.run_dir, launch.options.resume, restarts, warn, launch.loaded.recipe.run.keep_best)
    return point if _is_uploaded(launch, point) else replace(point, model_steps=None)


def _is_uploaded(launch: Launch, point: ResumePoint) -> bool:
    """Whether the run's checkpoint and model are where run.checkpoint_uri says. If not, the run is not finished."""
    address = launch.loaded.recipe.run.checkpoint_uri
    if address is None or point.path is None or point.model_steps is None:
        return True
    try:
        bucket = Bucket(address)
        return read_remote_model_steps(bucket) == point.model_steps and has_checkpoint(bucket, point.path)
    except (BucketError, OSError):
        return False  # the upload will say why


def plan_remaining(
    launch: Launch, inputs: Inputs, resume_point: ResumePoint, warn: Callable[[str], None] = lambda _: None
) -> RemainingRun:
    """Computes the rows and steps after the resume point. Accumulation follows the checkpoint's rows per step."""
    recipe, options, resolved = launch.loaded.recipe, launch.options, inputs.resolved
    if state := resume_point.state:
        accumulation_steps = adapt(
            state, recipe.model_dump(mode="json"), options.data.name, resolved.layout,
            anyway=options.resume_anyway, report=warn,
        )  # fmt: skip
        train = recipe.train.model_copy(update={"gradient_accumulation_steps": accumulation_steps})
        recipe = recipe.model_copy(update={"train": train})
    batching = make_batching(recipe, inputs.shape, resolved)
    total_rows = count_rows(recipe, len(inputs.rows), batching.rows_per_step)
    end, num_steps = resume_point.count_ahead(recipe.train.max_steps, total_rows, batching.rows_per_step)
    if resume_point.has_stalled(recipe.run.early_stopping_patience, recipe.run.early_stopping_threshold):
        warn(f"early stopping has ended this run after step {resume_point.step}: no step is left")
        end, num_steps = resume_point.position, resume_point.step
    return RemainingRun(recipe, batching, RunLength(num_steps, end))


def settle_rows_per_step(resolved: Resolved, batching: Batching) -> Resolved:
    """The resolved plan with the rows per step that the run continues with."""
    rows = batching.rows_per_step
    return replace(resolved, rows_per_step=rows, tokens_per_step=rows * resolved.row_tokens)


def list_settings(launch: Launch) -> dict[str, Any]:
    """Returns the recipe's settings, by key, that all machines must share; secrets are masked, since they are shown."""
    return list_shared_settings(mask_secrets(launch.loaded.recipe.model_dump(mode="json")))
