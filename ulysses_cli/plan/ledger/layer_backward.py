"""Snapshots of a layer's backward, from the end of the layer to its beginning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from ulysses_cli.plan.ledger import attention, experts, latent, layer, mixers, mlp
from ulysses_cli.plan.ledger.adapters import lengths, quantized
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.memory_snapshot import AGAIN, Lines, MemorySnapshot
from ulysses_cli.plan.ledger.recurrence import convolution, kimi
from ulysses_cli.plan.ledger.recurrence import mixer as recurrence
from ulysses_cli.plan.ledger.shared_blocks import block
from ulysses_cli.plan.ledger.shared_blocks.modules import GATE_ADAPTER, LAST_MATRIX, OF_MIXER
from ulysses_cli.plan.ledger.token_vectors import vectors
from ulysses_cli.plan.ledger.token_vectors.modules import VECTOR_GATE, VECTOR_NORM, VECTOR_OUTPUT
from ulysses_cli.plan.ledger.weights import (
    INPUT_NORM,
    LAST_PROJECTIONS,
    NORM_BEHIND,
    has_norm_before,
    has_norm_behind,
)
from ulysses_cli.plan.ledger.zero.gathering import FETCH_AGAIN, FETCH_BACK
from ulysses_cli.plan.models.layers import DenseMlp, Layer

GRADIENT_PLACES = {  # the order in which the gradients of a layer are made
    VECTOR_NORM: -3, VECTOR_OUTPUT: -2, VECTOR_GATE: -1,
    NORM_BEHIND: 0, "down_proj": 1, "up_proj": 2, "gate_up_proj": 2, "gate_proj": 3, "router": 3, "o_proj": 5,
    "out_proj": 5, "q_proj": 6, INPUT_NORM: 7, GATE_ADAPTER: 2,
    LAST_MATRIX: 0, OF_MIXER: -1, f"{OF_MIXER}.out_proj": -2,
}  # fmt: skip
SNAPSHOT_PLACES = {
    AGAIN: -3, "norm of token vectors": -3,
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
    of_lengths = name.removeprefix(lengths.name_snapshot(""))
    return SNAPSHOT_PLACES[name] if of_lengths == name else get_gradient_place(of_lengths)


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
        again = {"recomputed_attention": mixers.compute_again(job, kind), "recomputed_mlp": 0, "lora": first}
        yield "attention", MemorySnapshot("backward", AGAIN, {**base, **again})
        if kind.mlp is not None and not kind.shared:
            adapters = sum(size for _, size in beside)
            before = {"recomputed_attention": whole_mixer, "recomputed_mlp": 0, "lora": adapters}
            yield FETCH_AGAIN, MemorySnapshot("backward", AGAIN, {**base, **before})
        if isinstance(kind.mlp, DenseMlp) and not kind.shared and (product := mlp.compute_product_again(job, kind)):
            of_adapters = layer.list_adapter_saved(job, kind)
            later = sum(size for name, size, _ in of_adapters if name in ("up_proj", "down_proj"))
            yield "gate", take(AGAIN, whole_mixer, left, mlp=product - later)
        for place, of_mixer, of_mlp, work in lengths.list_again(job, kind, whole_mixer, mlp_saved):
            lines = {"recomputed_attention": of_mixer, "recomputed_mlp": of_mlp, "lora": work}
            yield place, MemorySnapshot("backward", AGAIN, {**base, **lines})
        if (
            isinstance(kind.mlp, DenseMlp)
            and not kind.shared
            and not layer.is_tiled(job)
            and not has_norm_behind(job.shape)
        ):
            yield (
                "down",
                take(
                    AGAIN,
                    whole_mixer,
                    left,
                    mlp=max(mlp.compute_end_again(job), mlp.compute_activation_again(job)),
                ),
            )
    if kind.shared:
        yield from _walk_shared(job, kind, take)
        return
    if job.shape.token_vectors:
        yield VECTOR_NORM, take("norm of token vectors", whole_mixer, mlp_saved, norm_backward=norm_work)
        mlp_saved = mlp.compute_own_saved(job, kind) + vectors.compute_waiting(job)
    if has_norm_behind(job.shape):
        with_scaled = norm_work + mlp.compute_scaled(job)
        yield NORM_BEHIND, take("norm behind the MLP", whole_mixer, mlp_saved, norm_backward=with_scaled)
        if output := mlp.compute_saved_output(job):
            base = {**base, "saved_mlp_outputs": base["saved_mlp_outputs"] - output}
    for name, of_mixer, of_mlp, work in lengths.list_backward(job, kind, whole_mixer, left):
        yield "mlp" if of_mlp else "attention", take(lengths.name_snapshot(name), of_mixer, of_mlp, lengths=work)
    if kind.mlp is not None:
        yield from _walk_mlp(job, kind, whole_mixer, take)
        if output := mlp.compute_saved_outputs(job, kind) - mlp.compute_saved_output(job):
            base = {**base, "saved_mlp_outputs": base["saved_mlp_outputs"] - output}
    if job.num_norms > 1:
        yield "norm", take("norm", whole_mixer, norm_saved, norm_backward=norm_work + own_input)
    if kind.mixers:
        scaled = lengths.compute_last_saved(job, kind, in_mlp=False)
        yield from _walk_mixer(job, kind, mixer_saved - scaled, result, take)
    if has_norm_before(job.shape):
        saved = attention.compute_input_norm_saved(job)
        yield INPUT_NORM, take("input norm", saved, 0, norm_backward=norm_work + own_input)


def _walk_mlp(
    job: Job, kind: Layer, whole_mixer: int, take: Callable[..., MemorySnapshot]
) -> Iterator[tuple[str, MemorySnapshot]]:
    left, restored = count_mlp_left(job, kind), {"restored_weights": quantized.compute_restored(job, kind)}
    last = {"restored_weights": quantized.compute_last_restored(job, kind)}
    left -= 0 if layer.is_tiled(job) else lengths.compute_last_saved(job, kind, in_mlp=True)
    if not kind.num_experts and not layer.is_tiled(job):
        down, gate = mlp.compute_down_backward(job), mlp.compute_gate_backward(job)
        yield "down", take("the MLP's last matrix", whole_mixer, left, mlp=down, **last)
        left -= layer.compute_layer_input(job) * has_norm_behind(job.shape)  # the gradient that came from that norm
        yield "gate", take("gate and up", whole_mixer, left, mlp=gate, **restored)
    if not layer.is_tiled(job):
        gone = experts.compute_gone(job, kind)
        yield FETCH_BACK, take("mlp", whole_mixer, left - gone)
    in_tile = quantized.list_tile_backward(job, kind)
    yield "mlp", take("mlp", whole_mixer, left, mlp=mlp.compute_mlp_backward(job, kind), **in_tile)


def _walk_mixer(
    job: Job, kind: Layer, saved: int, result: int, take: Callable[..., MemorySnapshot]
) -> Iterator[tuple[str, MemorySnapshot]]:
    recurrent = mixers.find_recurrence(kind)
    of_lengths = lengths.compute_saved(job, kind, job.local_tokens, in_mlp=False)
    of_lengths -= lengths.compute_last_saved(job, kind, in_mlp=False)
    if kimi_mixer := mixers.find_kimi(kind):
        for name, left, work in kimi.list_backward(job, kimi_mixer):
            yield "attention", take(name, left + of_lengths, 0, recurrence=work)
    elif latent_mixer := mixers.find_latent(kind):
        for name, left, num_bytes, in_kernels in latent.list_backward(job, latent_mixer):
            left += of_lengths * (name != "latents")  # their own backward is over then
            yield "attention", take(name, left, 0, attention=num_bytes, attention_kernel=in_kernels)
    elif recurrent is None or kind.attention:
        # the gradient of the norm's output that comes from an MLP beside attention waits
        waiting = {"norm_gradient": layer.compute_layer_input(job)} if mlp.is_parallel(job) else {}
        walk = _walk_attention if kind.attention else _walk_convolution
        yield from walk(job, saved, result, partial(take, **waiting))
    if recurrent:  # the gradient of the norm's output that comes from attention beside it waits
        waiting = {"norm_gradient": layer.compute_layer_input(job)} if kind.attention else {}
        of_lengths = 0 if kind.attention else of_lengths  # of both, attention's part counts them
        for name, left, work in recurrence.list_backward(job, recurrent):
            yield "attention", take(name, left + of_lengths, 0, recurrence=work, **waiting)


def _walk_shared(job: Job, kind: Layer, take: Callable[..., MemorySnapshot]) -> Iterator[tuple[str, MemorySnapshot]]:
    """The mixer, then the block. The gradient of the mixer's input waits as the residual's; beside it there is that of
    the block's result."""
    wide, own_input, hidden = block.widen(job), layer.compute_layer_input(job), job.shape.hidden_size
    for name, left, work in block.list_mixer_backward(job, kind):
        yield "attention", take(name, left, 0, recurrence=work)
    result = 0 if layer.saves_result(job) else attention.compute_attention_result(job)
    attended, of_mlp = block.compute_attention_saved(job, kind), block.compute_mlp_saved(job, kind)
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
    left = saved - convolution.compute_output_input(job)
    yield "attention", take("convolution", left, 0, convolution=convolution.compute_gates_backward(job))


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
    saved = mlp.compute_own_saved(job, kind) + vectors.compute_waiting(job)
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
