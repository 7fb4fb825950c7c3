"""The ledger: bytes per rank on the GPU and per node on the host, by phase and by line.

A phase is as large as its fullest snapshot, and the lines of a snapshot add up to it. Each line is a function in
plan/ledger/. Takes a Job, returns values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ulysses_cli.plan.ledger import device
from ulysses_cli.plan.ledger.host import compute_host_uncertainty, list_host_phases
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.memory_snapshot import Lines, MemorySnapshot
from ulysses_cli.plan.ledger.snapshots import walk_snapshots

PHASES = ("load", "forward", "backward", "optimizer_step", "evaluation", "save")


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
        own = device.DEVICE_LINES
        return max(sum(n for name, n in snap.lines.items() if name not in own) for snap in self.phases.values())

    @cached_property
    def host_peak_bytes(self) -> int:
        return max(sum(lines.values()) for lines in self.host_phases.values())

    @cached_property
    def host_uncertainty_bytes(self) -> int:
        return compute_host_uncertainty(max(self.host_phases.values(), key=lambda lines: sum(lines.values())))

    @cached_property
    def uncertainty_bytes(self) -> int:
        return device.compute_uncertainty(self.peak.lines)


def compute_ledger(job: Job, *, expandable_segments: bool = True) -> Ledger:
    # what the GPU holds besides torch's tensors grows with them: it is added at the end
    fullest: dict[str, MemorySnapshot] = {}
    sizes = dict.fromkeys(PHASES, -1)
    for snapshot in walk_snapshots(job):
        size = snapshot.num_bytes
        if size > sizes[snapshot.phase]:
            sizes[snapshot.phase], fullest[snapshot.phase] = size, snapshot
    phases = {
        phase: _complete(job, fullest[phase], expandable=expandable_segments) for phase in PHASES if phase in fullest
    }
    allocated = max(sizes.values())
    fragmentation = {
        "expandable_segments": device.compute_allocator(job, allocated, expandable=True),
        "fixed_segments": device.compute_allocator(job, allocated, expandable=False),
    }
    return Ledger(phases, list_host_phases(job, phases), fragmentation)


def _complete(job: Job, snapshot: MemorySnapshot, *, expandable: bool) -> MemorySnapshot:
    """Adds what the GPU holds besides torch's tensors, and leaves out lines that are zero."""
    lines = {name: size for name, size in snapshot.lines.items() if size}
    lines["allocator"] = device.compute_allocator(job, sum(lines.values()), expandable=expandable)
    lines["cuda_context"] = device.compute_context(job)
    if job.world_size > 1:
        lines["nccl"] = device.compute_nccl(job)
    return MemorySnapshot(snapshot.phase, snapshot.name, lines)
