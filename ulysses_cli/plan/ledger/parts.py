"""About what a job needs, for a search that asks thousands of times: put together from few runs, of which each says
what the parts of a model take. A run of the very set follows where it counts (plan/planner/fit.py: confirm)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from ulysses_cli.plan.layout import Layout, list_divisors
from ulysses_cli.plan.ledger import states
from ulysses_cli.plan.ledger.hooks import GRADIENTS, LOGITS, MASTER, MOMENTS, PARAMETERS, SECOND
from ulysses_cli.plan.ledger.job import Job, is_indexable
from ulysses_cli.plan.ledger.kept import Kept, KeptOnDisk
from ulysses_cli.plan.ledger.moments import (
    find_fullest_ranks,
    forget_engine,
    join_walk,
    list_depths,
    read_engine_settings,
    record,
)
from ulysses_cli.plan.levers import Levers

IN_FLIGHT = 2  # offloaded layers whose saved tensors are on the GPU (train/memory/offload.py: MAX_LEAVING)
MOST_ALIKE = 8  # layers for which an engine that stands for others walks one that ran
SEVERAL, ALONE = Layout(dp_shard_size=8), Layout()
ALWAYS = (PARAMETERS, SECOND, GRADIENTS, MASTER, MOMENTS)
AT_HEAD = (LOGITS, "norm")
STACKED = ("forward", "backward")  # in which what layers left for the backward is there

Part = tuple[str, str]  # a phase, and a part of the model


class Parts(NamedTuple):
    """Of one run, by part, the most bytes beside what layers leave for the backward: `peaks` with all of that there,
    `lower` in the layers whose own is the last that is there. `saved`: that, by layer."""

    peaks: Mapping[Part, int]
    lower: Mapping[Part, int]
    saved: tuple[int, ...]


class Needs(NamedTuple):
    """Of a set of levers with no layer offloaded, the same by phase. `sums`: what so many layers leave."""

    peaks: Mapping[str, int]
    lower: Mapping[str, int]
    sums: tuple[int, ...]
    most_of_a_layer: int


def weigh(job: Job) -> dict[str, int]:
    """About the bytes of torch's tensors in each phase of a step."""
    needs = _compute_needs(job)
    in_flight = min(needs.sums[-1], IN_FLIGHT * needs.most_of_a_layer)
    stack = max(in_flight, needs.sums[-1] - needs.sums[min(job.levers.offloaded_layers, len(needs.sums) - 1)])
    phases = {phase: size + (stack if phase in STACKED else 0) for phase, size in needs.peaks.items()}
    return {phase: max(size, needs.lower.get(phase, 0) + in_flight) for phase, size in phases.items()}


def weigh_least(job: Job) -> int:
    """What no set with the same states, the same recomputation and the same MLPs in tiles takes less than, on any ring:
    what a rank holds between steps, and what layers leave where nothing is computed twice. That depends on a rank's
    tokens and not on how a row is shared, so a search for many layouts asks for few runs."""
    held = _count_held(job) if job.zero_stage == 3 else 0
    if job.levers.gradient_checkpointing is not False or job.num_branches:
        return held
    levers = Levers(gradient_checkpointing=False, tiled_mlp=job.levers.tiled_mlp, tiled_loss=True)
    alone = job.change(levers=levers, layout=ALONE, max_length=job.max_length // job.layout.sp_size)
    return held + _compute_needs(alone).sums[-1] if is_indexable(alone) else held


def count_offloaded(job: Job) -> int:
    """About the bytes that offloaded layers keep in host memory."""
    if not job.levers.offloaded_layers:
        return 0
    sums = _compute_needs(job).sums
    return sums[min(job.levers.offloaded_layers, len(sums) - 1)]


def _pack_parts(parts: Parts) -> list[Any]:
    peaks, lower = ([[*part, size] for part, size in sizes.items()] for sizes in parts[:2])
    return [peaks, lower, parts.saved]


def _unpack_parts(packed: list[Any]) -> Parts:
    peaks, lower = ({(phase, part): size for phase, part, size in sizes} for sizes in packed[:2])
    return Parts(peaks, lower, tuple(packed[2]))


NEEDS, PARTS = Kept[Needs](8192), KeptOnDisk("parts", 1024, _pack_parts, _unpack_parts)


def _compute_needs(job: Job) -> Needs:
    """Where the last layers save all: of each phase and layer what jobs take in which none and all of them do."""
    levers, num_layers = job.levers, job.shape.num_layers
    if not levers.saved_layers or not levers.gradient_checkpointing:
        return _compute_even_needs(job)
    some = _compute_even_needs(job.with_levers(replace(levers, saved_layers=0)))
    every = replace(levers, saved_layers=0, gradient_checkpointing=False, offloaded_layers=0)
    whole, first = _compute_even_needs(job.with_levers(every)), num_layers - levers.saved_layers
    saved = [*_list_steps(some.sums)[:first], *_list_steps(whole.sums)[first:]]
    peaks, lower = Counter(some.peaks) | Counter(whole.peaks), Counter(some.lower) | Counter(whole.lower)
    return Needs(peaks, lower, (0, *accumulate(saved)), max(saved, default=0))


def _list_steps(sums: Sequence[int]) -> list[int]:
    return [after - before for before, after in pairwise(sums)]


def _compute_even_needs(job: Job) -> Needs:
    """The engine of several ranks is that of eight which keep all on the GPU and train a few layers. What an engine
    always holds is counted."""
    levers = replace(job.levers, offload_optimizer="none", offload_param="none", early_groups=0, offloaded_layers=0)
    own = _forget_others(job, levers)
    if job.zero_stage < 3:
        ranks = find_fullest_ranks(job)
        first, *others = [_blend(job, own, job, rank) for rank in ranks]
        for other in others:
            peaks, lower = Counter(first.peaks) | Counter(other.peaks), Counter(first.lower) | Counter(other.lower)
            first = first._replace(peaks=peaks, lower=lower)
        return first
    gathers = job.world_size > 1 or job.levers.offload_param != "none"
    engine = job.change(levers=levers, layout=SEVERAL if gathers else ALONE, accumulation=1)
    needs = _blend(job, own, engine, 0)
    held = _count_held(job)
    return needs._replace(peaks=_add_to_each(needs.peaks, held), lower=_add_to_each(needs.lower, held))


def _count_held(job: Job) -> int:
    """What a rank of stage 3 always has on its GPU."""
    held = states.compute_parameters(job) + states.compute_secondary_shard(job) + states.compute_gradients(job)
    return held + states.compute_master(job) + states.compute_adam(job)


def _add_to_each(sizes: Mapping[str, int], more: int) -> dict[str, int]:
    return {phase: size + more for phase, size in sizes.items()}


def _forget_others(job: Job, levers: Levers) -> Job:
    """What runs: without the ranks that share no row with it, and what the engine or a machine alone reads."""
    own = forget_engine(job).change(levers=levers, zero_stage=job.zero_stage, engine=job.engine)
    if job.num_branches or job.layout.ring_size > 1:
        return own
    return own.change(max_length=job.micro_step_tokens, batch=1)


def _blend(job: Job, own: Job, engine: Job, rank: int) -> Needs:
    return NEEDS.get((own, read_engine_settings(engine, rank)), lambda: _blend_anew(job, own, engine, rank))


def _blend_anew(job: Job, own: Job, engine: Job, rank: int) -> Needs:
    """Inside layers a set takes what a run with the same tiles takes, with several chunks of heads between that of two
    and that of the most; at the head, what a run with the same tiles of the loss takes."""
    levers, chunks = own.levers, list_divisors(job.shape.common_heads // job.layout.ulysses_size)
    few, most = _find_fewest_chunks(job, chunks), chunks[-1]
    if few < levers.head_chunks:
        few = next(number for number in chunks if number > few)

    def run(*, is_tight: bool, num_chunks: int) -> Parts:
        large = levers.large_tiles and is_tight
        own_levers = replace(levers, tiled_loss=is_tight, tiled_mlp=is_tight, large_tiles=large, head_chunks=num_chunks)
        return _measure(replace(own, levers=own_levers), engine, rank)

    share = max(0.0, (1 / few - 1 / levers.head_chunks) / (1 / few - 1 / most)) if most > few else 0.0
    numbers = {0.0: (few,), 1.0: (most,)}.get(share, (few, most))
    if not levers.gradient_checkpointing or levers.leaf_layers or levers.overlap_exchange:
        share, inside = 0.0, [_measure(own, engine, rank)]  # these change more than one part
        head = inside[0]
    else:
        inside = [run(is_tight=levers.tiled_mlp, num_chunks=number) for number in numbers]
        at_head = numbers[-1] if levers.tiled_loss == levers.tiled_mlp else most if levers.tiled_loss else few
        head = run(is_tight=levers.tiled_loss, num_chunks=at_head)

    def blend(values: Sequence[int]) -> int:
        return round(values[0] + share * (values[-1] - values[0]))

    peaks = {key: blend([each.peaks.get(key, size) for each in inside]) for key, size in inside[0].peaks.items()}
    peaks |= {key: size for key, size in head.peaks.items() if key[1] in AT_HEAD}
    lower = {key: blend([each.lower.get(key, size) for each in inside]) for key, size in inside[0].lower.items()}
    saved = [blend(sizes) for sizes in zip(*(each.saved for each in inside), strict=True)]
    return Needs(_join(peaks), _join(lower), (0, *accumulate(saved)), max(saved, default=0))


def _join(sizes: Mapping[Part, int]) -> dict[str, int]:
    phases: dict[str, int] = {}
    for (phase, _), size in sizes.items():
        phases[phase] = max(phases.get(phase, size), size)
    return phases


def _find_fewest_chunks(job: Job, chunks: Sequence[int]) -> int:
    """Fewer cannot be indexed by any kernel."""
    levers = (replace(job.levers, head_chunks=number, tiled_mlp=True) for number in chunks)
    fits = (each.head_chunks for each in levers if is_indexable(job.with_levers(each)))
    return next(fits, chunks[-1])


def _measure(own: Job, engine: Job, rank: int) -> Parts:
    return PARTS.get(own, read_engine_settings(engine, rank), lambda: _measure_anew(own, engine, rank))


def _measure_anew(own: Job, engine: Job, rank: int) -> Parts:
    is_sharded = engine.zero_stage == 3
    for depth in list_depths(own, is_sample=True):
        recording = record(own, find_fullest_ranks(own)[0], depth, step_alone=True)
        walked = depth.shorten(MOST_ALIKE) if is_sharded and own.levers.gradient_checkpointing else depth
        joined = join_walk(engine, rank, recording, walked)
        if joined is not None:
            of_places = recording.recorded.list_saved()
            sums = (0, *accumulate(of_places[place] for place in walked.like))
            peaks, lower = dict[Part, int](), dict[Part, int]()
            for (phase, part, layer), size in joined.measure_parts(ALWAYS if is_sharded else ()).items():
                own_peak = size - sums[-1] if phase in STACKED else size
                peaks[phase, part] = max(peaks.get((phase, part), own_peak), own_peak)
                if phase in STACKED and layer is not None:
                    lower[phase, part] = max(lower.get((phase, part), 0), size - sums[layer + 1])
            return Parts(peaks, lower, tuple(of_places[place] for place in depth.like))
    raise AssertionError("where all layers run, none stands for another")


def measure_prefill(job: Job) -> int:
    """What layers have at once while generation reads a prompt, besides weights and caches
    (train/generation/cache.py): an evaluation without the head."""
    depth, *_ = list_depths(job)
    recorded = record(job, 0, depth).recorded
    windows = recorded.phases["evaluation"]
    last = max(at for at, window in enumerate(windows) if window.layer is not None)
    first, end = windows[0].first, windows[last].end
    return max(recorded.levels[first : end + 1]) - recorded.levels[first]
