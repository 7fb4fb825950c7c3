"""Snapshots of a layer's backward, from the end of the layer to its beginning, and while a bucket of gradients is
sent, at the moments that zero/gradients.py names. Adds the lines that depend on when a snapshot is: second shards
of replicas, gradients and buckets below ZeRO-3. Chooses nothing: ledger.py takes the fullest snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial

from ulysses_cli.plan.ledger import adapters, attention, experts, layer, mixers, mlp, recurrence
from ulysses_cli.plan.ledger.adapters import (
    compute_dora_saved,
    compute_last_dora_saved,
    list_dora_backward,
    list_dora_recomputed,
    name_dora_snapshot,
)
from ulysses_cli.plan.ledger.job import (
    BEFORE_ATTENTION,
    BEFORE_GRADIENTS,
    BETWEEN,
    EMBEDDED,
    FIRST,
    HEAD_SENT,
    HEAD_SNAPSHOTS,
    LAST_SENT,
    LEAVES,
    PASSES,
    RECOMPUTATION,
    Job,
    Lines,
    MemorySnapshot,
)
from ulysses_cli.plan.ledger.modules import GATE_ADAPTER, LAST_MATRIX, OF_MIXER, VECTOR_GATE, VECTOR_NORM, VECTOR_OUTPUT
from ulysses_cli.plan.ledger.saved_results import drop_layers
from ulysses_cli.plan.ledger.weights import (
    FIRST_PROJECTIONS,
    INPUT_NORM,
    LAST_PROJECTIONS,
    NORM_BEHIND,
    Weights,
    has_norm_before,
    has_norm_behind,
)
from ulysses_cli.plan.ledger.zero import gradients, states
from ulysses_cli.plan.ledger.zero import gradients as lower_stages
from ulysses_cli.plan.ledger.zero.gathering import FETCH_BACK, REFETCH, Gathered, compute_gathered, find_leaves
from ulysses_cli.plan.ledger.zero.gradients import NO_LEAVES, Flush, list_flushes
from ulysses_cli.plan.models.layers import DenseMlp, ExpertsMlp, Layer
from ulysses_cli.plan.models.shape import ModelShape

GRADIENT_PLACES = {  # the order in which the gradients of a layer are made
    VECTOR_NORM: -3, VECTOR_OUTPUT: -2, VECTOR_GATE: -1,
    NORM_BEHIND: 0, "down_proj": 1, "up_proj": 2, "gate_up_proj": 2, "gate_proj": 3, "router": 3, "o_proj": 5,
    "out_proj": 5, "q_proj": 6, INPUT_NORM: 7, GATE_ADAPTER: 2,
    LAST_MATRIX: 0, OF_MIXER: -1, f"{OF_MIXER}.out_proj": -2,
}  # fmt: skip
SNAPSHOT_PLACES = {
    RECOMPUTATION: -3, "norm of token vectors": -3,
    "norm behind the MLP": 0, "the MLP's last matrix": 1, "mlp": 2, "gate and up": 3, "norm": 4,
    "exchange": 6, "attention": 6, "convolution": 6, "gated norm": 6, "rule": 6, "latents": 6, "forget gate": 6,
    "query norm": 6, "input norm": 7, "gradient of token vectors": 8, "mixer's norm": 0,
}  # fmt: skip


def get_gradient_place(weight: str) -> int:
    """A weight's place in the order in which a layer's gradients are made."""
    name = weight.partition(".")[0]
    if weight.startswith("experts"):
        return 2 if weight == "experts.gate_up" else 1
    if name.startswith("norm"):
        return 4
    return GRADIENT_PLACES.get(weight, GRADIENT_PLACES.get(name, GRADIENT_PLACES["q_proj"]))


def get_snapshot_place(job: Job, kind: Layer, name: str) -> int:
    """At this snapshot of a layer the gradients with a smaller place exist. In tiles those of an MLP are made together,
    after the MLP; those of experts within one snapshot."""
    if kind.shared and name in ("gated norm", "rule", "convolution"):  # of the mixer behind the block
        return GRADIENT_PLACES[OF_MIXER]
    if name == "mlp" and (kind.num_experts or layer.is_tiled(job)):
        return GRADIENT_PLACES["down_proj"]
    if name == "gate and up" and ("gate_up_proj" in job.family.mlp_modules or mlp.find_activation(job)):
        return GRADIENT_PLACES["gate_up_proj"]
    of_magnitudes = name.removeprefix(name_dora_snapshot(""))
    return SNAPSHOT_PLACES[name] if of_magnitudes == name else get_gradient_place(of_magnitudes)


def walk_layer_backward(job: Job, kind: Layer, base: Lines) -> Iterator[tuple[str, MemorySnapshot]]:
    """Yields (place in the layer, snapshot) for the last layer, while all layers below still hold what they saved."""
    job = job.view(kind)
    mlp_saved, norm_saved = mlp.compute_mlp_saved(job, kind), layer.compute_norm_saved(job, job.shape.hidden_size)
    mixer_saved, own_input = mixers.compute_saved(job, kind), layer.compute_layer_input(job)
    result = 0 if layer.saves_result(job) else mixers.compute_result(job, kind)
    norm_work = layer.compute_norm_backward(job, job.shape.hidden_size)

    def take(name: str, attention_left: int, mlp_left: int, **work: int) -> MemorySnapshot:
        place = get_snapshot_place(job, kind, name)
        return make_inside(job, kind, base, name, place, attention_left, mlp_left, work)

    whole_mixer = mixer_saved + result
    left = count_mlp_left(job, kind) if kind.mlp is not None else 0
    if job.levers.gradient_checkpointing is not False:
        beside = [(name, size) for name, size, in_mlp in layer.list_adapter_saved(job, kind) if not in_mlp]
        first = sum(size for name, size in beside if name not in LAST_PROJECTIONS)
        recomputed = {"recomputed_attention": mixers.compute_recomputed(job, kind), "recomputed_mlp": 0, "lora": first}
        yield "attention", MemorySnapshot("backward", RECOMPUTATION, {**base, **recomputed})
        if kind.mlp is not None and not kind.shared:
            adapters = sum(size for _, size in beside)
            before = {"recomputed_attention": whole_mixer, "recomputed_mlp": 0, "lora": adapters}
            yield REFETCH, MemorySnapshot("backward", RECOMPUTATION, {**base, **before})
        if (
            isinstance(kind.mlp, DenseMlp)
            and not kind.shared
            and (product := mlp.compute_recomputed_product(job, kind))
        ):
            of_adapters = layer.list_adapter_saved(job, kind)
            later = sum(size for name, size, _ in of_adapters if name in ("up_proj", "down_proj"))
            yield "gate", take(RECOMPUTATION, whole_mixer, left, mlp=product - later)
        for place, of_mixer, of_mlp, work in list_dora_recomputed(job, kind, whole_mixer, mlp_saved):
            lines = {"recomputed_attention": of_mixer, "recomputed_mlp": of_mlp, "lora": work}
            yield place, MemorySnapshot("backward", RECOMPUTATION, {**base, **lines})
        if (
            isinstance(kind.mlp, DenseMlp)
            and not kind.shared
            and not layer.is_tiled(job)
            and not has_norm_behind(job.shape)
        ):
            yield (
                "down",
                take(
                    RECOMPUTATION,
                    whole_mixer,
                    left,
                    mlp=max(mlp.compute_recomputed_end(job), mlp.compute_recomputed_activation(job)),
                ),
            )
    if kind.shared:
        yield from _walk_shared(job, kind, take)
        return
    if job.shape.per_layer_embeddings:
        yield VECTOR_NORM, take("norm of token vectors", whole_mixer, mlp_saved, norm_backward=norm_work)
        mlp_saved = mlp.compute_own_saved(job, kind) + layer.compute_vectors_waiting(job)
    if has_norm_behind(job.shape):
        with_scaled = norm_work + mlp.compute_scaled(job)
        yield NORM_BEHIND, take("norm behind the MLP", whole_mixer, mlp_saved, norm_backward=with_scaled)
        if output := mlp.compute_saved_output(job):
            base = {**base, "saved_mlp_outputs": base["saved_mlp_outputs"] - output}
    for name, of_mixer, of_mlp, work in list_dora_backward(job, kind, whole_mixer, left):
        yield (
            "mlp" if of_mlp else "attention",
            take(name_dora_snapshot(name), of_mixer, of_mlp, lengths=work),
        )
    if kind.mlp is not None:
        yield from _walk_mlp(job, kind, whole_mixer, take)
        if output := mlp.compute_saved_outputs(job, kind) - mlp.compute_saved_output(job):
            base = {**base, "saved_mlp_outputs": base["saved_mlp_outputs"] - output}
    if job.num_norms > 1:
        yield "norm", take("norm", whole_mixer, norm_saved, norm_backward=norm_work + own_input)
    if kind.mixers:
        scaled = compute_last_dora_saved(job, kind, in_mlp=False)
        yield from _walk_mixer(job, kind, mixer_saved - scaled, result, take)
    if has_norm_before(job.shape):
        saved = attention.compute_input_norm_saved(job)
        yield INPUT_NORM, take("input norm", saved, 0, norm_backward=norm_work + own_input)


def _walk_mlp(
    job: Job, kind: Layer, whole_mixer: int, take: Callable[..., MemorySnapshot]
) -> Iterator[tuple[str, MemorySnapshot]]:
    left, restored = count_mlp_left(job, kind), {"restored_weights": adapters.compute_restored_weights(job, kind)}
    last = {"restored_weights": adapters.compute_last_restored_weights(job, kind)}
    left -= 0 if layer.is_tiled(job) else compute_last_dora_saved(job, kind, in_mlp=True)
    if not kind.num_experts and not layer.is_tiled(job):
        down, gate = mlp.compute_down_backward(job), mlp.compute_gate_backward(job)
        yield "down", take("the MLP's last matrix", whole_mixer, left, mlp=down, **last)
        # the gradient that came from that norm
        left -= layer.compute_layer_input(job) if has_norm_behind(job.shape) else 0
        yield "gate", take("gate and up", whole_mixer, left, mlp=gate, **restored)
    if not layer.is_tiled(job):
        gone = experts.compute_gone(job, kind)
        yield FETCH_BACK, take("mlp", whole_mixer, left - gone)
    in_tile = adapters.list_quantized_tile_backward(job, kind)
    yield "mlp", take("mlp", whole_mixer, left, mlp=mlp.compute_mlp_backward(job, kind), **in_tile)


def _walk_mixer(
    job: Job, kind: Layer, saved: int, result: int, take: Callable[..., MemorySnapshot]
) -> Iterator[tuple[str, MemorySnapshot]]:
    recurrent = mixers.find_recurrence(kind)
    of_magnitudes = compute_dora_saved(job, kind, job.local_tokens, in_mlp=False)
    of_magnitudes -= compute_last_dora_saved(job, kind, in_mlp=False)
    if kimi_mixer := mixers.find_kimi(kind):
        for name, left, work in recurrence.list_kimi_backward(job, kimi_mixer):
            yield "attention", take(name, left + of_magnitudes, 0, recurrence=work)
    elif latent_mixer := mixers.find_latent(kind):
        for name, left, num_bytes, in_kernels in attention.list_latent_backward(job, latent_mixer):
            left += of_magnitudes if name != "latents" else 0  # their own backward is over then
            yield "attention", take(name, left, 0, attention=num_bytes, attention_kernel=in_kernels)
    elif recurrent is None or kind.attention:
        # the gradient of the norm's output that comes from an MLP beside attention waits
        waiting = {"norm_gradient": layer.compute_layer_input(job)} if mlp.is_parallel(job) else {}
        walk = _walk_attention if kind.attention else _walk_convolution
        yield from walk(job, saved, result, partial(take, **waiting))
    if recurrent:  # the gradient of the norm's output that comes from attention beside it waits
        waiting = {"norm_gradient": layer.compute_layer_input(job)} if kind.attention else {}
        of_magnitudes = 0 if kind.attention else of_magnitudes  # of both, attention's part counts them
        for name, left, work in recurrence.list_backward(job, recurrent):
            yield "attention", take(name, left + of_magnitudes, 0, recurrence=work, **waiting)


def _walk_shared(job: Job, kind: Layer, take: Callable[..., MemorySnapshot]) -> Iterator[tuple[str, MemorySnapshot]]:
    """The mixer, then the block. The gradient of the mixer's input waits as the residual's; beside it there is that of
    the block's result."""
    wide, own_input, hidden = mixers.widen_to_block(job), layer.compute_layer_input(job), job.shape.hidden_size
    for name, left, work in mixers.list_block_mixer_backward(job, kind):
        yield "attention", take(name, left, 0, recurrence=work)
    result = 0 if layer.saves_result(job) else attention.compute_attention_result(job)
    attended, of_mlp = mixers.compute_block_attention_saved(job, kind), mixers.compute_block_mlp_saved(job, kind)
    whole = attended + result + of_mlp
    if not layer.is_tiled(job):
        down, gate = mlp.compute_down_backward(job), mlp.compute_gate_backward(job)
        yield "down", take("the MLP's last matrix", whole, 0, mlp=down + own_input)
        yield "gate", take("gate and up", whole, 0, mlp=gate)
    yield "mlp", take("mlp", whole, 0, mlp=mlp.compute_mlp_backward(job, kind) + own_input)
    norm = layer.compute_norm_backward(job, hidden) + own_input
    yield "norm", take("norm", attended + result + layer.compute_norm_saved(job, hidden), 0, norm_backward=norm)
    yield from _walk_attention(wide, attended, result, take)
    of_both = layer.compute_norm_backward(wide, 2 * hidden) + 2 * own_input
    saved = layer.compute_norm_saved(wide, 2 * hidden)
    yield INPUT_NORM, take("input norm", saved, 0, norm_backward=of_both)


def _walk_convolution(
    job: Job, saved: int, result: int, take: Callable[..., MemorySnapshot]
) -> Iterator[tuple[str, MemorySnapshot]]:
    left = saved - mixers.compute_convolution_output_input(job)
    yield "attention", take("convolution", left, 0, convolution=mixers.compute_convolution_gates_backward(job))


def _walk_attention(
    job: Job, saved: int, result: int, take: Callable[..., MemorySnapshot]
) -> Iterator[tuple[str, MemorySnapshot]]:
    rest = saved - attention.compute_output_input(job) + result
    yield "attention", take("exchange", rest, 0, attention_exchange=attention.compute_attention_exchange(job))
    for num_bytes, in_kernels in attention.list_kernel_runs(job):
        yield "attention", take("attention", rest, 0, attention=num_bytes, attention_kernel=in_kernels)
    if job.shape.query_key_norm:
        rows = attention.compute_attention_rows(job)
        norm = layer.compute_query_norm_backward(job, job.query_width) + rows
        yield "q_norm", take("query norm", rest - rows - result, 0, norm_backward=norm)


def count_mlp_left(job: Job, kind: Layer) -> int:
    """What is still saved when the MLP's backward begins: a norm behind it has freed its own part, and so has one
    behind experts beside it, whose results have a gradient of their own."""
    saved = mlp.compute_own_saved(job, kind) + layer.compute_vectors_waiting(job)
    if experts.is_beside(job, kind):
        saved += layer.compute_layer_input(job) - layer.compute_norm_saved(job, job.shape.hidden_size)
    if not has_norm_behind(job.shape):
        return saved
    return saved - mlp.compute_norm_behind_saved(job) + layer.compute_layer_input(job)


def make_inside(
    job: Job, kind: Layer, base: Lines, name: str, place: int, attention_left: int, mlp_left: int, work: Lines
) -> MemorySnapshot:
    """A snapshot inside a layer's backward: what is left of the layer's saved tensors, and the tensors in use. With
    recomputation the inside of the layer is computed again; without it, the inside is part of `kept_layers` and is
    freed piece by piece. At `place`, what adapters before it have saved is gone with their backward: experts have none,
    and the backward of shared ones, where they run after the others, comes first."""
    of_shared = GRADIENT_PLACES["router"] if experts.is_shared_first(job) else 0
    of_adapters = [
        (of_shared if in_mlp and kind.num_experts else get_gradient_place(adapted), size)
        for adapted, size, in_mlp in layer.list_adapter_saved(job, kind)
    ]
    if job.levers.gradient_checkpointing is not False:
        adapters = sum(size for own, size in of_adapters if own >= place)
        left = {"recomputed_attention": attention_left, "recomputed_mlp": mlp_left, "lora": adapters}
        return MemorySnapshot("backward", name, {**base, **left, **work})
    whole = mixers.compute_saved(job, kind) + mixers.compute_result(job, kind)
    gone = whole - attention_left + mlp.compute_mlp_saved(job, kind) - mlp_left
    gone += sum(size for own, size in of_adapters if own < place)
    return MemorySnapshot("backward", name, {**base, "saved_layers": base["saved_layers"] - gone, **work})


SENT, FIRST_SENT = "gradients are reduced", "the first gradients are reduced"


def walk_sent(job: Job, kind: Layer, snapshot: MemorySnapshot) -> Iterator[MemorySnapshot]:
    """Below ZeRO-3, the same snapshot when gradients have been sent for the first time: in that layer, or in the
    next."""
    sent = gradients.find_first_sent(job.weights, job.engine.reduce_bucket)
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
    lines, freed = drop_layers(job, snapshot.lines, number + 1), gradients.compute_freed_gradients(job, num_sent)
    yield MemorySnapshot(snapshot.phase, f"{snapshot.name}, {SENT}", {**lines, gradients.FREED_GRADIENTS: freed})


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
            gradients.FREED_GRADIENTS: gradients.compute_freed_gradients(job, flush.num_sent),
            "retained_gradients": gradients.compute_retained_gradients(job, flush.num_before),
            # in tiles all weights' gradients leave the MLP at once (train/memory/tiled_mlp.py)
            "coming_gradients": job.dtype_bytes * coming if not gradients.keeps_whole(job) else 0,
            **states.list_unswapped(job, flush.layer),
        }
        name, place = SENT if flush.num_before else FIRST_SENT, get_gradient_place(flush.weight)
        snapshot = make_inside(job, kind, base, name, place, attention_left, mlp_left, work)
        yield MemorySnapshot(snapshot.phase, snapshot.name, drop_layers(job, snapshot.lines, flush.layer + 1))


def _count_left(job: Job, kind: Layer, flush: Flush, *, is_leaf: bool) -> tuple[int, int]:
    """Saved bytes left of attention and of the MLP when the bucket is sent. A weight's gradient is made after its
    module's backward; in a leaf module, after the whole module's. Attention's projections compute theirs from the
    gradients of queries, keys and values."""
    if kind.shared:
        return mixers.count_block_left(job, kind, flush.weight), 0
    norm_saved = layer.compute_norm_saved(job, job.shape.hidden_size)
    whole = mixers.compute_saved(job, kind) + (0 if layer.saves_result(job) else mixers.compute_result(job, kind))
    if flush.in_mlp:
        inside = 0 if layer.is_tiled(job) else mlp.compute_inside_saved(job, kind, job.local_tokens)
        gone = inside if is_leaf else mlp.compute_inside_gone(job, kind, flush.weight)
        return whole, count_mlp_left(job, kind) - gone
    if flush.weight.partition(".")[0] in (VECTOR_NORM, VECTOR_OUTPUT, VECTOR_GATE):
        return whole, mlp.compute_mlp_saved(job, kind)
    if flush.weight == NORM_BEHIND:
        return whole, mlp.compute_own_saved(job, kind) + layer.compute_vectors_waiting(job)
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


def settle(job: Job, snapshot: MemorySnapshot) -> MemorySnapshot:
    if job.zero_stage < 3:
        return _settle_gradients(job, snapshot)
    return states.settle_gradients(job, _settle_shards(job, snapshot))


def _settle_shards(job: Job, snapshot: MemorySnapshot) -> MemorySnapshot:
    """With replicas, weights that were released since the last step have a second shard; frozen ones keep it.
    Accumulated micro-steps, and an evaluation and the step after it, go through the model twice."""
    if job.layout.dp_replicate_size == 1:
        return snapshot
    repeats = lower_stages.accumulates(job) or job.evaluates
    goes_again = (snapshot.phase in PASSES and repeats) or job.adapters is not None
    gathered_bytes = 0 if goes_again else snapshot.lines.get("parameters_gathered", 0)
    if snapshot.phase == "backward":  # fetched again, a weight has a second shard from its release in the forward
        gathered_bytes = min(gathered_bytes, job.dtype_bytes * compute_gathered(job).never_released)
    second = states.compute_secondary_shard(job, gathered_bytes)
    return snapshot._replace(lines={**snapshot.lines, "parameters_second_shard": second})


def _settle_gradients(job: Job, snapshot: MemorySnapshot) -> MemorySnapshot:
    phase = snapshot.phase if snapshot.name != BETWEEN else "forward"
    is_reducing = phase == "backward" and _has_gradient(job, snapshot)
    sent = lower_stages.find_first_sent(job.weights, job.engine.reduce_bucket)
    is_sending = snapshot.name.endswith((SENT, EMBEDDED, LAST_SENT, HEAD_SENT))
    is_first = snapshot.name.startswith((FIRST, HEAD_SENT))
    has_sent = (is_sending and not is_first) or (
        sent.layer == lower_stages.ABOVE_LAYERS and snapshot.name not in HEAD_SNAPSHOTS
    )
    gradients = lower_stages.compute_gradients(
        job, phase, is_reducing=is_reducing, has_sent=has_sent, is_sending=is_sending
    )
    lines = {
        "gradients": gradients - snapshot.lines.get(lower_stages.FREED_GRADIENTS, 0),
        "reduce_bucket": lower_stages.compute_buckets(job, is_reducing=is_reducing) if phase in PASSES else 0,
    }
    return snapshot._replace(lines={**snapshot.lines, **lines, lower_stages.FREED_GRADIENTS: 0})


def _has_gradient(job: Job, snapshot: MemorySnapshot) -> bool:
    """Whether a backward has made its first gradient. With adapters alone, the last layer that has one makes it."""
    if job.adapters is None or job.trains("lm_head"):
        return snapshot.name not in BEFORE_GRADIENTS
    if job.trains("norm"):
        return snapshot.name not in (*BEFORE_GRADIENTS, LEAVES)
    if snapshot.layer is not None and snapshot.layer != job.weights.last_trained:
        return snapshot.layer < job.weights.last_trained
    before = (*BEFORE_GRADIENTS, LEAVES, "final norm", RECOMPUTATION, "norm of token vectors")
    if job.shape.per_layer_embeddings and job.adapters.adapts(VECTOR_OUTPUT, VECTOR_GATE):
        return snapshot.name not in before
    in_mlp: tuple[str, ...] = BEFORE_ATTENTION
    if job.adapters.adapts(*job.family.mlp_modules):  # in tiles all gradients leave the MLP at once
        in_mlp = ("mlp",) if job.levers.tiled_mlp else ()
    return snapshot.name not in (*before, "norm behind the MLP", *in_mlp)
