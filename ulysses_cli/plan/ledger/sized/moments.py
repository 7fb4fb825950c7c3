"""The fullest moment of each phase of a run on sizes, with what a GPU holds besides torch's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ulysses_cli.plan.ledger import device
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.memory_snapshot import MemorySnapshot
from ulysses_cli.plan.ledger.sized.ranks import find_fullest_ranks
from ulysses_cli.plan.ledger.sized.step import run_step
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.sizes.tensor import UnknownOperator


def find_moments(recipe: Recipe, job: Job, config: Mapping[str, Any]) -> dict[str, MemorySnapshot]:
    """Of each phase, that of the rank which is fullest then. Raises UnknownOperator, also where the model's code asks
    for what nobody has foreseen."""
    found: dict[str, MemorySnapshot] = {}
    for rank in find_fullest_ranks(job):
        try:
            step = run_step(recipe, job, rank, config, with_lines=True)
        except UnknownOperator:
            raise
        except Exception as error:
            raise UnknownOperator(f"its code ends with {type(error).__name__}: {error}") from error
        for phase, moment in step.snapshots.items():
            if phase not in found or moment.num_bytes > found[phase].num_bytes:
                found[phase] = moment
    return {phase: moment._replace(lines=_complete(job, moment)) for phase, moment in found.items()}


def _complete(job: Job, moment: MemorySnapshot) -> dict[str, int]:
    lines = {**moment.lines, "cublas_workspace": device.compute_cublas(job)}
    lines["allocator"] = sum(lines.values()) // 100
    lines["cuda_context"] = device.compute_context(job)
    return {**lines, "nccl": device.compute_nccl(job)} if job.world_size > 1 else lines
