"""Bytes of the MLP of a decoder layer, dense or of experts, per rank and micro-step, whole or in tiles.

Letters as in layer.py. "Inside" means the tensors between the MLP's first matrices and its last one.
"""

from __future__ import annotations

from ulysses_cli.plan.ledger.adapters import lengths
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.layer import (
    compute_layer_input,
    compute_norm_saved,
    count_mlp_tile_tokens,
    is_tiled,
    saves_input,
    saves_norm_input,
    saves_result,
)
from ulysses_cli.plan.ledger.weights import has_norm_before, has_norm_behind
from ulysses_cli.plan.models.layers import ExpertsMlp, Layer

EXPERT_INDEX_BYTES = 44  # per token and chosen expert: 64-bit indices and a weight
# Their experts' results are weighted in float32 (modeling_mixtral.py: MixtralTopKRouter; modeling_nemotron_h.py).
PRECISE_EXPERTS = {"mixtral", "nemotron_h"}
SCALED_RESULTS = {"granite"}  # a block's result is scaled before it is added (modeling_granite.py: residual_multiplier)
# Tensors of the inner width that an expert saves; others save 4. Ungated ones save the activation and its square.
EXPERT_INNER_SAVED = {"gpt_oss": 7, "nemotron_h": 2}
# With both biases, clamped (modeling_gpt_oss.py: _apply_gate); with the activation before its square; others have 4.
EXPERT_INNER_AT_ONCE = {"gpt_oss": 9, "nemotron_h": 3}
PRECISE_ROUTERS = {"nemotron_h"}  # the tokens are cast to float32 (modeling_nemotron_h.py: NemotronHTopkRouter)


def compute_saved_output(job: Job) -> int:
    """b h S: a norm behind a tiled MLP needs the MLP's output again, so it is saved (train/memory/tiled_mlp.py)."""
    is_saved = is_tiled(job) and saves_result(job) and has_norm_behind(job.shape)
    return compute_layer_input(job) if is_saved else 0


def compute_mlp_saved(job: Job, layer: Layer) -> int:
    """What its norms save, its input, and what its inside saves; in tiles, nothing of the inside."""
    if layer.mlp is None:
        return 0
    is_behind = has_norm_behind(job.shape)
    num_norms = job.family.norms_per_layer - has_norm_before(job.shape) - is_behind
    needs = is_tiled(job) or layer.num_experts > 0 or saves_input(job, "gate_proj", "up_proj", "gate_up_proj")
    saved = num_norms * compute_norm_saved(job, job.shape.hidden_size) + compute_layer_input(job) * needs
    saved += compute_norm_behind_saved(job) if is_behind else 0
    return saved + (0 if is_tiled(job) else compute_inside_saved(job, layer, job.local_tokens))


def compute_norm_behind_saved(job: Job) -> int:
    """Of the norm behind the MLP: nothing where its input is the output that the forward saved already."""
    return 0 if compute_saved_output(job) and saves_norm_input(job) else compute_norm_saved(job, job.shape.hidden_size)


def compute_inside_saved(job: Job, layer: Layer, tokens: int) -> int:
    """4 i b: gate, activated gate, up and, for the last matrix, their product. Experts: for each expert that a token is
    sent to, also the token's copy and the expert's output, 2 h b. A matrix's input is saved only for its gradient."""
    shape, b = job.shape, job.dtype_bytes
    if not layer.num_experts:
        scaled = lengths.compute_saved(job, layer, tokens, in_mlp=True)
        return (3 + saves_input(job, "down_proj")) * b * shape.intermediate_size * tokens + scaled
    trained = job.adapters is None
    inner = (EXPERT_INNER_SAVED.get(shape.model_type, 4) - 1 + trained) * shape.moe_intermediate_size
    width = inner + (1 + trained) * shape.hidden_size
    around = 4 * shape.hidden_size * (shape.model_type in PRECISE_ROUTERS) + (1 + trained) * b * _get_shared(layer)
    return (shape.num_experts_per_token * (b * width + EXPERT_INDEX_BYTES) + around) * tokens


def _get_shared(layer: Layer) -> int:
    """The inner size of the expert that every token goes to; an ungated one saves the activation and its square."""
    return layer.mlp.shared_size if isinstance(layer.mlp, ExpertsMlp) else 0


def compute_inside_gone(job: Job, kind: Layer, weight: str) -> int:
    """What of the saved inside is freed when the gradient of `weight` exists: the product after the last matrix; then
    also the activated gate and its partner, of which one gradient is left. Of experts: at their first matrices
    everything but the tokens' copies, whose gradients exist; at a router that was made before them, those too."""
    if is_tiled(job):
        return 0
    if kind.num_experts:
        copies = job.shape.num_experts_per_token * compute_layer_input(job)
        left = {"experts.gate_up": copies, "router": 0}
        return max(0, compute_inside_saved(job, kind, job.local_tokens) - left[weight]) if weight in left else 0
    num = {"up_proj": 1, "gate_up_proj": 1, "gate_proj": 2}.get(weight, 0)
    return num * job.dtype_bytes * job.shape.intermediate_size * job.local_tokens


def compute_inside_backward(job: Job, layer: Layer, tokens: int) -> int:
    """In addition to what is saved: 2 i b at the product's backward (three gradients are made, one saved tensor is
    freed), or the gradient of one matrix at a time. Experts, for each of the k experts of a token: three gradients of
    its copies, 3 h b, or float32 where results are weighted so; or one of the inner width and the gradients of all
    experts' matrices. Without gates the square of an activation has three gradients, 3 i b, which come when a shared
    expert's backward is over and has made a gradient of the input."""
    shape, b, trained = job.shape, job.dtype_bytes, job.adapters is None
    if layer.num_experts:
        inner, hidden, k = shape.moe_intermediate_size, shape.hidden_size, shape.num_experts_per_token
        experts = b * layer.num_experts * inner * hidden * trained
        down = k * b * inner * tokens + experts
        if not _is_gated(layer):
            gone = (1 + trained) * b * _get_shared(layer) * tokens
            widest = 3 * k * max(_count_weighted_bytes(job) * hidden, b * inner) * tokens
            return max(widest, down) + b * hidden * tokens - gone
        gate_up = 2 * experts - k * b * (hidden + 2 * inner) * tokens
        return max(
            3 * k * _count_weighted_bytes(job) * hidden * tokens, down, k * b * (2 * inner - hidden) * tokens, gate_up
        )
    matrix = b * shape.hidden_size * shape.intermediate_size * trained
    return b * shape.intermediate_size * tokens + max(b * shape.intermediate_size * tokens, matrix)


def _is_gated(layer: Layer) -> bool:
    return layer.mlp is not None and layer.mlp.is_gated


def compute_down_backward(job: Job) -> int:
    """At the last matrix, in addition to what is saved: the product's gradient, b i S, twice where an adapter adds one;
    and the matrix's own gradient."""
    matrix = job.shape.hidden_size * job.shape.intermediate_size * (job.adapters is None)
    return job.dtype_bytes * ((1 + _adapts_last(job)) * job.shape.intermediate_size * job.local_tokens + matrix)


def compute_gate_backward(job: Job) -> int:
    """At the first matrices, in addition to what is saved: their input's gradient, b h S, and that of one matrix. Of
    the inside only the gate is left; the gradients that exist equal what else has been freed."""
    matrix = job.shape.hidden_size * job.shape.intermediate_size * (1 + _is_fused_mlp(job)) * (job.adapters is None)
    return compute_layer_input(job) + job.dtype_bytes * matrix


def count_mlp_elements(job: Job, layer: Layer) -> int:
    """Weights of the block, with all its experts."""
    if layer.mlp is None:
        return 0
    inner = layer.num_experts * job.shape.moe_intermediate_size or job.shape.intermediate_size
    return (2 + layer.mlp.is_gated) * (inner + _get_shared(layer)) * job.shape.hidden_size


def compute_mlp_forward(job: Job, layer: Layer) -> int:
    """Three tensors of the inner width at once (fused: four), the input and the residual: b (3 i + 2 h) S. Experts: the
    larger of the inner tensors and four copies of the tokens sent to experts (and their biases), two of which may be
    float32. In tiles: the inner tensors of one tile and the output, or the output scaled."""
    shape, b, tile = job.shape, job.dtype_bytes, count_mlp_tile_tokens(job)
    around = (3 if is_tiled(job) else 2) * b * shape.hidden_size * job.local_tokens
    if layer.num_experts:
        copies = (b * (2 + job.family.experts_have_bias) + 2 * _count_weighted_bytes(job)) * shape.hidden_size
        inner = EXPERT_INNER_AT_ONCE.get(shape.model_type, 4) * shape.moe_intermediate_size
        widest = max(copies, b * (shape.hidden_size + inner))
        return around + shape.num_experts_per_token * (widest + EXPERT_INDEX_BYTES) * tile
    num_inner = 3 + _is_fused_mlp(job)
    return around + max(num_inner * b * shape.intermediate_size * tile, _compute_scaled(job))


def _is_fused_mlp(job: Job) -> bool:
    """Gate and up are one tensor, which lives until the MLP ends (modeling_phi3.py: Phi3MLP)."""
    return "gate_up_proj" in job.family.mlp_modules


def _count_weighted_bytes(job: Job) -> int:
    """Of one element of an expert's result times its routing weight."""
    return 4 if job.shape.model_type in PRECISE_EXPERTS else job.dtype_bytes


def _compute_scaled(job: Job) -> int:
    """b h S: a block's result (or its gradient) while its scaled copy exists."""
    return compute_layer_input(job) if job.shape.model_type in SCALED_RESULTS else 0


def compute_first_forward(job: Job) -> int:
    """At the MLP's first matrix: the gate, the input and the residual, b (i + 2 h) S."""
    return job.dtype_bytes * (job.shape.intermediate_size + 2 * job.shape.hidden_size) * job.local_tokens


def compute_gate_forward(job: Job) -> int:
    """At the MLP's second matrix: the activated gate and up, the input and the residual, b (2 i + 2 h) S."""
    return job.dtype_bytes * 2 * (job.shape.intermediate_size + job.shape.hidden_size) * job.local_tokens


def compute_down_forward(job: Job) -> int:
    """At the MLP's last matrix: the product, the input, the residual and the output, b (i + 3 h) S. With adapters also
    the adapter's result and the sum of both. Experts and tiles do not gather this matrix by itself."""
    num_hidden, num_inner = 3 if job.adapters is None else 5, 1 + 2 * _is_fused_mlp(job)
    width = num_inner * job.shape.intermediate_size + num_hidden * job.shape.hidden_size
    return job.dtype_bytes * width * job.local_tokens


def compute_mlp_backward(job: Job, layer: Layer) -> int:
    """In addition to what is saved: the inside's backward. In tiles: all of one tile's inside, the gradient of the
    input, and the weights' gradients, which are summed over tiles in float32 (train/memory/tiling.py: WeightSums)."""
    if not is_tiled(job):
        return compute_inside_backward(job, layer, job.local_tokens)
    tile = count_mlp_tile_tokens(job)
    sums = 4 * count_mlp_elements(job, layer) * (job.adapters is None)
    saved = compute_inside_saved(job, layer, tile)
    inside = saved - lengths.compute_last_saved(job, layer, in_mlp=True) + compute_inside_backward(job, layer, tile)
    inside = max(inside, lengths.compute_tile_again(job, layer, saved))
    if not layer.num_experts and not _adapts_last(job) and job.quantized is None:
        inside = max(inside, 8 * job.dtype_bytes * job.shape.intermediate_size * tile)
    return inside + compute_layer_input(job) + _compute_scaled(job) + sums


def _adapts_last(job: Job) -> bool:
    """Whether the MLP's last matrix has an adapter. Without one a tile's backward stops before that matrix
    (train/memory/tiled_mlp.py). It then holds the matrix's input and that input's gradient, which autograd copies once
    more, to the end: 8 i b."""
    return job.adapters is not None and job.adapters.adapts("down_proj")


def compute_adapter_work(job: Job, layer: Layer) -> int:
    """An adapter's result before it is added to that of its frozen layer in the MLP: b i. In the backward the product
    has two gradients to add, as without adapters. Experts have none."""
    if job.adapters is None or layer.num_experts or not job.adapters.adapts("gate_proj", "up_proj", "gate_up_proj"):
        return 0
    return job.dtype_bytes * job.shape.intermediate_size * count_mlp_tile_tokens(job)
