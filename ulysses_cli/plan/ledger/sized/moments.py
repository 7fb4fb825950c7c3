"""The fullest moment of each phase of a job. Runs on sizes and walks of engines are kept: one serves all jobs that
differ in nothing that it can feel, such as the number of ranks, or how many layers are offloaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, TypeVar

from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger import device as gpu
from ulysses_cli.plan.ledger.job import EngineSettings, Job, make_job
from ulysses_cli.plan.ledger.memory_snapshot import MemorySnapshot
from ulysses_cli.plan.ledger.sized.depth import Depth, Stack, choose_depth, describe_stack, find_layers
from ulysses_cli.plan.ledger.sized.joining import Joined
from ulysses_cli.plan.ledger.sized.lower_stages import WholeEngine
from ulysses_cli.plan.ledger.sized.ranks import find_fullest_ranks
from ulysses_cli.plan.ledger.sized.sharding import ShardedEngine, ShardSettings
from ulysses_cli.plan.ledger.sized.step import DTYPES, Recording, SizedRun, alone, make_bare_model
from ulysses_cli.plan.ledger.sized.walk import EngineMeter, EngineWalk, LayersDiffer
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.sizes.tensor import Running, UnknownOperator

T = TypeVar("T")


class Kept:
    """The last values that were made, by what they were made of."""

    def __init__(self, most: int) -> None:
        self.most, self.values = most, OrderedDict[Hashable, Any]()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self.values:
            self.values[key] = make()
            while len(self.values) > self.most:
                self.values.popitem(last=False)
        self.values.move_to_end(key)
        found: T = self.values[key]
        return found


STACKS, RECORDINGS, WALKS = Kept(64), Kept(256), Kept(256)


def measure_step(recipe: Recipe, shape: ModelShape, levers: Levers, rank: int) -> dict[str, int]:
    """The peak of each phase on one rank, as tensors without data have it."""
    return join(make_job(recipe, shape, levers), rank).measure()


def run_step(job: Job, rank: int, *, runs_all: bool = False) -> dict[str, MemorySnapshot]:
    """The fullest moment of each phase."""
    return join(job, rank, runs_all=runs_all).describe()


def join(job: Job, rank: int, *, runs_all: bool = False) -> Joined:
    """What tensors take and what the engine holds. Layers that are alike run once, but for `runs_all`. Raises
    UnknownOperator for what has no sizes."""
    stack = STACKS.get(repr(job.shape.config), lambda: _find_stack(job))
    every = tuple(range(len(stack.kinds)))
    whole = Depth(every, every)
    for depth in [whole] if runs_all else [choose_depth(stack, job.levers.offloaded_layers), whole]:
        recording = RECORDINGS.get(*_plan_recording(job, rank, stack, depth))
        if not recording.recorded.is_even(depth):
            continue
        walk = WALKS.get(*_plan_walk(job, rank, recording, depth))
        if walk is not None:
            return Joined(recording.recorded, depth, walk)
    raise AssertionError("where all layers run, none stands for another")


def _find_stack(job: Job) -> Stack:
    with alone():
        layers = find_layers(make_bare_model(job))
        return Stack((), is_apart=True) if layers is None else describe_stack(list(layers))


def _plan_recording(job: Job, rank: int, stack: Stack, depth: Depth) -> tuple[Hashable, Callable[[], Recording]]:
    """What the tensors of a run depend on, and how it is run."""
    live = sum(number < job.levers.offloaded_layers for number in depth.live)
    levers = replace(job.levers, offload_optimizer="none", offload_param="none", early_groups=0, offloaded_layers=live)
    own = replace(_forget_engine(job), levers=levers)
    place = rank % job.layout.sp_size
    kinds = tuple(stack.kinds[number] for number in depth.live)

    def run() -> Recording:
        with alone():
            return SizedRun(own, place, depth).record()

    return (own, repr(job.shape.config), place, kinds, depth.is_whole), run


def _forget_engine(job: Job) -> Job:
    """Without what the engine alone reads."""
    return replace(
        job,
        layout=Layout(sp_size=job.layout.sp_size, ring_size=job.layout.ring_size),
        accumulation=1,
        optim="adamw",
        zero_stage=3 if job.zero_stage == 3 else 2,
        engine=EngineSettings(persistence_threshold=job.engine.persistence_threshold),
        gpus_per_node=8,
        async_save=False,
        document_tokens=None,
        has_disk=False,
    )


def _plan_walk(
    job: Job, rank: int, recording: Recording, depth: Depth
) -> tuple[Hashable, Callable[[], EngineWalk | None]]:
    """What the engine's bytes depend on, and how it is walked. None: a layer lacks a module of the one that runs for
    it."""
    is_sharded = job.zero_stage == 3
    micro_steps = 1 if is_sharded and job.layout.dp_replicate_size == 1 else min(2, job.accumulation)
    settings, stage = _read_settings(job, rank, micro_steps), job.zero_stage
    phases = recording.recorded.phases
    work = tuple(
        (phase, tuple((turn, window.work) for window, turn in depth.list_windows(phase, windows)))
        for phase, windows in phases.items()
    )

    def walk() -> EngineWalk | None:
        with alone():
            Running.meter = EngineMeter()
            modules, weights = depth.expand(recording.modules, recording.weights)
            engine = ShardedEngine(modules, weights, settings) if is_sharded else WholeEngine(weights, settings, stage)
            try:
                return EngineWalk(phases, depth, engine, micro_steps)
            except LayersDiffer:
                return None

    model = repr(job.shape.config), repr(job.lora), job.quantized, job.dtype_bytes, job.is_on_cpu
    return (model, settings, stage, work), walk


def _read_settings(job: Job, rank: int, micro_steps: int) -> ShardSettings:
    engine, levers = job.engine, job.levers
    return ShardSettings(
        world_size=job.world_size,
        replica_size=job.layout.replica_size,
        rank=rank,
        weights_on_host=levers.offload_param != "none",
        states_on_host=levers.offload_optimizer != "none",
        states_on_disk=levers.offload_optimizer == "nvme",
        optimizer=job.optim,
        reduce_bucket=engine.reduce_bucket,
        prefetch_bucket=engine.prefetch_bucket,
        max_live=engine.max_live,
        max_reuse_distance=engine.max_reuse_distance,
        persistence_threshold=engine.persistence_threshold,
        sub_group=engine.sub_group,
        micro_steps=micro_steps,
        sent=DTYPES[engine.communication_bytes],
        kept=DTYPES[engine.gradient_bytes],
    )


def find_moments(job: Job) -> dict[str, MemorySnapshot]:
    """Of each phase, that of the rank which is fullest then. Raises UnknownOperator, also where the model's code asks
    for what nobody has foreseen."""
    found: dict[str, MemorySnapshot] = {}
    for rank in find_fullest_ranks(job):
        try:
            moments = run_step(job, rank)
        except UnknownOperator:
            raise
        except Exception as error:
            raise UnknownOperator(f"its code ends with {type(error).__name__}: {error}") from error
        for phase, moment in moments.items():
            if phase not in found or moment.num_bytes > found[phase].num_bytes:
                found[phase] = moment
    return {phase: moment._replace(lines=_add_device_lines(job, moment)) for phase, moment in found.items()}


def _add_device_lines(job: Job, moment: MemorySnapshot) -> dict[str, int]:
    lines = {**moment.lines, "cublas_workspace": gpu.compute_cublas(job)}
    lines["allocator"] = sum(lines.values()) // 100
    lines["cuda_context"] = gpu.compute_context(job)
    return {**lines, "nccl": gpu.compute_nccl(job)} if job.world_size > 1 else lines
