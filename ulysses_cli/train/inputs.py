"""The first two stages of a rank. Reads files, packages and the machine, and reports their faults before ranks
connect; then connects to the other ranks, after which all share one resume point, one plan and its prediction.

What decides a collective is rank 0's value or a comparison of all ranks, never what one rank's disk says."""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ulysses_cli.data.steps import Batching, count_rows, make_batching, make_eval_batching, make_work, plan_step
from ulysses_cli.data.store import PackedRows, hash_content, open_rows
from ulysses_cli.data.tokenizing.targets import list_turn_ends
from ulysses_cli.data.tokenizing.tokenizer import load_tokenizer
from ulysses_cli.plan.hardware import GIB, Gpu, Hardware
from ulysses_cli.plan.ledger.job import make_job
from ulysses_cli.plan.ledger.machine import compute_swap_need
from ulysses_cli.plan.levers import Levers, get_key, uses_disk
from ulysses_cli.plan.models.model_files import find_weight_problem
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.planner.estimate import explain_memory, find_host_bound
from ulysses_cli.plan.planner.lever_choice import WRITTEN, LeverChoice, choose_levers
from ulysses_cli.plan.recipe.changes import list_shared_settings
from ulysses_cli.plan.recipe.recipe import Recipe, Train
from ulysses_cli.plan.resolved import Resolved, ResolvedRecipe, RunPlan, wants_shared_prompts
from ulysses_cli.plan.secrets import mask_secrets
from ulysses_cli.plan.speed import PACKED_KERNELS, explain_packed
from ulysses_cli.plan.units import format_count
from ulysses_cli.run.bucket import Bucket, BucketError
from ulysses_cli.run.checkpoints import CheckpointError, tidy_folder
from ulysses_cli.run.remote_checkpoints import has_checkpoint, read_remote_model_steps
from ulysses_cli.run.resume import (
    FRESH,
    ResumePoint,
    adapt,
    count_restarts,
    describe_longer_run,
    describe_restart,
    find_resume_point,
)
from ulysses_cli.train.attention.kernels.trial import measure_mix
from ulysses_cli.train.checkpoint.collection import Collector, Disks, find_disks
from ulysses_cli.train.document_losses import CutDocument, read_short_texts
from ulysses_cli.train.loop import StopConditions
from ulysses_cli.train.model.build import Built, RunLength, make_schedule
from ulysses_cli.train.model.loading import load_model_config, read_shape
from ulysses_cli.train.optimizer.states import name_folder, open_folder, remove_rank_files
from ulysses_cli.train.processes.consistency import compare_machines, gather_values
from ulysses_cli.train.processes.device import (
    GpuMemoryError,
    StartError,
    choose_device,
    find_least,
    recognise_gpu,
)
from ulysses_cli.train.processes.groups import Groups, make_groups
from ulysses_cli.train.processes.host import (
    find_missing_compiler,
    find_missing_operator,
    find_missing_package,
    settle_cpu_flags,
)
from ulysses_cli.train.processes.interruption import Interruption
from ulysses_cli.train.processes.store import join_ranks
from ulysses_cli.train.record import Display, Record, list_versions, make_trackers

NUM_CALLS, NUM_REPEATS = 4, 100


class Yardstick:
    """A fixed piece of work, of about a millisecond: a small module is called with a hook, computes next to nothing and
    runs its backward."""

    def __init__(self) -> None:
        self.module, self.rows = nn.Linear(4, 4), torch.ones(2, 4)
        self.module.register_forward_pre_hook(self._note)
        self.notes: dict[str, tuple[int, bool]] = {}

    def measure(self) -> float:
        """Milliseconds of CPU time of this thread."""
        began = time.thread_time()
        with torch.enable_grad():
            for number in range(NUM_CALLS):
                self.notes = {f"{number}": (number, isinstance(self.rows, nn.Parameter))}
                self.module(self.rows).sum().backward()
                self.module.zero_grad(set_to_none=True)
        return 1e3 * (time.thread_time() - began)

    def _note(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        for name, parameter in module.named_parameters():
            self.notes[name] = (parameter.numel(), hasattr(parameter, "ds_id"))


def measure_core_milliseconds() -> float:
    """The least of some repetitions: other work on the machine only adds to it."""
    yardstick = Yardstick()
    return min(yardstick.measure() for _ in range(NUM_REPEATS))


ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True)
class Forecast:
    """`gpu` is None where ranks compute on a CPU: no lever is turned on automatically there."""

    choice: LeverChoice
    gpu: Gpu | None
    is_known_gpu: bool
    measure_core: Callable[[], float] = measure_core_milliseconds

    @property
    def peak_tflops(self) -> float | None:
        return self.gpu.tflops if self.gpu is not None and self.is_known_gpu else None

    def list_levers(self) -> dict[str, Any]:
        reasons = self.choice.reasons
        return {
            get_key(name): {"value": value, "reason": reasons.get(name, WRITTEN)}
            for name, value in vars(self.choice.levers).items()
        }

    def list_prediction(self) -> dict[str, Any] | None:
        fit = self.choice.fit
        return None if fit is None else {"peak_memory_bytes": fit.gpu_peak_bytes, **vars(fit)}

    def report_to(self, record: Record) -> None:
        if self.gpu is None:
            return
        if self.choice.stage_reason != WRITTEN:
            record.report(f"parallel.zero_stage: {self.choice.zero_stage}, {self.choice.stage_reason}")
        for name, reason in self.choice.reasons.items():
            record.report(f"memory.{get_key(name)}: {getattr(self.choice.levers, name)}, {reason}")
        if num_layers := self.choice.levers.offloaded_layers:
            record.report(
                f"host memory for what {num_layers} layers save is page-locked in the first step, which takes longer"
            )
        fit = self.choice.fit
        if fit is not None and fit.verdict != "fits":
            record.warn(f"the ledger says {fit.verdict.replace('_', ' ')}{self.format_peak()}")
        if not any("expandable_segments:True" in os.environ.get(name, "") for name in ALLOCATOR_SETTINGS):
            record.report("expandable segments are off: the allocator loses memory to fragments at long rows")

    def explain_host(self, plan: RunPlan) -> list[str]:
        """What to know where the GPU would wait for this machine's processor; [] where it does not, or is unknown."""
        if self.gpu is None or not self.is_known_gpu:
            return []
        costs = self.gpu.host
        costs = replace(costs, core_speed=costs.yardstick / self.measure_core())
        job = make_job(plan.recipe, plan.shape, plan.levers, gpus_per_node=self.gpu.gpus_per_node)
        bound = find_host_bound(job, replace(self.gpu, host=costs))
        return [] if bound is None else [f"steps are limited {bound.explain()[0]}", bound.explain()[1]]

    def explain_attention(self, plan: RunPlan, kernels: Collection[str], lengths: Sequence[int]) -> list[str]:
        """What the run's kernels cost where a package has a faster one; [] where none has, or it is unknown.
        `lengths`: of the documents in a typical row."""
        if self.gpu is None or not self.is_known_gpu or not set(kernels) & set(PACKED_KERNELS) or not sum(lengths):
            return []
        job = make_job(plan.recipe, plan.shape, plan.levers, gpus_per_node=self.gpu.gpus_per_node)
        as_long = max(
            1, sum(length * length for length in lengths) // sum(lengths)
        )  # equal ones with as much attention
        words = explain_packed(replace(job, document_tokens=as_long), self.gpu)
        return [f"attention: {words}"] if words else []

    def format_peak(self) -> str:
        fit = self.choice.fit
        return f" (predicted {fit.gpu_peak_bytes / GIB:.2f} of {fit.gpu_capacity_bytes / GIB:.2f})" if fit else ""


@dataclass(frozen=True, eq=False)
class Launch:
    """What the process gives to its run. `plan`: as the command has resolved it. `leftovers` is closed however the rank
    ends."""

    plan: ResolvedRecipe
    options: argparse.Namespace
    open_display: Callable[[int], Display]
    load_hardware: Callable[[], Hardware]
    interruption: Interruption
    leftovers: ExitStack

    @property
    def recipe(self) -> Recipe:
        return self.plan.loaded.recipe

    @property
    def run_dir(self) -> Path:
        return Path(os.path.expanduser(self.recipe.run.output_dir))


@dataclass(frozen=True, eq=False)
class Inputs:
    """What this rank has read. `resume_point` is set on rank 0 alone, and on one machine; the others receive it when
    ranks connect. `short_texts`: those of run.short_check, on rank 0 alone."""

    rows: PackedRows
    eval_rows: PackedRows | None
    tokenizer: Any
    shape: ModelShape
    num_own_tokens: int  # rows of the model's embedding in its files
    device: Any
    gpu: Gpu | None  # with this rank's memory; None on a CPU
    is_known_gpu: bool
    resume_point: ResumePoint
    short_texts: tuple[CutDocument, ...]

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
    recipe, options = launch.recipe, launch.options
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
    device = choose_device(wants_cpu=recipe.run.device == "cpu" or options.pretend)
    gpu, is_known = recognise_gpu(device, launch.load_hardware())
    is_first = int(os.environ.get("RANK", "0")) == 0
    warnings: list[str] = []  # shown once the display is open
    resume_point = FRESH
    if is_first and not options.dry_run and count_machines() == 1:  # several machines look together, once connected
        resume_point = find_checkpoint(launch, report_restart(launch, warnings.append), warnings.append)
    path = recipe.run.short_check if is_first else None
    short_texts = () if path is None else read_short_texts(path, tokenizer)
    inputs = Inputs(
        rows, held_out if len(held_out) else None, tokenizer, shape, config.vocab_size, device, gpu, is_known,
        resume_point, short_texts,
    )  # fmt: skip
    remaining = plan_remaining(launch, inputs, resume_point, warnings.append)
    if is_first:
        trackers = make_trackers(recipe.run.report_to, launch.run_dir, get_run_name(launch), os.environ)
        record.open(launch.open_display(remaining.length.num_steps), trackers)
        for warning in warnings:
            record.warn(warning)
    return inputs


def get_run_name(launch: Launch) -> str:
    return launch.recipe.run.run_name or launch.run_dir.name


def count_machines() -> int:
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def report_restart(launch: Launch, warn: Callable[[str], None]) -> int:
    """On rank 0, once. Returns how often the ranks have been started before."""
    logs = launch.run_dir / "logs"
    restarts = count_restarts(logs)
    if restarts:
        warn(describe_restart(logs, restarts, launch.recipe.run.max_restarts))
    return restarts


def find_checkpoint(launch: Launch, restarts: int, warn: Callable[[str], None]) -> ResumePoint:
    """On rank 0, from the checkpoints on its disk."""
    point = find_resume_point(launch.run_dir, launch.options.resume, restarts, warn, launch.recipe.run.keep_best)
    return point if _is_uploaded(launch, point) else replace(point, model_steps=None)


def _is_uploaded(launch: Launch, point: ResumePoint) -> bool:
    """Whether the run's checkpoint and model are where run.checkpoint_uri says. If not, the run is not finished."""
    address = launch.recipe.run.checkpoint_uri
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
    recipe, options, resolved = launch.recipe, launch.options, launch.plan.resolved
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
    return replace(resolved, rows_per_step=rows, tokens_per_step=rows * resolved.max_length)


def list_settings(launch: Launch) -> dict[str, Any]:
    """Returns the recipe's settings, by key, that all machines must share; secrets are masked, since they are shown."""
    return list_shared_settings(mask_secrets(launch.recipe.model_dump(mode="json")))


START_TIMEOUT = timedelta(minutes=30)  # loading, compiling


@dataclass(frozen=True, eq=False)
class Connected:
    """The process groups, and the plan, length and resume point that all ranks share."""

    groups: Groups
    plan: RunPlan
    batching: Batching
    length: RunLength
    resume_point: ResumePoint
    forecast: Forecast
    stop: StopConditions
    disks: Disks
    swap_folder: Path | None

    @property
    def is_finished(self) -> bool:
        """Nothing is left to do. The same on all ranks: the resume point is rank 0's."""
        point = self.resume_point
        best = point.best_step if self.plan.recipe.run.export_best else None
        wanted = (point.step if best is None else best, point.step)
        return point.path is not None and point.step == self.length.num_steps and point.model_steps == wanted

    @property
    def has_steps_ahead(self) -> bool:
        return self.resume_point.step < self.length.num_steps

    @property
    def eval_batching(self) -> Batching:
        return make_eval_batching(self.plan.shape, self.plan.resolved)

    def explain_rows(self, inputs: Inputs, built: Built) -> list[str]:
        """What the run's kernels of attention cost on its rows, and how answers read their prompts."""
        kernels, lengths = [*built.kernel.by_head_dim.values(), built.kernel.name], measure_mix(inputs.rows).lengths
        lines, recipe = self.forecast.explain_attention(self.plan, kernels, lengths), self.plan.recipe
        if recipe.preference is None and not wants_shared_prompts(recipe):
            return lines
        is_split = recipe.preference is None and recipe.data.on_rewritten_turns == "split"
        if inputs.rows.shares_prompts:
            who, what = ("texts of a split chat", "what they share") if is_split else ("answers", "their prompt")
            return [*lines, f"{who} read one copy of {what}"]
        obstacle = self.plan.resolved.sharing_obstacle or "as the recipe says"
        what = "each text of a split chat has its own copy" if is_split else "each answer has a copy of its prompt"
        return [*lines, f"{what}: {obstacle}"]

    def describe_next_step(self, inputs: Inputs, num_trained: int) -> str:
        """'' where no step is left."""
        if not self.has_steps_ahead:
            return ""
        point = self.resume_point
        step = plan_step(inputs.rows, self.batching, point.position, self.length.end)
        return (
            f"step {point.step + 1}: {format_count(len(step.rows), 'row')}, {step.num_tokens:,} tokens, "
            f"{step.num_targets:,} targets; {num_trained:,} trained parameters"
        )

    def describe_longer_run(self) -> str:
        """What another length than the checkpoint's changes, or ''."""
        recipe = self.plan.recipe.model_dump(mode="json")
        return describe_longer_run(self.resume_point, recipe, self.length.num_steps, _make_schedule_of)

    def explain_out_of_memory(self, error: BaseException) -> GpuMemoryError:
        """Names the rows that did not fit and the smallest change of the recipe that does."""
        first_line = (str(error).strip().splitlines() or ["out of memory"])[0][:300]
        plan, gpu = self.plan, self.forecast.gpu
        rows = f"rows of {plan.resolved.max_length:,} tokens, {plan.resolved.local_tokens:,} per rank"
        hint = "shorter rows (data.max_length), or a larger sp_size"
        if gpu is not None:
            hint = explain_memory(plan.recipe, plan.shape, plan.levers, gpu)
        return GpuMemoryError(f"out of memory with {rows}: {first_line}", hint)


def _make_schedule_of(recipe: Mapping[str, Any], num_steps: int) -> Callable[[int], float]:
    """The schedule of a recipe as a checkpoint holds it."""
    return make_schedule(Train.model_validate(recipe["train"]), num_steps)


def connect(launch: Launch, inputs: Inputs, record: Record) -> Connected:
    """Collective over all ranks."""
    record.set_phase("meeting the other ranks")
    layout, is_simulated = launch.plan.resolved.layout, launch.options.pretend
    if is_simulated:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.world_size)
    else:
        join_ranks(inputs.device, START_TIMEOUT)
        check_machines(launch, inputs.shape)
    groups = make_groups(layout, START_TIMEOUT)
    resume_point, disks = inputs.resume_point, Disks((0,) * layout.world_size)
    if count_machines() > 1 and not is_simulated:
        disks = compare_disks(launch, groups, record)
        resume_point = choose_resume_point(launch, groups, disks, record)
        remaining = plan_remaining(launch, inputs, resume_point, record.warn)
    else:
        if not is_simulated:
            resume_point = gather_values(resume_point, groups.host_group)[0]
        remaining = plan_remaining(launch, inputs, resume_point)
    forecast = settle_levers(launch, inputs, groups)
    swap_folder = open_swap_folder(launch, inputs, groups, forecast.choice.levers)
    resolved = settle_rows_per_step(launch.plan.resolved, remaining.batching)
    recipe = forecast.choice.settle_stage(remaining.recipe)
    plan, run = RunPlan(recipe, inputs.shape, resolved, forecast.choice.levers), recipe.run
    usd_per_hour = (run.price_per_gpu_hour or 0.0) * layout.world_size
    stop = StopConditions(run.max_hours, run.max_cost, usd_per_hour, lambda: launch.interruption.is_asked)
    return Connected(
        groups, plan, remaining.batching, remaining.length, resume_point, forecast, stop, disks, swap_folder
    )


def settle_levers(launch: Launch, inputs: Inputs, groups: Groups) -> Forecast:
    """Collective over all ranks. GPU memory and free host memory differ from rank to rank; levers must not."""
    gpu = find_least(gather_values(inputs.gpu, groups.host_group))
    choice = choose_levers(launch.recipe, inputs.shape, gpu)
    forecast: Forecast = gather_values(Forecast(choice, gpu, inputs.is_known_gpu), groups.host_group)[0]
    return forecast


def open_swap_folder(launch: Launch, inputs: Inputs, groups: Groups, levers: Levers) -> Path | None:
    """Collective over all ranks. Returns the folder for what is offloaded to a disk, None where nothing is. What a
    machine lacks of what the levers need is raised on all ranks."""
    recipe = launch.recipe
    folder = name_folder(str(recipe.memory.nvme_path), launch.run_dir) if uses_disk(levers) else None
    steps_on_host = levers.offload_optimizer == "cpu" and not launch.options.pretend
    settle_cpu_flags()
    problem = find_missing_compiler() if steps_on_host else ""
    if folder is not None:
        launch.leftovers.callback(remove_rank_files, folder)
        swaps_states = "nvme" in (levers.offload_optimizer, levers.offload_param)
        problem = problem or (find_missing_operator() if swaps_states else "")
        problem = problem or open_folder(folder, launch.run_dir, *compute_swap_need(recipe, inputs.shape, levers))
    problems = [each for each in gather_values(problem, groups.host_group) if each]
    if problems:
        raise StartError(problems[0])
    return folder


def compare_disks(launch: Launch, groups: Groups, record: Record) -> Disks:
    """Collective over all ranks. Says whether machines share the run's folder and the data. Returns whose run folder is
    on whose disk."""
    gather = partial(gather_values, group=groups.host_group)
    disks = find_disks(launch.run_dir, groups.rank, gather)
    record.report(disks.describe("run.output_dir", "each rank saves its share where it is"))
    try:
        store = find_disks(launch.options.data.parent, groups.rank, gather)
        record.report(store.describe("data.store_dir", "each machine has prepared the data, with the same hash"))
    except OSError as error:  # raised on all ranks: prepared data may be on a disk that can only be read
        record.report(f"whether machines share data.store_dir is unknown, since it cannot be written: {error}")
    return disks


def choose_resume_point(launch: Launch, groups: Groups, disks: Disks, record: Record) -> ResumePoint:
    """Collective over all ranks. Rank 0 decides from its disk. Where machines have disks of their own, the checkpoint
    is brought together on all of them first."""
    if launch.options.dry_run:
        return FRESH
    rank, wanted = groups.rank, launch.options.resume
    restarts = report_restart(launch, record.warn) if rank == 0 else 0
    restarts = gather_values(restarts, groups.host_group)[0]
    if not disks.is_shared:
        collector = Collector(disks.owners, rank, groups.host_group)
        if rank in disks.owners:
            tidy_folder(launch.run_dir)
        if wanted == "auto" or restarts:
            collector.collect_newest(launch.run_dir, record.warn)
        elif wanted is not None and (problem := collector.collect(Path(os.path.expanduser(wanted)), disks.owners)):
            raise CheckpointError(f"{wanted} cannot be resumed from: {problem}")
    found: ResumePoint | Exception = FRESH
    if rank == 0:
        try:
            found = find_checkpoint(launch, restarts, record.warn)
        except (CheckpointError, OSError) as error:
            found = error
    found = gather_values(found, groups.host_group)[0]
    if isinstance(found, Exception):
        raise found
    return found


def _read_content(prepared: Path) -> str:
    """What cannot be read here is a value like another one: this rank must not end before the others compare theirs."""
    try:
        return hash_content(prepared)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"unreadable ({error})"


def list_facts(launch: Launch, shape: ModelShape) -> dict[str, Any]:
    """What all ranks must share. By the work of rows, groups share them: each rank counts it on its own files of
    transformers."""
    return {
        "processes per machine": os.environ.get("LOCAL_WORLD_SIZE"),
        "layout": str(launch.plan.resolved.layout),
        **list_settings(launch),
        "data": launch.options.data.name,
        "the content of the data": _read_content(launch.options.data),
        "the work of a token and of a pair": str(tuple(make_work(shape))),
        **list_versions(),
    }


def check_machines(launch: Launch, shape: ModelShape) -> None:
    """Collective over all ranks. Machines with other versions, recipes or data would train something else."""
    facts = list_facts(launch, shape)
    name = f"{socket.gethostname()} (machine {os.environ.get('GROUP_RANK', '0')})"
    compare_machines(gather_values((name, facts), dist.group.WORLD))
