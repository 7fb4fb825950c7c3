"""Moments of a layer's backward in which gradients are reduced, and what has been by then."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from ulysses_cli.plan.ledger import layer
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.layer_backward import count_mlp_left, make_inside
from ulysses_cli.plan.ledger.memory_snapshot import Lines, MemorySnapshot
from ulysses_cli.plan.ledger.saved_results import drop_layers
from ulysses_cli.plan.ledger.weights import FIRST_PROJECTIONS, INPUT_NORM, NORM_BEHIND, Weights
from ulysses_cli.plan.ledger.zero import lower_stages, states
from ulysses_cli.plan.ledger.zero.flushes import NO_LEAVES, Flush, list_flushes
from ulysses_cli.plan.ledger.zero.gathering import Gathered, find_leaves
from ulysses_cli.plan.models.shape import Layer

SENT, FIRST_SENT = "gradients are reduced", "the first gradients are reduced"
COMING = {  # in which order gradients of a layer come
    NORM_BEHIND: 0, "down_proj": 1, "up_proj": 2, "gate_up_proj": 2, "gate_proj": 3, "router": 3, "o_proj": 5,
    "q_proj": 6, INPUT_NORM: 7,
}  # fmt: skip
COME_BEFORE = {
    "recomputation": 0, "norm behind the MLP": 0, "the MLP's last matrix": 1, "mlp": 2, "gate and up": 3, "norm": 4,
    "exchange": 6, "attention": 6, "query norm": 6, "input norm": 7,
}  # fmt: skip


def count_come(job: Job, weight: str) -> int:
    """A weight's place in the order in which a layer's gradients come."""
    name = weight.partition(".")[0]
    if weight.startswith("experts"):
        return 2 if weight == "experts.gate_up" else 1
    if name.startswith("norm"):
        return 4
    return COMING.get(name, COMING["q_proj"])


def count_come_before(job: Job, kind: Layer, moment: str) -> int:
    """Gradients with a lesser place have come when that moment of a layer is. In tiles those of an MLP come together,
    behind it; experts' come within one moment."""
    if moment == "mlp" and (kind.num_experts or layer.is_tiled(job)):
        return COMING["down_proj"]
    if moment == "gate and up" and "gate_up_proj" in job.family.mlp_modules:
        return COMING["gate_up_proj"]
    return COME_BEFORE[moment]


def walk_sent(job: Job, kind: Layer, moment: MemorySnapshot) -> Iterator[MemorySnapshot]:
    """Below ZeRO-3, the same moment when gradients have been sent for the first time: in that layer, or in the next."""
    sent = lower_stages.find_first_sent(job.weights, job.engine.reduce_bucket)
    place = count_come_before(job, kind, moment.name)
    number = min(sent.layer, job.shape.num_layers - 1)
    if sent.layer < job.shape.num_layers and count_come(job, sent.weight) >= place:
        number -= 1
    if number < 0:
        return
    num_sent = max(
        (
            flush.num_sent
            for flush in list_flushes(job.weights, job.engine.reduce_bucket)
            if flush.layer > number or (flush.layer == number and count_come(job, flush.weight) < place)
        ),
        default=0,
    )
    lines, moved = drop_layers(job, moment.lines, number + 1), lower_stages.compute_moved(job, num_sent)
    yield MemorySnapshot(moment.phase, f"{moment.name}, {SENT}", {**lines, lower_stages.MOVED: moved})


def walk_flushes(job: Job, kind: Layer, base: Lines, gathered: Gathered) -> Iterator[MemorySnapshot]:
    """The bucket is sent in the midst of a layer's backward; layers above have gone by then."""
    leaves = find_leaves(job.shape, tiles_mlp=job.levers.tiled_mlp) if job.zero_stage == 3 else NO_LEAVES
    for flush, num_gathered in _list_fullest_flushes(job.weights, job.engine.reduce_bucket, gathered, leaves):
        is_leaf = flush.layer in leaves
        attention_left, mlp_left = _count_left(job, kind, flush, is_leaf=is_leaf)
        is_together = is_leaf or layer.is_tiled(job)
        work = {
            "reduce_flush": states.compute_flush(job, flush.num_elements, flush.largest, flush.num_before),
            "parameters_gathered": job.dtype_bytes * num_gathered,
            lower_stages.MOVED: lower_stages.compute_moved(job, flush.num_sent),
            "kept_gradients": lower_stages.compute_kept_gradients(job, flush.num_before),
            # in tiles all weights' gradients leave the MLP at once (train/memory/tiled_mlp.py)
            "coming_gradients": job.dtype_bytes * (flush.num_waiting if is_together else flush.num_coming),
        }
        moment = make_inside(job, kind, base, SENT if flush.num_before else FIRST_SENT, attention_left, mlp_left, work)
        yield MemorySnapshot(moment.phase, moment.name, drop_layers(job, moment.lines, flush.layer + 1))


def _count_left(job: Job, kind: Layer, flush: Flush, *, is_leaf: bool) -> tuple[int, int]:
    """What is left of attention and of the MLP when the bucket is sent: a weight's gradient comes behind its module's
    backward; in a leaf module they come behind the whole of it. Attention's projections make theirs from the gradients
    of queries, keys and values."""
    attention, norm_saved = layer.compute_attention_saved(job), layer.compute_norm_saved(job, job.shape.hidden_size)
    whole = attention + (0 if layer.keeps_result(job) else layer.compute_attention_result(job))
    if flush.in_mlp:
        inside = 0 if layer.is_tiled(job) else layer.compute_inside_saved(job, kind, job.local_tokens)
        gone = inside if is_leaf else layer.compute_inside_gone(job, kind, flush.weight)
        return whole, count_mlp_left(job, kind) - gone
    if flush.weight == NORM_BEHIND:
        return whole, layer.compute_mlp_saved(job, kind)
    if flush.weight.startswith("norm"):
        return whole, norm_saved
    if flush.weight == INPUT_NORM:
        return norm_saved, 0
    if flush.weight.partition(".")[0] in FIRST_PROJECTIONS:
        gone = layer.compute_attention_rows(job) + layer.compute_output_input(job)
        return attention - gone + job.dtype_bytes * (job.query_width + 2 * job.kv_width) * job.local_tokens, 0
    return whole, 0


@lru_cache(maxsize=64)
def _list_fullest_flushes(
    weights: Weights, bucket: int, gathered: Gathered, leaves: frozenset[int]
) -> tuple[tuple[Flush, int], ...]:
    """The first of all, the next in an MLP and in an attention, and later ones with more in the bucket or gathered ->
    each with what is gathered."""
    most, found = {True: (-1, -1), False: (-1, -1)}, []
    for flush in list_flushes(weights, bucket, leaves):
        num_gathered = gathered.at_gradients.get(f"{flush.layer}.{flush.weight}", 0)
        fullest, most_gathered = most[flush.in_mlp]
        if num_gathered > most_gathered or flush.num_elements > fullest:
            if flush.num_before:  # only then is this rank's share laid by
                most[flush.in_mlp] = max(flush.num_elements, fullest), max(num_gathered, most_gathered)
            found.append((flush, num_gathered))
    return tuple(found)
