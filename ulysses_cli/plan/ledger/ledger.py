"""The ledger: bytes per rank on the GPU and per node on the host, by phase and by line. A phase is as large as its
fullest moment, and the lines of a moment add up to it. Takes a Job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from ulysses_cli.plan.ledger import machine
from ulysses_cli.plan.ledger.hooks import MADE
from ulysses_cli.plan.ledger.job import Job, Lines, MemorySnapshot
from ulysses_cli.plan.ledger.machine import compute_host_uncertainty, list_host_phases
from ulysses_cli.plan.ledger.moments import find_moments
from ulysses_cli.plan.ledger.parts import weigh, weigh_least
from ulysses_cli.plan.problem import Problem, RecipeError
from ulysses_cli.plan.sizes.tensor import UnknownOperator

PHASES = ("load", "forward", "backward", "optimizer_step", "evaluation", "save")
TENSORS = "tensors"


@dataclass(frozen=True)
class Ledger:
    """The fullest snapshot of every phase. Bytes of a rank on the GPU, and of a node on the host."""

    phases: dict[str, MemorySnapshot]
    host_phases: dict[str, Lines]
    fragmentation: dict[str, int]

    @cached_property
    def peak(self) -> MemorySnapshot:
        return max(self.phases.values(), key=lambda snapshot: snapshot.num_bytes)

    @property
    def gpu_peak_bytes(self) -> int:
        return self.peak.num_bytes

    @property
    def gpu_allocated_bytes(self) -> int:
        """What torch.cuda.max_memory_allocated would say."""
        own = machine.DEVICE_LINES
        return max(sum(n for name, n in snap.lines.items() if name not in own) for snap in self.phases.values())

    @cached_property
    def host_peak_bytes(self) -> int:
        return max(sum(lines.values()) for lines in self.host_phases.values())

    @cached_property
    def host_uncertainty_bytes(self) -> int:
        return compute_host_uncertainty(max(self.host_phases.values(), key=lambda lines: sum(lines.values())))

    @cached_property
    def uncertainty_bytes(self) -> int:
        return machine.compute_uncertainty(self.peak.lines)


Answer = TypeVar("Answer")


def measure_ledger(job: Job) -> Ledger:
    """What a job needs, as its own code takes it. Raises RecipeError where a part of the job has no sizes."""
    moments = _run(find_moments, job)
    return complete_ledger(job, {phase: _add_cublas(job, moment) for phase, moment in moments.items()})


def weigh_ledger(job: Job) -> Ledger:
    """About the same, of a step alone, for a search."""
    return _complete_sizes(job, _run(weigh, job))


def weigh_least_ledger(job: Job) -> Ledger:
    """What jobs with the same states need at least (weigh_least)."""
    return _complete_sizes(job, {"backward": _run(weigh_least, job)})


def _complete_sizes(job: Job, phases: Mapping[str, int]) -> Ledger:
    lines = {"cublas_workspace": machine.compute_cublas(job)}
    moments = {phase: MemorySnapshot(phase, "", {TENSORS: size, **lines}) for phase, size in phases.items()}
    return complete_ledger(job, moments)


def _run(method: Callable[[Job], Answer], job: Job) -> Answer:
    """The model's code may also ask for what nobody has foreseen."""
    try:
        return method(job)
    except RecipeError:
        raise
    except Exception as error:
        why = (
            str(error) if isinstance(error, UnknownOperator) else f"its code ends with {type(error).__name__}: {error}"
        )
        message = f"the memory of {job.shape.name}, a model of type {job.shape.model_type}, is not known: {why}"
        hint = "estimate-memory --trace runs a step of it on tensors without data; it takes minutes"
        raise RecipeError([Problem("model.name_or_path", message, hint)]) from error


def _add_cublas(job: Job, moment: MemorySnapshot) -> MemorySnapshot:
    """No product has run when weights are made."""
    size = 0 if MADE[1] in moment.lines else machine.compute_cublas(job)
    return moment._replace(lines={**moment.lines, "cublas_workspace": size})


def measure_alone(job: Job) -> dict[str, MemorySnapshot]:
    """Each phase's fullest moment of a model of which weights are not known, on the GPU alone."""
    return {phase: _add_device_lines(job, moment) for phase, moment in _run(find_moments, job).items()}


def _add_device_lines(job: Job, moment: MemorySnapshot) -> MemorySnapshot:
    """Without the host, of which weights tell."""
    lines = {**moment.lines, "cublas_workspace": machine.compute_cublas(job)}
    lines["allocator"] = sum(lines.values()) // 100
    lines["cuda_context"] = machine.compute_context(job)
    return moment._replace(lines={**lines, "nccl": machine.compute_nccl(job)} if job.world_size > 1 else lines)


def complete_ledger(job: Job, fullest: Mapping[str, MemorySnapshot]) -> Ledger:
    """Adds what the GPU holds besides torch's tensors, and the host."""
    phases = {phase: _complete(job, fullest[phase]) for phase in PHASES if phase in fullest}
    allocated = max(snapshot.num_bytes for snapshot in fullest.values())
    fragmentation = {
        "expandable_segments": machine.compute_allocator(job, allocated, expandable=True),
        "fixed_segments": machine.compute_allocator(job, allocated, expandable=False),
    }
    in_host = [phase for phase in PHASES if phase != "evaluation" or job.evaluates]
    return Ledger(phases, list_host_phases(job, in_host), fragmentation)


def _complete(job: Job, snapshot: MemorySnapshot) -> MemorySnapshot:
    """Leaves out lines that are zero."""
    lines = {name: size for name, size in snapshot.lines.items() if size}
    lines["allocator"] = machine.compute_allocator(job, sum(lines.values()), expandable=True)
    lines["cuda_context"] = machine.compute_context(job)
    if job.world_size > 1:
        lines["nccl"] = machine.compute_nccl(job)
    return snapshot._replace(lines=lines)
