"""Snapshots of a layer's backward while a bucket of gradients is sent, at the moments that `flushes.py` names."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from ulysses_cli.plan.ledger import attention, experts, layer, mixers, mlp
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.layer_backward import (
    count_mlp_left,
    get_gradient_place,
    get_snapshot_place,
    make_inside,
)
from ulysses_cli.plan.ledger.memory_snapshot import Lines, MemorySnapshot
from ulysses_cli.plan.ledger.saved_results import drop_layers
from ulysses_cli.plan.ledger.shared_blocks import block
from ulysses_cli.plan.ledger.token_vectors import vectors
from ulysses_cli.plan.ledger.token_vectors.modules import VECTOR_GATE, VECTOR_NORM, VECTOR_OUTPUT
from ulysses_cli.plan.ledger.weights import (
    FIRST_PROJECTIONS,
    INPUT_NORM,
    NORM_BEHIND,
    Weights,
)
from ulysses_cli.plan.ledger.zero import lower_stages, states, swapping
from ulysses_cli.plan.ledger.zero.flushes import NO_LEAVES, Flush, list_flushes
from ulysses_cli.plan.ledger.zero.gathering import Gathered, find_leaves
from ulysses_cli.plan.models.layers import ExpertsMlp, Layer
from ulysses_cli.plan.models.shape import ModelShape

SENT, FIRST_SENT = "gradients are reduced", "the first gradients are reduced"


def walk_sent(job: Job, kind: Layer, snapshot: MemorySnapshot) -> Iterator[MemorySnapshot]:
    """Below ZeRO-3, the same snapshot when gradients have been sent for the first time: in that layer, or in the
    next."""
    sent = lower_stages.find_first_sent(job.weights, job.engine.reduce_bucket)
    place = get_snapshot_place(job, kind, snapshot.name)
    last = min(sent.layer, job.shape.num_layers - 1)
    is_between = snapshot.name == "mlp" and sent.weight == "experts.down" and not layer.is_tiled(job)
    is_there = is_between and job.shape.find_last_of_kind(kind, last) == last
    if is_there and isinstance(kind.mlp, ExpertsMlp) and kind.mlp.is_gated:
        work = experts.compute_first_backward(job, kind.mlp, job.local_tokens)
        lines = drop_layers(job, {**snapshot.lines, "mlp": work}, last + 1)
        yield MemorySnapshot(snapshot.phase, f"{snapshot.name}, {SENT}", lines)
    if sent.layer < job.shape.num_layers and get_gradient_place(sent.weight) >= place:
        last -= 1
    number = job.shape.find_last_of_kind(kind, last) if last >= 0 else None
    if number is None:
        return
    num_sent = max(
        (
            flush.num_sent
            for flush in list_flushes(job.weights, job.engine.reduce_bucket)
            if flush.layer > number or (flush.layer == number and get_gradient_place(flush.weight) < place)
        ),
        default=0,
    )
    lines, freed = drop_layers(job, snapshot.lines, number + 1), lower_stages.compute_freed_gradients(job, num_sent)
    yield MemorySnapshot(snapshot.phase, f"{snapshot.name}, {SENT}", {**lines, lower_stages.FREED_GRADIENTS: freed})


def walk_flushes(job: Job, kind: Layer, base: Lines, gathered: Gathered) -> Iterator[MemorySnapshot]:
    """The bucket is sent during a layer's backward; what the layers above had saved is freed by then."""
    leaves = find_leaves(job.shape, tiles_mlp=job.levers.tiled_mlp) if job.zero_stage == 3 else NO_LEAVES
    of_kind = list_layers_like(job.shape, kind)
    for flush, num_gathered in _list_fullest_flushes(job.weights, job.engine.reduce_bucket, gathered, leaves, of_kind):
        is_leaf = flush.layer in leaves
        attention_left, mlp_left = _count_left(job.view(kind), kind, flush, is_leaf=is_leaf)
        is_together = is_leaf or layer.is_tiled(job)
        coming = flush.num_waiting if is_together else flush.num_coming
        work = {
            "reduce_flush": states.compute_flush(job, flush.num_elements, flush.largest, flush.num_before),
            "parameters_gathered": job.dtype_bytes * num_gathered,
            lower_stages.FREED_GRADIENTS: lower_stages.compute_freed_gradients(job, flush.num_sent),
            "retained_gradients": lower_stages.compute_retained_gradients(job, flush.num_before),
            # in tiles all weights' gradients leave the MLP at once (train/memory/tiled_mlp.py)
            "coming_gradients": job.dtype_bytes * coming * (not lower_stages.keeps_whole(job)),
            **swapping.list_unswapped(job, flush.layer),
        }
        name, place = SENT if flush.num_before else FIRST_SENT, get_gradient_place(flush.weight)
        snapshot = make_inside(job, kind, base, name, place, attention_left, mlp_left, work)
        yield MemorySnapshot(snapshot.phase, snapshot.name, drop_layers(job, snapshot.lines, flush.layer + 1))


def _count_left(job: Job, kind: Layer, flush: Flush, *, is_leaf: bool) -> tuple[int, int]:
    """Saved bytes left of attention and of the MLP when the bucket is sent. A weight's gradient is made after its
    module's backward; in a leaf module, after the whole module's. Attention's projections compute theirs from the
    gradients of queries, keys and values."""
    if kind.shared:
        return block.count_left(job, kind, flush.weight), 0
    norm_saved = layer.compute_norm_saved(job, job.shape.hidden_size)
    whole = mixers.compute_saved(job, kind) + (0 if layer.saves_result(job) else mixers.compute_result(job, kind))
    if flush.in_mlp:
        inside = 0 if layer.is_tiled(job) else mlp.compute_inside_saved(job, kind, job.local_tokens)
        gone = inside if is_leaf else mlp.compute_inside_gone(job, kind, flush.weight)
        return whole, count_mlp_left(job, kind) - gone
    if flush.weight.partition(".")[0] in (VECTOR_NORM, VECTOR_OUTPUT, VECTOR_GATE):
        return whole, mlp.compute_mlp_saved(job, kind)
    if flush.weight == NORM_BEHIND:
        return whole, mlp.compute_own_saved(job, kind) + vectors.compute_waiting(job)
    if flush.weight.startswith("norm"):
        return whole, norm_saved
    if flush.weight == INPUT_NORM:
        return attention.compute_input_norm_saved(job), 0
    if flush.weight.partition(".")[0] in FIRST_PROJECTIONS:
        return mixers.compute_left_for_projections(job, kind, flush.weight), 0
    return whole, 0


@lru_cache(maxsize=64)
def list_layers_like(shape: ModelShape, kind: Layer) -> frozenset[int]:
    """Layers with the same mixers, whatever their MLPs."""
    alike = {each for each in shape.layer_kinds if each.mixers == kind.mixers}
    return frozenset(number for number, each in enumerate(shape.layers) if each.without_window() in alike)


@lru_cache(maxsize=64)
def _list_fullest_flushes(
    weights: Weights, bucket: int, gathered: Gathered, leaves: frozenset[int], of_kind: frozenset[int]
) -> tuple[tuple[Flush, int], ...]:
    """Flushes in these layers, each with the elements gathered then: the first of all, the next in an MLP and in an
    attention, and later ones only where more is in the bucket or gathered."""
    most, fullest_flushes = {True: (-1, -1), False: (-1, -1)}, []
    for flush in list_flushes(weights, bucket, leaves):
        if flush.layer not in of_kind:
            continue
        num_gathered = gathered.at_gradients.get(flush.name, 0)
        fullest, most_gathered = most[flush.in_mlp]
        if num_gathered > most_gathered or flush.num_elements > fullest:
            if flush.num_before:  # the first flush does not count: this rank's share is stored only after it
                most[flush.in_mlp] = max(flush.num_elements, fullest), max(num_gathered, most_gathered)
            fullest_flushes.append((flush, num_gathered))
    return tuple(fullest_flushes)
