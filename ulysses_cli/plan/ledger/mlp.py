"""Bytes of the MLP of a decoder layer, per rank and micro-step, whole or in tiles; experts.py has the inside of blocks
of experts.

Letters as in layer.py. "Inside" means the tensors between the MLP's first matrices and its last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ulysses_cli.plan.ledger import adapters, experts
from ulysses_cli.plan.ledger import layer as vectors
from ulysses_cli.plan.ledger.adapters import compute_quantized_product as compute_int8_product
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.layer import (
    compute_layer_input,
    compute_norm_saved,
    compute_tile_adapter_saved,
    compute_weight_gradient,
    count_mlp_tile_tokens,
    is_tiled,
    saves_input,
    saves_norm_input,
)
from ulysses_cli.plan.ledger.weights import has_norm_before, has_norm_behind, is_fused_mlp
from ulysses_cli.plan.models.family import HYBRID, Trait
from ulysses_cli.plan.models.layers import DenseMlp, ExpertsMlp, Layer


@dataclass(frozen=True)
class Activation:
    """Of an MLP without gates, in tensors of the inner width: what it saves for its input's gradient and for its own
    weights'; what exists at most in its forward, in one that saves besides what it saves, and in its backward besides
    what it saved."""

    saved: float
    saved_for_weights: float
    forward: float
    recomputed: float
    backward: float


GELU = Activation(1, 0, 2, 1, 2)
# transformers/activations.py: ReLUSquaredActivation. The backward of a square makes a power, twice it and a product.
SQUARED_RELU = Activation(1, 0, 3, 2, 4)
# XIELUActivation: its input, the input times a weight, the exponential, a mask; for the other weight their difference.
XIELU = Activation(3.5, 1, 5.5, 4, 4.5)
ACTIVATIONS = {"squared_relu": SQUARED_RELU, "gelu": GELU, "xielu": XIELU}


def find_activation(job: Job) -> Activation | None:
    """None where the MLP has gates."""
    return None if job.family.is_mlp_gated else ACTIVATIONS[job.family.activation]


def is_parallel(job: Job) -> bool:
    return Trait.PARALLEL in job.shape.traits


def compute_saved_output(job: Job) -> int:
    """b h S: of one block."""
    return compute_layer_input(job) if experts.saves_output(job) else 0


def compute_saved_outputs(job: Job, layer: Layer) -> int:
    return (1 + int(experts.is_beside(job, layer))) * compute_saved_output(job)


def compute_mlp_saved(job: Job, layer: Layer) -> int:
    """What its norms save, its input, and what its inside saves; in tiles, nothing of the inside. A shared block's is
    counted with its attention."""
    if layer.mlp is None or layer.shared:
        return 0
    return compute_own_saved(job, layer) + vectors.compute_vector_saved(job)


def compute_own_saved(job: Job, layer: Layer) -> int:
    is_behind = has_norm_behind(job.shape)
    num_norms = job.num_norms - int(has_norm_before(job.shape)) - int(is_behind)
    needs = is_tiled(job) or saves_input(job, "gate_proj", "up_proj", "gate_up_proj")
    needs = needs and not (is_parallel(job) and saves_input(job, "q_proj", "k_proj", "v_proj"))
    saved = num_norms * compute_norm_saved(job, job.shape.hidden_size) + compute_layer_input(job) * needs
    saved += compute_norm_behind_saved(job) if is_behind else 0
    if experts.is_beside(job, layer):
        saved += experts.compute_beside_saved(job, layer)
    return saved + (0 if is_tiled(job) else compute_inside_saved(job, layer, job.local_tokens))


def compute_norm_behind_saved(job: Job) -> int:
    """Of the norm behind the MLP: nothing where its input is the output that the forward saved already."""
    return 0 if compute_saved_output(job) and saves_norm_input(job) else compute_norm_saved(job, job.shape.hidden_size)


def compute_inside_saved(job: Job, layer: Layer, tokens: int) -> int:
    return 0 if layer.mlp is None else _compute_saved_of(job, layer, layer.mlp, tokens)


def _compute_saved_of(job: Job, layer: Layer, block: DenseMlp | ExpertsMlp, tokens: int) -> int:
    """4 i b: gate, activated gate, up and, for the last matrix, their product. A matrix's input is saved only for its
    gradient."""
    of_magnitudes = adapters.compute_dora_saved(job, layer, tokens, in_mlp=True)
    if isinstance(block, ExpertsMlp):
        return experts.compute_saved(job, block, tokens) + of_magnitudes
    return compute_dense_saved(job, tokens) + of_magnitudes


def compute_dense_saved(job: Job, tokens: int) -> int:
    num_inner = _count_activation_saved(job) + int(saves_input(job, "down_proj"))
    return round(num_inner * job.dtype_bytes * job.shape.intermediate_size * tokens)


def _count_activation_saved(job: Job) -> float:
    activation = find_activation(job)
    if activation is None:
        return 3
    return activation.saved + (activation.saved_for_weights if job.adapters is None else 0)


def compute_inside_gone(job: Job, kind: Layer, weight: str) -> int:
    """What of the saved inside is freed when the gradient of `weight` exists. At the second of the first matrices the
    product has gone, and so have the activated gate and its partner, of which one gradient is left; at the first, all
    of it. The gradient of their input is there then; a norm behind the MLP has freed as much."""
    if is_tiled(job):
        return 0
    if isinstance(kind.mlp, ExpertsMlp):
        saved = compute_inside_saved(job, kind, job.local_tokens)
        left = experts.compute_left(job, kind.mlp, weight)
        return 0 if left is None else max(0, saved - left)
    num: float = {"up_proj": 2, "gate_up_proj": 1, "gate_proj": 4}.get(weight, 0)
    if weight == "up_proj" and find_activation(job):
        num = _count_activation_saved(job)
    came = compute_layer_input(job) if num > 0 and not has_norm_behind(job.shape) else 0
    return round(num) * job.dtype_bytes * job.shape.intermediate_size * job.local_tokens - came


def _compute_backward_of(job: Job, block: DenseMlp | ExpertsMlp, tokens: int) -> int:
    """In addition to what is saved: 2 i b at the product's backward (three gradients are made, one saved tensor is
    freed; a frozen last matrix has not saved it), or the backward of an activation without gates; or the gradient of
    one matrix at a time."""
    if isinstance(block, ExpertsMlp):
        return experts.compute_backward(job, block, tokens)
    inner = job.shape.intermediate_size
    matrix = job.dtype_bytes * job.shape.hidden_size * inner if job.adapters is None else 0
    tensor = job.dtype_bytes * inner * tokens
    return max(round(_count_gradients(job) * tensor), tensor + matrix)


def _count_gradients(job: Job) -> float:
    """Of the inner width, in the backward of the activation, in place of the last matrix's input."""
    return _count_made(job) - int(saves_input(job, "down_proj"))


def _count_made(job: Job) -> float:
    """Of the inner width, in the backward of the activation: gradients of the product and of its two factors."""
    activation = find_activation(job)
    return 3 if activation is None else activation.backward


def compute_down_backward(job: Job) -> int:
    """At the last matrix, in addition to what is saved: the product's gradient, b i S, twice where an adapter adds one
    (after a dropout, whose copy of the product is gone by then); and the matrix's own gradient."""
    matrix = compute_weight_gradient(job, job.shape.intermediate_size, job.shape.hidden_size)
    adds = job.adapters is not None and _adapts_last(job) and not job.adapters.drops
    return job.dtype_bytes * (1 + adds) * job.shape.intermediate_size * job.local_tokens + matrix


def compute_gate_backward(job: Job) -> int:
    """At the first matrices, in addition to what is saved: their input's gradient, b h S, and that of one matrix. Of
    the inside only the gate is left; the gradients that exist equal what else has been freed."""
    width = job.shape.intermediate_size * (1 + _is_fused_mlp(job))
    matrix = compute_weight_gradient(job, job.shape.hidden_size, width)
    if find_activation(job):  # all of the inside is gone but the gradient of its first tensor
        inner = job.dtype_bytes * job.shape.intermediate_size * job.local_tokens
        return compute_layer_input(job) + matrix + inner - compute_dense_saved(job, job.local_tokens)
    return compute_layer_input(job) + matrix


def count_mlp_elements(job: Job, layer: Layer) -> int:
    return 0 if layer.mlp is None else _count_elements(job, layer.mlp)


def _count_elements(job: Job, block: DenseMlp | ExpertsMlp) -> int:
    """Weights of the block, with all its experts."""
    inner = block.inner_size
    if isinstance(block, ExpertsMlp):
        inner = block.num_experts * inner + block.shared_size
    return (2 + int(block.is_gated)) * inner * job.shape.hidden_size


def compute_mlp_forward(job: Job, layer: Layer) -> int:
    """Three tensors of the inner width at once (fused: four), the input and the residual: b (3 i + 2 h) S. In tiles:
    the inner tensors of one tile and the output, or the output scaled."""
    shape, b, tile = job.shape, job.dtype_bytes, count_mlp_tile_tokens(job)
    around = (count_around(job) + int(is_tiled(job))) * compute_layer_input(job)
    is_beside = experts.is_beside(job, layer) and is_tiled(job)
    if isinstance(layer.mlp, ExpertsMlp) and not is_beside:
        return around + experts.compute_forward(job, layer.mlp, tile)
    activation = find_activation(job)
    num_inner = activation.forward if activation else 3 + _is_fused_mlp(job)
    dense = around + max(round(num_inner * b * shape.intermediate_size * tile), compute_scaled(job))
    return max(dense, experts.compute_tiles_forward(job, layer)) if is_beside else dense


def list_experts_forward(job: Job, layer: Layer) -> Iterator[tuple[str, int]]:
    """(Place in the layer, bytes) of a block of experts that is not in tiles: at its experts, and at a shared one,
    whose weights are gathered by themselves."""
    if not isinstance(layer.mlp, ExpertsMlp):
        return
    around = count_around(job) * compute_layer_input(job)
    yield "mlp", around + experts.compute_routed_forward(job, layer.mlp, job.local_tokens)
    if layer.mlp.shared_size:
        yield "shared", around + experts.compute_shared_forward(job, layer.mlp, job.local_tokens)


def _is_fused_mlp(job: Job) -> bool:
    """Gate and up are one tensor, which lives until the MLP ends (modeling_phi3.py: Phi3MLP)."""
    return is_fused_mlp(job.family)


def compute_scaled(job: Job) -> int:
    """b h S: a block's result (or its gradient) while its scaled copy exists."""
    return compute_layer_input(job) if Trait.SCALED_RESULTS in job.shape.traits else 0


def count_around(job: Job) -> int:
    """Tensors of width h that wait while the inside is computed: the input and the residual. Without a norm before it,
    the MLP reads the residual itself (modeling_olmo2.py: Olmo2DecoderLayer). A layer with two mixers keeps the result
    of each to its end."""
    return 1 + int(has_norm_before(job.shape)) + int(is_parallel(job)) + _count_mixer_results(job)


def _count_mixer_results(job: Job) -> int:
    return 2 if HYBRID in job.family.other_kinds else 0


def compute_recomputed_end(job: Job) -> int:
    """At the end of the MLP's recomputation, in addition to what is saved: the last matrix's output, with adapters also
    the adapter's and the sum, and results of two mixers. The recomputation begins when the last matrix, or its adapter,
    computes its gradient: that of a scaled result, and of an adapter's scaled one, waits (torch/utils/checkpoint.py:
    unpack_hook)."""
    adapts = _adapts_last(job)
    num_hidden = _count_mixer_results(job) + 1 + 3 * adapts + int(Trait.SCALED_RESULTS in job.shape.traits)
    return num_hidden * compute_layer_input(job) + compute_last_input(job)


def compute_recomputed_product(job: Job, layer: Layer) -> int:
    """In the recomputation of an MLP whose base is in 8 bits, at the second of its first matrices, in addition to what
    is saved: what that product takes, the residual, and its input where that is not saved. The last matrix's input is
    not made yet. Without an adapter that matrix saves nothing, so that its own backward comes before: its input's
    gradient waits."""
    product = 0 if is_tiled(job) else compute_int8_product(job, layer)
    if not product:
        return 0
    num_hidden = 2 - int(saves_input(job, "gate_proj", "up_proj", "gate_up_proj"))
    num_inner = int(not (_adapts_last(job) or has_norm_behind(job.shape))) - int(saves_input(job, "down_proj"))
    inner = job.dtype_bytes * job.shape.intermediate_size * job.local_tokens
    return product + num_hidden * compute_layer_input(job) + num_inner * inner


def compute_last_input(job: Job) -> int:
    """b i S: what the last matrix reads, where it is not saved: it stays until the matrix and its adapter are over."""
    read = 0 if saves_input(job, "down_proj") else job.shape.intermediate_size
    return job.dtype_bytes * read * job.local_tokens


def compute_recomputed_activation(job: Job) -> int:
    """At its activation instead, where the MLP has no gates: what that makes, and the residual; with adapters also the
    gradient that waits."""
    activation = find_activation(job)
    if activation is None:
        return 0
    num = activation.recomputed - int(saves_input(job, "down_proj"))
    inner = round(num * job.dtype_bytes * job.shape.intermediate_size * job.local_tokens)
    return inner + (1 + _adapts_last(job)) * compute_layer_input(job)


def compute_first_forward(job: Job) -> int:
    """At the MLP's first matrix: the gate, the input and the residual, b (i + 2 h) S."""
    inner = job.dtype_bytes * job.shape.intermediate_size * job.local_tokens
    return inner + count_around(job) * compute_layer_input(job)


def compute_gate_forward(job: Job) -> int:
    """At the MLP's second matrix: the activated gate and up, the input and the residual, b (2 i + 2 h) S."""
    inner = job.dtype_bytes * 2 * job.shape.intermediate_size * job.local_tokens
    return inner + count_around(job) * compute_layer_input(job)


def compute_down_forward(job: Job) -> int:
    """At the MLP's last matrix: the product, the input, the residual and the output, b (i + 3 h) S. With adapters also
    the adapter's result and the sum of both. Experts and tiles do not gather this matrix by itself."""
    num_hidden = count_around(job) + (1 if job.adapters is None else 3)
    num_inner = 1 + 2 * _is_fused_mlp(job)
    width = num_inner * job.shape.intermediate_size + num_hidden * job.shape.hidden_size
    return job.dtype_bytes * width * job.local_tokens


def compute_mlp_backward(job: Job, layer: Layer) -> int:
    """In addition to what is saved: the inside's backward."""
    assert layer.mlp is not None
    if not is_tiled(job):
        waiting = 0 if layer.num_experts else _compute_waiting(job)
        inner = job.dtype_bytes * job.shape.intermediate_size * job.local_tokens
        beside = round(_count_gradients(job) * inner) + waiting
        return max(_compute_backward_of(job, layer.mlp, job.local_tokens), waiting and beside)
    if isinstance(layer.mlp, ExpertsMlp) and experts.is_beside(job, layer):
        dense = DenseMlp(layer.mlp.shared_size, layer.mlp.is_gated)
        return experts.compute_tiles_backward(job, layer, _compute_tile_backward(job, layer, dense))
    return _compute_tile_backward(job, layer, layer.mlp)


def _compute_tile_backward(job: Job, layer: Layer, block: DenseMlp | ExpertsMlp) -> int:
    """All of one tile's inside, the gradient of the input, and the weights' gradients, which are summed over tiles in
    float32 (train/memory/tiling.py: WeightSums)."""
    tile = count_mlp_tile_tokens(job)
    sums = 4 * _count_elements(job, block) if job.adapters is None else 0
    saved = _compute_saved_of(job, layer, block, tile)
    inside = saved - adapters.compute_last_dora_saved(job, layer, in_mlp=True) + _compute_backward_of(job, block, tile)
    inside += compute_tile_adapter_saved(job, layer, of_last=False)  # that of the last matrix has gone
    inside = max(inside, adapters.compute_dora_tile_again(job, layer, saved))
    is_dense = isinstance(block, DenseMlp)
    if job.adapters is not None and job.adapters.drops and is_dense:
        inside = max(inside, saved + _compute_dropped(job, layer))
    if is_dense and not _adapts_last(job) and job.quantized is None:
        num_inner = _count_activation_saved(job) + 1 + _count_made(job)
        inside = max(inside, round(num_inner) * job.dtype_bytes * job.shape.intermediate_size * tile)
    return inside + compute_layer_input(job) + compute_scaled(job) + sums


def _compute_dropped(job: Job, layer: Layer) -> int:
    """In a tile at the last matrix's backward, beside its inside: what the adapters' dropouts save, the product's
    gradient, the frozen matrix's result and the gradient of the scaled result, b (i + 2 h) S."""
    width = job.shape.intermediate_size + 2 * job.shape.hidden_size
    inner = job.dtype_bytes * width * count_mlp_tile_tokens(job)
    return inner + compute_tile_adapter_saved(job, layer)


def _compute_waiting(job: Job) -> int:
    """Under ZeRO-3, the last matrix's gradient where it is larger than the bucket: it keeps its own memory until the
    next gradient comes (stage3.py: __add_grad_to_ipg_bucket), and so while the product's gradients are made."""
    num_elements = job.shape.hidden_size * job.shape.intermediate_size if job.adapters is None else 0
    return job.dtype_bytes * num_elements if job.zero_stage == 3 and num_elements > job.engine.reduce_bucket else 0


def _adapts_last(job: Job) -> bool:
    """Whether the MLP's last matrix has an adapter. Without one a tile's backward stops before that matrix
    (train/memory/tiled_mlp.py). It then holds the matrix's input and that input's gradient to the end: 7 i b."""
    return job.adapters is not None and job.adapters.adapts("down_proj")


def compute_adapter_work(job: Job, layer: Layer) -> int:
    """An adapter's result before it is added to that of its frozen layer in the MLP: b i, or 2 b i where gate and up
    are one layer. In the backward the product has two gradients to add, as without adapters. Experts have none."""
    if job.adapters is None or layer.num_experts or not job.adapters.adapts("gate_proj", "up_proj", "gate_up_proj"):
        return 0
    width = job.shape.intermediate_size * (1 + _is_fused_mlp(job))
    return job.dtype_bytes * width * count_mlp_tile_tokens(job)
