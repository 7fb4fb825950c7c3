"""Moments of a layer's backward, from the end of the layer to its beginning."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from ulysses_cli.plan.ledger import layer, lower_stages, states
from ulysses_cli.plan.ledger.gathering import Gathered, find_leaves
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.kept import drop_layers
from ulysses_cli.plan.ledger.moment import Lines, Moment
from ulysses_cli.plan.ledger.weights import (
    FIRST_PROJECTIONS,
    INPUT_NORM,
    NORM_BEHIND,
    Weights,
    has_norm_before,
    has_norm_behind,
)
from ulysses_cli.plan.model_shape import Layer

SENT, FIRST_SENT = "gradients are reduced", "the first gradients are reduced"
COMING = {  # in which order gradients of a layer come
    NORM_BEHIND: 0, "down_proj": 1, "up_proj": 2, "gate_up_proj": 2, "gate_proj": 3, "router": 3, "o_proj": 5,
    "q_proj": 6, INPUT_NORM: 7,
}  # fmt: skip
COME_BEFORE = {
    "recomputation": 0, "norm behind the MLP": 0, "the MLP's last matrix": 1, "mlp": 2, "gate and up": 3, "norm": 4,
    "exchange": 6, "attention": 6, "query norm": 6, "input norm": 7,
}  # fmt: skip


def walk_layer_backward(job: Job, kind: Layer, base: Lines) -> Iterator[tuple[str, Moment]]:
    """The last layer's backward, when everything below is still kept, and the place of each moment in the layer."""
    mlp, norm_saved = layer.compute_mlp_saved(job, kind), layer.compute_norm_saved(job, job.shape.hidden_size)
    attention, own_input = layer.compute_attention_saved(job), layer.compute_layer_input(job)
    result = 0 if layer.keeps_result(job) else layer.compute_attention_result(job)
    norm_work = layer.compute_norm_backward(job, job.shape.hidden_size)

    def at(name: str, attention_left: int, mlp_left: int, **work: int) -> Moment:
        return _make_inside(job, kind, base, name, attention_left, mlp_left, work)

    whole = attention + result
    if job.levers.gradient_checkpointing is not False:
        again = {"recomputed_attention": layer.compute_attention_again(job), "recomputed_mlp": 0}
        yield "attention", Moment("backward", "recomputation", {**base, **again})
    if has_norm_behind(job.shape):
        yield NORM_BEHIND, at("norm behind the MLP", whole, mlp, norm_backward=norm_work)
        if kept := layer.compute_kept_output(job):
            base = {**base, "kept_mlp_outputs": base["kept_mlp_outputs"] - kept}
    left = _count_mlp_left(job, kind)
    if not kind.num_experts and not layer.is_tiled(job):
        yield "down", at("the MLP's last matrix", whole, left, mlp=layer.compute_down_backward(job))
        yield "gate", at("gate and up", whole, left, mlp=layer.compute_gate_backward(job))
    yield "mlp", at("mlp", whole, left, mlp=layer.compute_mlp_backward(job, kind))
    yield "norm", at("norm", whole, norm_saved, norm_backward=norm_work + own_input)
    rest = attention - layer.compute_output_input(job) + result
    yield "attention", at("exchange", rest, 0, attention_exchange=layer.compute_attention_exchange(job))
    kernel = {"attention": layer.compute_attention_kernel(job), "attention_kernel": layer.compute_kernel_workspace(job)}
    yield "attention", at("attention", rest, 0, **kernel)
    if job.family.query_key_norm:
        rows = layer.compute_attention_rows(job)
        norm = layer.compute_norm_backward(job, job.query_width) + rows
        yield "q_norm", at("query norm", rest - rows - result, 0, norm_backward=norm)
    if has_norm_before(job.shape):
        saved = norm_saved * (not layer.is_input_kept(job))
        yield INPUT_NORM, at("input norm", saved, 0, norm_backward=norm_work + own_input)


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


def walk_sent(job: Job, kind: Layer, moment: Moment) -> Iterator[Moment]:
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
            for flush in states.list_flushes(job.weights, job.engine.reduce_bucket)
            if flush.layer > number or (flush.layer == number and count_come(job, flush.weight) < place)
        ),
        default=0,
    )
    lines = {**drop_layers(job, moment.lines, number + 1), lower_stages.MOVED: lower_stages.compute_moved(job, num_sent)}
    yield Moment(moment.phase, f"{moment.name}, {SENT}", lines)


def _count_mlp_left(job: Job, kind: Layer) -> int:
    """What the MLP's backward finds: a norm behind it has let its own go."""
    mlp = layer.compute_mlp_saved(job, kind)
    if not has_norm_behind(job.shape):
        return mlp
    return mlp - layer.compute_norm_behind_saved(job) + layer.compute_layer_input(job)


def _make_inside(
    job: Job, kind: Layer, base: Lines, name: str, attention_left: int, mlp_left: int, work: Lines
) -> Moment:
    """What is left of a layer at some time of its backward, and what is worked with. With recomputation its inside is
    made anew; without, it is part of what is kept, and goes piece by piece."""
    if job.levers.gradient_checkpointing is not False:
        adapters = layer.compute_adapter_saved(job)
        left = {"recomputed_attention": attention_left, "recomputed_mlp": mlp_left, "lora": adapters}
        return Moment("backward", name, {**base, **left, **work})
    whole = layer.compute_attention_saved(job) + layer.compute_attention_result(job)
    gone = whole - attention_left + layer.compute_mlp_saved(job, kind) - mlp_left
    return Moment("backward", name, {**base, "kept_layers": base["kept_layers"] - gone, **work})


def walk_flushes(job: Job, kind: Layer, base: Lines, gathered: Gathered) -> Iterator[Moment]:
    """The bucket is sent in the midst of a layer's backward; layers above have gone by then."""
    leaves = find_leaves(job.shape, tiles_mlp=job.levers.tiled_mlp) if job.zero_stage == 3 else states.NO_LEAVES
    for flush, num_gathered in _list_fullest_flushes(job.weights, job.engine.reduce_bucket, gathered, leaves):
        is_leaf = flush.layer in leaves
        attention_left, mlp_left = _count_left(job, kind, flush, is_leaf=is_leaf)
        work = {
            "reduce_flush": states.compute_flush(job, flush.num_elements, flush.largest, flush.num_before),
            "parameters_gathered": job.dtype_bytes * num_gathered,
            lower_stages.MOVED: lower_stages.compute_moved(job, flush.num_sent),
            "kept_gradients": lower_stages.compute_kept_gradients(job, flush.num_before),
            # in tiles all weights' gradients leave the MLP at once (train/tiled_mlp.py)
            "coming_gradients": job.dtype_bytes * (flush.num_waiting if is_leaf or layer.is_tiled(job) else flush.num_coming),
        }
        moment = _make_inside(job, kind, base, SENT if flush.num_before else FIRST_SENT, attention_left, mlp_left, work)
        yield Moment(moment.phase, moment.name, drop_layers(job, moment.lines, flush.layer + 1))


def _count_left(job: Job, kind: Layer, flush: states.Flush, *, is_leaf: bool) -> tuple[int, int]:
    """What is left of attention and of the MLP when the bucket is sent: a weight's gradient comes behind its module's
    backward; in a leaf module they come behind the whole of it. Attention's projections make theirs from the gradients of queries, keys and values."""
    attention, norm_saved = layer.compute_attention_saved(job), layer.compute_norm_saved(job, job.shape.hidden_size)
    whole = attention + (0 if layer.keeps_result(job) else layer.compute_attention_result(job))
    if flush.in_mlp:
        inside = 0 if layer.is_tiled(job) else layer.compute_inside_saved(job, kind, job.local_tokens)
        gone = inside if is_leaf else layer.compute_inside_gone(job, kind, flush.weight)
        return whole, _count_mlp_left(job, kind) - gone
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
) -> tuple[tuple[states.Flush, int], ...]:
    """The first of all, the next in an MLP and in an attention, and later ones with more in the bucket or gathered ->
    each with what is gathered."""
    most, found = {True: (-1, -1), False: (-1, -1)}, []
    for flush in states.list_flushes(weights, bucket, leaves):
        num_gathered = gathered.at_gradients.get(f"{flush.layer}.{flush.weight}", 0)
        fullest, most_gathered = most[flush.in_mlp]
        if num_gathered > most_gathered or flush.num_elements > fullest:
            if flush.num_before:  # only then is this rank's share laid by
                most[flush.in_mlp] = max(flush.num_elements, fullest), max(num_gathered, most_gathered)
            found.append((flush, num_gathered))
    return tuple(found)
