"""Second stage of a rank: connects it to the other ranks. All ranks then share one resume point and one plan."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ulysses_cli.data.steps import Batching
from ulysses_cli.plan.resolved import RunPlan
from ulysses_cli.run_folder.resume import ResumePoint
from ulysses_cli.train.assembly.run import RunLength
from ulysses_cli.train.guard.stop_conditions import StopConditions
from ulysses_cli.train.inputs import Inputs, Launch, plan_remaining, settle_rows_per_step
from ulysses_cli.train.processes.consistency import compare_machines, gather_values
from ulysses_cli.train.processes.groups import Groups, make_groups
from ulysses_cli.train.processes.rank_store import join_ranks
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

    @property
    def is_finished(self) -> bool:
        """Nothing is left to do. The same on all ranks: the resume point is rank 0's."""
        point = self.resume_point
        return point.path is not None and point.step == self.length.num_steps == point.model_step

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
    resume_point = inputs.resume_point
    if not is_simulated:
        resume_point = gather_values(resume_point, groups.host_group)[0]
    remaining = plan_remaining(launch, inputs, resume_point)
    # GPU memory differs a little from rank to rank; levers must not
    forecast = gather_values(inputs.forecast, groups.host_group)[0]
    resolved = settle_rows_per_step(inputs.resolved, remaining.batching)
    plan = RunPlan(remaining.recipe, inputs.shape, resolved, forecast.choice.levers)
    run = remaining.recipe.run
    usd_per_hour = (run.price_per_gpu_hour or 0.0) * layout.world_size
    stop = StopConditions(run.max_hours, run.max_cost, usd_per_hour, lambda: launch.interruption.is_asked)
    return Connected(groups, plan, remaining.batching, remaining.length, resume_point, forecast, stop)


def check_machines(launch: Launch, inputs: Inputs) -> None:
    """Collective over all ranks. Machines with other versions, recipes or data would train something else."""
    facts = {
        "processes per machine": os.environ.get("LOCAL_WORLD_SIZE"),
        "layout": str(inputs.resolved.layout),
        "recipe": inputs.resolved.recipe_hash,
        "data": launch.options.data.name,
        **list_versions(),
    }
    name = f"{socket.gethostname()} (machine {os.environ.get('GROUP_RANK', '0')})"
    compare_machines(gather_values((name, facts), dist.group.WORLD))
