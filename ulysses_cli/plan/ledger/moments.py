"""The fullest moment of each phase of a job, on the ranks that need most memory: puts together what tensors take and
what an engine holds, and lists its lines. Runs on sizes and walks of engines are kept: one serves all jobs that
differ in nothing that it can feel, such as the number of ranks, or how many layers are offloaded."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, NamedTuple

from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger.depth import Depth, Stack, Turn, Window, choose_depth, join_path, split_path
from ulysses_cli.plan.ledger.hooks import (
    FORWARD,
    RECOMPUTED,
    find_part,
    join_lines,
    name_moment,
)
from ulysses_cli.plan.ledger.job import EngineSettings, Job, MemorySnapshot
from ulysses_cli.plan.ledger.kept import Kept, KeptOnDisk
from ulysses_cli.plan.ledger.stage3 import ShardedEngine, ShardSettings
from ulysses_cli.plan.ledger.stage_1_and_2 import WholeEngine
from ulysses_cli.plan.ledger.step import DTYPES, Recording, SizedRun, alone, read_stack
from ulysses_cli.plan.ledger.walk import LOAD, SECOND_PASS, EngineBytes, EngineMeter, EngineWalk, LayersDiffer, Recorded
from ulysses_cli.plan.ledger.weights import get_weights, size_prefetch
from ulysses_cli.plan.rows.ring import count_held_keys, deal_row, list_dearest
from ulysses_cli.plan.sizes.autograd import GRADIENT
from ulysses_cli.plan.sizes.sources import ModelSources
from ulysses_cli.plan.sizes.tensor import Running, Tag


def find_fullest_ranks(job: Job) -> list[int]:
    """Under ZeRO-3, the first one whose share of the work is the largest. Below it the last rank, which holds the
    gradients of the last layers, computed first, the one before, which may keep more of them a little later, and the
    one that needs most for its own in the end; and of each one's group the one with the largest share."""
    widest, last, size = _find_widest(job), job.world_size - 1, job.layout.sp_size
    if job.zero_stage == 3:
        return [widest[0]]
    ranks = [last, *([last - 1] if last else []), _find_most_kept(job)]
    others = [rank - rank % size + widest[0] for rank in ranks if rank % size not in widest]
    return [*dict.fromkeys((*ranks, *others))]


def _find_most_kept(job: Job) -> int:
    """A rank keeps the whole gradient of each weight of which it owns a part. Where gradients leave for the host, it
    takes the norm of each part in float64."""
    trained, kept, start = get_weights(job).trained, Counter[int](), 0
    share = -(-sum(trained) // job.world_size)
    for size in trained:
        end = start + size
        for rank in range(start // share, (end - 1) // share + 1):
            part = min(end, (rank + 1) * share) - max(start, rank * share)
            kept[rank] = kept[rank] + size if job.levers.offload_optimizer == "none" else max(kept[rank], part)
        start = end
    return max(kept, key=lambda rank: kept[rank])


def _find_widest(job: Job) -> list[int]:
    """Of an sp group, the ranks with the most key/value heads in a chunk, since heads may not divide evenly over ranks;
    on a ring, of the shares that hold most keys at once."""
    shape, layout, size = job.shape, job.layout, job.layout.ulysses_size
    chunks = _load_heads().plan_heads(shape.num_heads, shape.num_kv_heads, size, job.levers.head_chunks).chunks
    heads = [max(chunk.keys[rank].num_heads for chunk in chunks) for rank in range(size)]
    (lengths, shared), window = (
        list_dearest(job.max_length, 1, job.num_branches),
        shape.window_counts[0][0],
    )
    order = deal_row(lengths, job.make_ring(), shared)
    keys = [count_held_keys(lengths, order, window, rank) for rank in range(layout.ring_size)]
    return [
        outer * size + inner
        for outer in range(layout.ring_size)
        for inner in range(size)
        if (keys[outer], heads[inner]) == (max(keys), max(heads))
    ]


@cache
def _load_heads() -> Any:
    return ModelSources().load_own("ulysses_cli.train.attention.heads")


# Work of the engine at no module.
WORKS = {
    "step": "the optimizer's work",
    "end backward": "the last gradients leave",
    "end evaluation": "its end",
    "save": "weights are gathered one by one",
}


class Total(NamedTuple):
    """The bytes of a moment, the event that is the last before it, and what the engine holds then."""

    num_bytes: int
    at: int
    turn: Turn
    holding: EngineBytes


class Joined:
    def __init__(self, recorded: Recorded, depth: Depth, walk: EngineWalk) -> None:
        self.recorded, self.depth = recorded, depth
        self.walk = walk
        self.turns: dict[str, dict[Turn, tuple[Window, int]]] = {}
        for phase in recorded.phases:
            self.turns[phase] = dict(self._list_turns(phase))

    def _list_totals(self, phase: str) -> Iterator[Total]:
        alike, recorded = _group_layers(self.turns[phase]), self.recorded
        for holding in self.walk.holdings[phase]:
            for turn in _list_highest(holding, alike):
                window, base = self.turns[phase][turn]
                at = window.marks[holding.mark].at
                end = window.marks[holding.mark + 1].at if holding.mark + 1 < len(window.marks) else window.end
                if holding.after:
                    at = recorded.find_fullest(min(at + 1, end), end)
                elif holding.is_added:
                    at = min(at + 1, end)
                yield Total(base + recorded.levels[at] + holding.num_bytes, at, turn, holding)

    @cached_property
    def peaks(self) -> dict[str, Total]:
        return {
            phase: max(totals, key=lambda total: total.num_bytes)
            for phase in self.turns
            if (totals := [*self._list_totals(phase)])
        }

    def measure_parts(self, without: Collection[Tag]) -> dict[tuple[str, str, int | None], int]:
        """The most bytes by phase, part of the model and layer, without the engine's of these tags."""
        parts: dict[tuple[str, str, int | None], int] = {}
        holding: EngineBytes | None = None
        held = 0
        for phase, turns in self.turns.items():
            for total in self._list_totals(phase):
                if total.holding is not holding:  # those of one holding come together
                    holding = total.holding
                    held = sum(holding.tags.get(tag, 0) for tag in without)
                key = phase, find_part(turns[total.turn][0].marks[holding.mark].path), total.turn.layer
                size = total.num_bytes - held
                if size > parts.get(key, 0):
                    parts[key] = size
        return parts

    def _list_turns(self, phase: str) -> Iterator[tuple[Turn, tuple[Window, int]]]:
        """Each turn's window, and by how much tensors take more when it begins than in the run of a few layers."""
        levels, windows = self.recorded.levels, self.recorded.phases[phase]
        now = levels[windows[0].first]
        if phase == "backward":
            window, base = list(self.turns["forward"].values())[-1]
            now = base + levels[window.end]
        for window, turn in self.depth.list_windows(phase, windows):
            base = now - levels[window.first]
            yield turn, (window, base)
            now = base + levels[window.end]

    def measure(self) -> dict[str, int]:
        """The bytes of each phase's fullest moment."""
        found = {phase: total.num_bytes for phase, total in self.peaks.items()}
        second = found.pop(LOAD + SECOND_PASS, 0)
        return {**found, LOAD: max(found.get(LOAD, 0), second)}

    def describe(self) -> dict[str, MemorySnapshot]:
        moments = {
            phase: self._describe(phase, total.at, total.holding._replace(turn=total.turn))
            for phase, total in self.peaks.items()
        }
        second = moments.pop(LOAD + SECOND_PASS, None)
        if second is not None and second.num_bytes > moments[LOAD].num_bytes:
            moments[LOAD] = second._replace(phase=LOAD)
        return moments

    def _describe(self, phase: str, at: int, holding: EngineBytes) -> MemorySnapshot:
        recorded, window = self.recorded, self.turns[phase][holding.turn][0]
        tags = recorded.held + recorded.count_tags(0, recorded.phases[phase][0].first)
        if phase == "backward":
            tags = recorded.held + recorded.count_tags(0, recorded.phases["forward"][0].first)
            self._add_windows(tags, "forward", None)
        self._add_windows(tags, phase, holding)
        for found in (recorded.count_tags(window.first, at), holding.tags):
            for tag, size in found.items():
                tags[tag] += size
        kind, path, before = self._find_last(phase, at, holding)
        own, layer = window.layer, holding.turn.layer
        if own is not None and layer is not None:
            path = join_path(split_path(path, own), layer)
        mark = window.marks[holding.mark]
        if holding.starts:
            name = "weights are made, and the engine starts"
        elif not holding.after and mark.work in WORKS:
            name = WORKS[mark.work]
        else:
            begins = f"before the {phase.removesuffix(SECOND_PASS).replace('_', ' ')}"
            name = name_moment((kind, path)) if before == phase else begins
        return MemorySnapshot(phase, name, join_lines(tags, phase))

    def _add_windows(self, tags: Counter[Tag], phase: str, until: EngineBytes | None) -> None:
        """What changes in the windows of a phase, up to the one of this holding."""
        for turn, (window, _) in self.turns[phase].items():
            if until is not None and turn == until.turn:
                return
            for tag, size in self.recorded.count_tags(window.first, window.end).items():
                tags[tag] += size

    def _find_last(self, phase: str, at: int, holding: EngineBytes) -> tuple[str, str, str]:
        """Kind of work, module and phase of what the fullest moment comes with: a tensor, or work of the engine."""
        mark = self.turns[phase][holding.turn][0].marks[holding.mark]
        if not holding.after:
            passes = RECOMPUTED if mark.is_forward else GRADIENT
            return passes if phase == "backward" else FORWARD, mark.path, phase
        if not at:
            return "", "", ""
        _, before, (kind, path) = self.recorded.events[at - 1]
        return kind, path, before


Alike = dict[int, list[tuple[list[int], list[Turn]]]]


def _group_layers(turns: Mapping[Turn, tuple[Window, int]]) -> Alike:
    """By work, the layers for which one window stands, lowest first, with their turns."""
    groups: dict[tuple[int, int], list[tuple[int, Turn]]] = {}
    for turn, (window, _) in turns.items():
        if turn.layer is not None:
            groups.setdefault((window.work, window.first), []).append((turn.layer, turn))
    alike: Alike = {}
    for (work, _), group in groups.items():
        layers, own = zip(*sorted(group), strict=True)
        alike.setdefault(work, []).append(([*layers], [*own]))
    return alike


def _list_highest(holding: EngineBytes, alike: Alike) -> Iterator[Turn]:
    """Of each group of layers with the same tensors, the highest one that the holding is of: in the lower ones tensors
    take no more."""
    last = holding.turn.layer
    if holding.first is None or last is None:
        yield holding.turn
        return
    for layers, turns in alike[holding.work]:
        at = bisect_right(layers, last) - 1
        if at >= 0 and layers[at] >= holding.first:
            yield turns[at]


STACKS, RECORDINGS, WALKS = Kept[Stack](64), Kept[Recording](256), Kept[EngineWalk | None](256)


def run_step(job: Job, rank: int, *, runs_all: bool = False) -> dict[str, MemorySnapshot]:
    """The fullest moment of each phase."""
    return join(job, rank, runs_all=runs_all).describe()


def join(job: Job, rank: int, *, runs_all: bool = False) -> Joined:
    """What tensors take and what the engine holds. Raises UnknownOperator for what has no sizes."""
    for depth in list_depths(job, runs_all=runs_all):
        recording = record(job, rank, depth)
        joined = join_walk(job, rank, recording, depth) if recording.recorded.is_even(depth) else None
        if joined is not None:
            return joined
    raise AssertionError("where all layers run, none stands for another")


def list_depths(job: Job, *, runs_all: bool = False, is_sample: bool = False) -> Iterable[Depth]:
    """Layers that are alike run once, but for `runs_all`; all, where that does not do. `is_sample`: of stage 3, fewer
    layers, which show about as much; below it gradients leave in the backward of the next layers."""
    stack = get_stack(job).tell_apart(job.levers.saved_layers)
    every = tuple(range(len(stack.kinds)))
    whole = Depth(every, every)
    is_partial = job.lora is not None and not isinstance(job.lora.target_modules, str)
    if runs_all:
        return [whole]
    few = choose_depth(stack, job.levers.offloaded_layers, get_weights(job).first_trained if is_partial else 0)
    if is_sample and job.zero_stage == 3 and not is_partial:
        sample = choose_depth(stack, is_sample=True, ends_at_first=job.lora is not None)
        return dict.fromkeys((sample, few, whole))
    return dict.fromkeys((few, whole))


def get_stack(job: Job) -> Stack:
    return STACKS.get(repr(job.shape.config), lambda: read_stack(job))


def join_walk(job: Job, rank: int, recording: Recording, depth: Depth) -> Joined | None:
    """None: a layer lacks a module of the one that runs for it."""
    walk = WALKS.get(*_plan_walk(job, rank, recording, depth))
    return None if walk is None else Joined(recording.recorded, depth, walk)


def record(job: Job, rank: int, depth: Depth, *, step_alone: bool = False) -> Recording:
    return RECORDINGS.get(*_plan_recording(job, rank, depth, step_alone=step_alone))


def _plan_recording(job: Job, rank: int, depth: Depth, *, step_alone: bool) -> tuple[Hashable, Callable[[], Recording]]:
    """What the tensors of a run depend on, and how it is run."""
    levers = replace(job.levers, offload_optimizer="none", offload_param="none", early_groups=0)
    first_saved = len(depth.like) - levers.saved_layers
    levers = replace(
        levers,
        offloaded_layers=sum(number < levers.offloaded_layers for number in depth.live),
        saved_layers=sum(number >= first_saved for number in depth.live),
    )
    own = replace(forget_engine(job), levers=levers)
    place = rank % job.layout.sp_size
    stack = get_stack(job)
    kinds = tuple(stack.kinds[number] for number in depth.live)

    def run() -> Recording:
        with alone():
            return SizedRun(own, place, depth, stack).record(step_alone=step_alone)

    return (own, repr(job.shape.config), place, kinds, depth.is_whole, step_alone), run


def forget_engine(job: Job) -> Job:
    """Without what the engine alone reads."""
    return job.change(
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
    settings, stage = read_engine_settings(job, rank)
    is_sharded, phases = stage == 3, recording.recorded.phases

    def walk() -> EngineWalk | None:
        with alone():
            Running.meter = EngineMeter()
            modules, weights = depth.expand(recording.modules, recording.weights)
            engine = ShardedEngine(modules, weights, settings) if is_sharded else WholeEngine(weights, settings, stage)
            try:
                return EngineWalk(phases, depth, engine, settings.micro_steps)
            except LayersDiffer:
                return None

    model = repr(job.shape.config), repr(job.lora), job.quantized, job.dtype_bytes, job.is_on_cpu
    return (model, settings, stage, recording.recorded.list_work(depth)), walk


def read_engine_settings(job: Job, rank: int) -> tuple[ShardSettings, int]:
    """An engine's settings, and its stage."""
    engine, levers, replicas = job.engine, job.levers, job.layout.dp_replicate_size
    prefetch, live = size_prefetch(get_weights(job), leaf_layers=levers.leaf_layers)
    are_alike = job.zero_stage == 3 and replicas == 1 and levers.offload_optimizer != "cpu"
    settings = ShardSettings(
        world_size=job.world_size,
        replica_size=job.layout.replica_size,
        rank=rank,
        weights_on_host=levers.offload_param != "none",
        states_on_host=levers.offload_optimizer != "none",
        states_on_disk=levers.offload_optimizer == "nvme",
        optimizer=job.optim,
        reduce_bucket=engine.reduce_bucket,
        prefetch_bucket=prefetch if engine.prefetch_bucket is None else engine.prefetch_bucket,
        max_live=live if engine.max_live is None else engine.max_live,
        max_reuse_distance=engine.max_reuse_distance,
        persistence_threshold=engine.persistence_threshold,
        sub_group=engine.sub_group,
        micro_steps=1 if are_alike else min(2, job.accumulation),
        sent=DTYPES[engine.communication_bytes],
        kept=DTYPES[engine.gradient_bytes],
    )
    return settings, job.zero_stage


def find_moments(job: Job) -> dict[str, MemorySnapshot]:
    """Of each phase, that of the rank which is fullest then. Raises UnknownOperator for what has no sizes."""
    return MOMENTS.get(job, None, lambda: _find_moments(job))


def _pack_moments(moments: Mapping[str, MemorySnapshot]) -> dict[str, Any]:
    return {phase: (moment.name, dict(moment.lines)) for phase, moment in moments.items()}


def _unpack_moments(packed: Mapping[str, Any]) -> dict[str, MemorySnapshot]:
    return {phase: MemorySnapshot(phase, name, lines) for phase, (name, lines) in packed.items()}


MOMENTS = KeptOnDisk("moments", 256, _pack_moments, _unpack_moments)


def _find_moments(job: Job) -> dict[str, MemorySnapshot]:
    found: dict[str, MemorySnapshot] = {}
    for rank in find_fullest_ranks(job):
        for phase, moment in run_step(job, rank).items():
            if phase not in found or moment.num_bytes > found[phase].num_bytes:
                found[phase] = moment
    return found
