"""Second stage of a rank: connects it to the other ranks. All ranks then share one resume point and one plan."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ulysses_cli.data.rows import hash_content
from ulysses_cli.data.steps import Batching
from ulysses_cli.plan.ledger.zero.swapping import compute_swap_need
from ulysses_cli.plan.levers import Levers, uses_disk
from ulysses_cli.plan.planner.lever_choice import choose_levers
from ulysses_cli.plan.resolved import RunPlan
from ulysses_cli.run_folder.archive import CheckpointError, tidy_folder
from ulysses_cli.run_folder.resume import FRESH, ResumePoint
from ulysses_cli.train.assembly.run import RunLength
from ulysses_cli.train.checkpoint.collection import Collector
from ulysses_cli.train.guard.stop_conditions import StopConditions
from ulysses_cli.train.inputs import (
    Inputs,
    Launch,
    count_machines,
    find_checkpoint,
    list_settings,
    plan_remaining,
    report_restart,
    settle_rows_per_step,
)
from ulysses_cli.train.optimizer.swap_folder import name_folder, open_folder, remove_rank_files
from ulysses_cli.train.processes.consistency import compare_machines, gather_values
from ulysses_cli.train.processes.device import StartError, find_least
from ulysses_cli.train.processes.disks import Disks, find_disks
from ulysses_cli.train.processes.groups import Groups, make_groups
from ulysses_cli.train.processes.rank_store import join_ranks
from ulysses_cli.train.processes.requirements import find_missing_compiler, find_missing_operator, settle_cpu_flags
from ulysses_cli.train.telemetry.forecast import Forecast
from ulysses_cli.train.telemetry.record import Record
from ulysses_cli.train.telemetry.run_file import list_versions

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


def connect(launch: Launch, inputs: Inputs, record: Record) -> Connected:
    """Collective over all ranks."""
    record.set_phase("meeting the other ranks")
    layout, is_simulated = inputs.resolved.layout, launch.options.pretend
    if is_simulated:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.world_size)
    else:
        join_ranks(inputs.device, START_TIMEOUT)
        check_machines(launch, inputs)
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
    resolved = settle_rows_per_step(inputs.resolved, remaining.batching)
    plan = RunPlan(remaining.recipe, inputs.shape, resolved, forecast.choice.levers)
    run = remaining.recipe.run
    usd_per_hour = (run.price_per_gpu_hour or 0.0) * layout.world_size
    stop = StopConditions(run.max_hours, run.max_cost, usd_per_hour, lambda: launch.interruption.is_asked)
    return Connected(
        groups, plan, remaining.batching, remaining.length, resume_point, forecast, stop, disks, swap_folder
    )


def settle_levers(launch: Launch, inputs: Inputs, groups: Groups) -> Forecast:
    """Collective over all ranks. GPU memory and free host memory differ from rank to rank; levers must not."""
    gpu = find_least(gather_values(inputs.gpu, groups.host_group))
    choice = choose_levers(launch.loaded.recipe, inputs.shape, gpu)
    forecast: Forecast = gather_values(Forecast(choice, gpu, inputs.is_known_gpu), groups.host_group)[0]
    return forecast


def open_swap_folder(launch: Launch, inputs: Inputs, groups: Groups, levers: Levers) -> Path | None:
    """Collective over all ranks. Returns the folder for what is offloaded to a disk, None where nothing is. What a
    machine lacks of what the levers need is raised on all ranks."""
    recipe = launch.loaded.recipe
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


def check_machines(launch: Launch, inputs: Inputs) -> None:
    """Collective over all ranks. Machines with other versions, recipes or data would train something else."""
    facts = {
        "processes per machine": os.environ.get("LOCAL_WORLD_SIZE"),
        "layout": str(inputs.resolved.layout),
        **list_settings(launch),
        "data": launch.options.data.name,
        "the content of the data": _read_content(launch.options.data),
        **list_versions(),
    }
    name = f"{socket.gethostname()} (machine {os.environ.get('GROUP_RANK', '0')})"
    compare_machines(gather_values((name, facts), dist.group.WORLD))
