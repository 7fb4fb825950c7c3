"""About what a job needs, for a search that asks thousands of times: put together from few runs, of which each says
what the parts of a model take. A run of the very set follows where it counts (plan/planner/fit.py: confirm)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from ulysses_cli.plan.layout import Layout, list_divisors
from ulysses_cli.plan.ledger import states
from ulysses_cli.plan.ledger.job import Job, is_indexable
from ulysses_cli.plan.ledger.sized.hooks import GRADIENTS, LOGITS, MASTER, MOMENTS, PARAMETERS, SECOND
from ulysses_cli.plan.ledger.sized.moments import (
    Kept,
    find_fullest_ranks,
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
STACKED = ("forward", "backward")  # in which what layers left for the backward is there


class Parts(NamedTuple):
    """Of one run. `peaks`: the most bytes by phase and part of the model, without what layers leave for the backward.
    `saved`: that, by layer."""

    peaks: Mapping[tuple[str, str], int]
    saved: tuple[int, ...]


class Needs(NamedTuple):
    """Of a set of levers with no layer offloaded. `phases`: as `Parts.peaks`. `sums`: what so many layers leave."""

    phases: Mapping[str, int]
    sums: tuple[int, ...]
    most_of_a_layer: int


def weigh(job: Job) -> dict[str, int]:
    """About the bytes of torch's tensors in each phase of a step."""
    needs = _compute_needs(job)
    whole, offloaded = needs.sums[-1], needs.sums[min(job.levers.offloaded_layers, len(needs.sums) - 1)]
    stack = whole - max(0, min(offloaded, whole - IN_FLIGHT * needs.most_of_a_layer))
    return {phase: size + (stack if phase in STACKED else 0) for phase, size in needs.phases.items()}


def count_offloaded(job: Job) -> int:
    """About the bytes that offloaded layers keep in host memory."""
    if not job.levers.offloaded_layers:
        return 0
    sums = _compute_needs(job).sums
    return sums[min(job.levers.offloaded_layers, len(sums) - 1)]


NEEDS, PARTS = Kept(8192), Kept(1024)


def _compute_needs(job: Job) -> Needs:
    """The engine of several ranks is that of eight which keep all on the GPU and train a few layers. What an engine
    always holds is counted."""
    levers = replace(job.levers, offload_optimizer="none", offload_param="none", early_groups=0, offloaded_layers=0)
    own = _forget_others(job, levers)
    if job.zero_stage < 3:
        ranks = find_fullest_ranks(job)
        found = [_blend(job, own, job, rank) for rank in ranks]
        phases = Counter[str]()
        for needs in found:
            phases |= Counter(needs.phases)
        return found[0]._replace(phases=dict(phases))
    gathers = job.world_size > 1 or job.levers.offload_param != "none"
    engine = replace(job, levers=levers, layout=SEVERAL if gathers else ALONE, accumulation=1)
    needs = _blend(job, own, engine, 0)
    held = states.compute_parameters(job) + states.compute_secondary_shard(job) + states.compute_gradients(job)
    held += states.compute_master(job) + states.compute_adam(job)
    return needs._replace(phases={phase: size + held for phase, size in needs.phases.items()})


def _forget_others(job: Job, levers: Levers) -> Job:
    """Without the ranks that share no row with it."""
    layout = Layout(sp_size=job.layout.sp_size, ring_size=job.layout.ring_size)
    if job.num_branches or layout.ring_size > 1:
        return replace(job, layout=layout, levers=levers)
    return replace(job, layout=layout, levers=levers, max_length=job.micro_step_tokens, batch=1)


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

    phases: dict[str, int] = {}
    for (phase, part), size in inside[0].peaks.items():
        if part in (LOGITS, "norm"):
            size = head.peaks.get((phase, part), size)
        else:
            size = blend([each.peaks.get((phase, part), size) for each in inside])
        phases[phase] = max(phases.get(phase, size), size)
    saved = [blend(sizes) for sizes in zip(*(each.saved for each in inside), strict=True)]
    return Needs(phases, (0, *accumulate(saved)), max(saved, default=0))


def _find_fewest_chunks(job: Job, chunks: Sequence[int]) -> int:
    """Fewer cannot be indexed by any kernel."""
    levers = (replace(job.levers, head_chunks=number, tiled_mlp=True) for number in chunks)
    fits = (each.head_chunks for each in levers if is_indexable(replace(job, levers=each)))
    return next(fits, chunks[-1])


def _measure(own: Job, engine: Job, rank: int) -> Parts:
    return PARTS.get((own, read_engine_settings(engine, rank)), lambda: _measure_anew(own, engine, rank))


def _measure_anew(own: Job, engine: Job, rank: int) -> Parts:
    is_sharded = engine.zero_stage == 3
    for depth in list_depths(own):
        recording = record(own, find_fullest_ranks(own)[0], depth, step_alone=True)
        walked = depth.shorten(MOST_ALIKE) if is_sharded and own.levers.gradient_checkpointing else depth
        joined = join_walk(engine, rank, recording, walked)
        if joined is not None:
            of_places = recording.recorded.list_saved()
            stack = sum(of_places[place] for place in walked.like)
            peaks = joined.measure_parts(ALWAYS if is_sharded else ())
            own_peaks = {key: size - stack if key[0] in STACKED else size for key, size in peaks.items()}
            return Parts(own_peaks, tuple(of_places[place] for place in depth.like))
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
