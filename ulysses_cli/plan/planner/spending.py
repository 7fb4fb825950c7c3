"""Levers that spend memory and save time: large tiles on the GPU, early steps of the optimizer on the host. They take
the memory that is left when all other levers are chosen; the planner turns them off before it turns another lever on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ulysses_cli.plan.hardware import GIB, Gpu
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.zero.sub_groups import list_sub_groups
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.nouns import format_count
from ulysses_cli.plan.planner.fit import Fit, try_levers

SPENDING = ("large_tiles", "early_groups")  # what costs memory and no time, if there is some left
NO_ROOM = "the GPU has no room for them"
OFF = Levers()


def spend_what_is_left(job: Job, gpu: Gpu, levers: Levers, open_names: Iterable[str] = SPENDING) -> Levers:
    """Turns on what spends memory and saves time, as far as the job still fits. It is decided after all that frees
    memory."""
    most: dict[str, Any] = {
        "large_tiles": int(levers.tiled_mlp or levers.tiled_loss),
        "early_groups": 0 if _find_no_early(replace(job, levers=levers)) else count_groups(job) - 1,
    }
    for name in open_names:
        if name in SPENDING:
            levers = _spend_most(job, gpu, levers, name, most[name])
    return levers


def stop_spending(levers: Levers, open_names: Iterable[str] = SPENDING) -> Levers:
    """Turns off what spends memory, of `open_names`."""
    spent: dict[str, Any] = {name: getattr(OFF, name) for name in SPENDING if name in open_names}
    return replace(levers, **spent)


def keep_spending(job: Job, gpu: Gpu, levers: Levers) -> Levers:
    """`levers` with what the job spends, as far as it then still fits."""
    for name in SPENDING:
        given: dict[str, Any] = {name: getattr(job.levers, name)}
        fit = try_levers(job, gpu, replace(levers, **given))
        levers = replace(levers, **given) if fit is not None and fit.verdict == "fits" else levers
    return levers


def _spend_most(job: Job, gpu: Gpu, levers: Levers, name: str, most: int) -> Levers:
    """The largest value of a lever, up to `most`, with which the job fits."""

    def spend(value: int) -> Levers:
        spent: dict[str, Any] = {name: type(getattr(OFF, name))(value)}
        return replace(levers, **spent)

    def holds(value: int) -> bool:
        fit = try_levers(job, gpu, spend(value))
        return fit is not None and fit.verdict == "fits"

    if not most or holds(most):
        return spend(most)
    low, high = 0, most  # of which `low` is as it was
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return spend(low)


def count_groups(job: Job) -> int:
    return len(list_sub_groups(job.weights, job.world_size, job.engine.sub_group))


def _find_no_early(job: Job) -> str:
    """Why no group of the optimizer could step early, or ''."""
    if job.levers.offload_optimizer != "cpu":
        return "the optimizer is not in host memory"
    if job.zero_stage != 3:
        return f"stage {job.zero_stage} steps all weights at once"
    return "a rank's weights are one group" if count_groups(job) == 1 else ""


def explain_spending(job: Job, gpu: Gpu, name: str, fit: Fit) -> str:
    value, levers = getattr(job.levers, name), job.levers
    if name == "large_tiles":
        if not levers.tiled_mlp and not levers.tiled_loss:
            return "nothing is tiled"
        return f"the peak is {fit.gpu_peak_bytes / GIB:.1f} of {gpu.memory_bytes / GIB:.1f} GiB" if value else NO_ROOM
    if reason := _find_no_early(job):
        return reason
    room = f"of {format_count(count_groups(job), 'group')}; the host has room for copies, from which they are undone"
    return f"{value} {room}" if value else "the host has no room for copies"
