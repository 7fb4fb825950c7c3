"""Bytes that a decoder layer keeps and works with, per rank and micro-step: transformers' layers, our attention.

Widths count elements per token: h hidden, q queries, k keys (or values), r the same after the exchange, i inner, b
bytes of the dtype, S local tokens. Held against real models by tests/one_process/test_ledger.py.
"""

from __future__ import annotations

from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.weights import has_norm_before, has_norm_behind
from ulysses_cli.plan.models.shape import Layer
from ulysses_cli.plan.tiles import compute_num_mlp_tiles

PRECISE_NORMS = {"gemma2", "gemma3_text", "gpt_oss", "olmo2"}  # the scaled result too is float32
PRECISE_ROTATION = {"olmo2"}
DROPOUT_MASK_BYTES = 1  # of an element
EXPERT_INDEX_BYTES = 44  # per token and chosen expert: 64-bit indices and a weight
PRECISE_EXPERTS = {"mixtral"}  # experts' results are weighed in float32 (modeling_mixtral.py: MixtralTopKRouter)
SCALED_RESULTS = {"granite"}  # a block's result is scaled before it is added (modeling_granite.py: residual_multiplier)
EXPERT_INNER_SAVED = {"gpt_oss": 7}  # tensors of the inner width that an expert saves; others save 4
EXPERT_INNER_AT_ONCE = {"gpt_oss": 9}  # with both biases, clamped (modeling_gpt_oss.py: _apply_gate); others have 4


def compute_layer_input(job: Job) -> int:
    """b h S: what recomputation starts from."""
    return job.dtype_bytes * job.shape.hidden_size * job.local_tokens


def compute_attention_result(job: Job) -> int:
    """b q S and the log-sum-exp, 4 heads S: what the attention kernel gave, of the rank's heads and whole rows."""
    return (job.dtype_bytes * job.query_width + 4 * job.shape.num_heads) * job.local_tokens


def keeps_result(job: Job) -> bool:
    return job.levers.gradient_checkpointing is True


def compute_kept_output(job: Job) -> int:
    """b h S: a norm behind a tiled MLP needs its output again, which is then kept (train/memory/tiled_mlp.py)."""
    keeps = is_tiled(job) and keeps_result(job) and has_norm_behind(job.shape)
    return compute_layer_input(job) if keeps else 0


def compute_norm_saved(job: Job, width: int) -> int:
    """RMSNorm saves its float32 input and, for its weight's gradient, the scaled one in the model's dtype: (4 + b) S
    width; where weights are frozen, the first alone; fused or in tiles, its input as it came."""
    if saves_norm_input(job):
        return job.dtype_bytes * width * job.local_tokens
    return _count_norm_bytes(job) * width * job.local_tokens


def compute_norm_backward(job: Job, width: int) -> int:
    """Four float32 tensors at its widest, beside what was saved: 16 S width, and one more in the place of the scaled
    result where that was not saved; fused, the gradient alone. In tiles, that gradient and all of one tile."""
    if job.fused_norms:
        return job.dtype_bytes * width * job.local_tokens
    scaled = _count_scaled_bytes(job)
    if is_tiled(job):
        tile = (20 + scaled) * width * count_mlp_tile_tokens(job)
        return job.dtype_bytes * width * job.local_tokens + tile
    return (16 + scaled * (job.adapters is not None)) * width * job.local_tokens


def saves_norm_input(job: Job) -> bool:
    return job.fused_norms or is_tiled(job)


def _count_norm_bytes(job: Job) -> int:
    return 4 + _count_scaled_bytes(job) * (job.adapters is None)


def _count_scaled_bytes(job: Job) -> int:
    return 4 if job.shape.model_type in PRECISE_NORMS else job.dtype_bytes


def saves_input(job: Job, *names: str) -> bool:
    """Whether any of these linear layers saves what it is given, for its weight's gradient. A frozen one does so under
    ZeRO-3 alone (runtime/zero/linear.py: LinearFunctionForZeroStage3); elsewhere its adapter does, unless it is given a
    copy that dropout made."""
    adapters = job.adapters
    return adapters is None or job.zero_stage == 3 or (adapters.adapts(*names) and not adapters.drops)


def compute_query_norms_saved(job: Job) -> int:
    """The norms of queries and keys, where the family has them."""
    return compute_norm_saved(job, job.query_width + job.kv_width) if job.family.query_key_norm else 0


def keeps_slices(job: Job) -> bool:
    """In chunks of heads, and where recomputation is spared attention, a rank keeps its own slices and the backward
    exchanges them again; otherwise it keeps the whole rows that the kernel saw (train/attention/ulysses.py)."""
    return job.levers.head_chunks > 1 or job.levers.gradient_checkpointing is True


def compute_attention_rows(job: Job) -> int:
    """What is kept of queries, keys and values: b (q + 2 k) S of slices, b (q + 2 r) S of rows. Where v is kept as it
    was projected and the family projects q, k and v as one, it holds all of it."""
    is_own = keeps_slices(job) or job.layout.sp_size == 1
    kv = job.kv_width if is_own else job.row_kv_width
    return job.dtype_bytes * (job.query_width + 2 * kv + is_own * count_fused(job)) * job.local_tokens


def count_fused(job: Job) -> int:
    """q + k per token, beside those that were rotated, as long as v is there: a family that projects q, k and v as one
    cuts v out of the whole (transformers: modeling_phi3.py, Phi3Attention.forward)."""
    return job.query_width + job.kv_width if "qkv_proj" in job.family.attention_modules else 0


def compute_attention_saved(job: Job) -> int:
    """What attention's backward needs besides its result: norms and inputs of the projections, rows, and (where rows
    are exchanged) the result once more as the input of the output projection."""
    saved = compute_query_norms_saved(job) + compute_attention_rows(job) + compute_output_input(job)
    if not has_norm_before(job.shape):
        return saved
    norm = 0 if is_input_kept(job) else compute_norm_saved(job, job.shape.hidden_size)
    return saved + norm + compute_layer_input(job) * saves_input(job, "q_proj", "k_proj", "v_proj", "qkv_proj")


def is_input_kept(job: Job) -> bool:
    """Recomputed, the input that the first norm saves as it came is the layer's, which is kept as such."""
    return saves_norm_input(job) and job.levers.gradient_checkpointing is not False


def compute_output_input(job: Job) -> int:
    """b q S; on one rank, and where slices are kept, it is attention's own result."""
    is_same = job.layout.sp_size == 1 or keeps_slices(job) or not saves_input(job, "o_proj")
    return 0 if is_same else job.dtype_bytes * job.query_width * job.local_tokens


def compute_mlp_saved(job: Job, layer: Layer) -> int:
    """Its norms and input, and what its inside saves; in tiles, nothing of the inside."""
    is_behind = has_norm_behind(job.shape)
    num_norms = job.family.norms_per_layer - has_norm_before(job.shape) - is_behind
    needs = is_tiled(job) or layer.num_experts > 0 or saves_input(job, "gate_proj", "up_proj", "gate_up_proj")
    saved = num_norms * compute_norm_saved(job, job.shape.hidden_size) + compute_layer_input(job) * needs
    saved += compute_norm_behind_saved(job) if is_behind else 0
    return saved + (0 if is_tiled(job) else compute_inside_saved(job, layer, job.local_tokens))


def compute_norm_behind_saved(job: Job) -> int:
    """Of the norm behind the MLP. Where its input is kept from the forward, that is what it saves."""
    return 0 if compute_kept_output(job) and saves_norm_input(job) else compute_norm_saved(job, job.shape.hidden_size)


def compute_inside_saved(job: Job, layer: Layer, tokens: int) -> int:
    """4 i b: gate, activated gate, up and, for the last matrix, their product. Experts: for each choice of a token also
    its copy and the expert's output, 2 h b; what a matrix is given is saved for its gradient alone."""
    shape, b = job.shape, job.dtype_bytes
    if not layer.num_experts:
        return (3 + saves_input(job, "down_proj")) * b * shape.intermediate_size * tokens
    trained = job.adapters is None
    inner = (EXPERT_INNER_SAVED.get(shape.model_type, 4) - 1 + trained) * shape.moe_intermediate_size
    width = inner + (1 + trained) * shape.hidden_size
    return shape.num_experts_per_token * (b * width + EXPERT_INDEX_BYTES) * tokens


def compute_inside_gone(job: Job, kind: Layer, weight: str) -> int:
    """Of what the inside saved, when the gradient of one of its weights is there: the product behind the last matrix;
    then the activated gate and its partner too, of which one gradient is left. Of experts, at their first matrices all
    but the tokens' copies, of which gradients are there; at a router that was made before them, those too."""
    if is_tiled(job):
        return 0
    if kind.num_experts:
        copies = job.shape.num_experts_per_token * compute_layer_input(job)
        left = {"experts.gate_up": copies, "router": 0}
        return max(0, compute_inside_saved(job, kind, job.local_tokens) - left[weight]) if weight in left else 0
    num = {"up_proj": 1, "gate_up_proj": 1, "gate_proj": 2}.get(weight, 0)
    return num * job.dtype_bytes * job.shape.intermediate_size * job.local_tokens


def compute_inside_backward(job: Job, layer: Layer, tokens: int) -> int:
    """Beside what is saved: 2 i b at the product's backward (three gradients come, one saved tensor has gone), or the
    gradient of one matrix at a time. Experts, for each of k choices: three gradients of its copies, 3 h b, or float32
    where they are weighed so; or one of the inner width and the gradients of all experts' matrices."""
    shape, b, trained = job.shape, job.dtype_bytes, job.adapters is None
    if layer.num_experts:
        inner, hidden, k = shape.moe_intermediate_size, shape.hidden_size, shape.num_experts_per_token
        experts = b * layer.num_experts * inner * hidden * trained
        down = k * b * inner * tokens + experts
        gate_up = 2 * experts - k * b * (hidden + 2 * inner) * tokens
        return max(
            3 * k * _count_weighed_bytes(job) * hidden * tokens, down, k * b * (2 * inner - hidden) * tokens, gate_up
        )
    matrix = b * shape.hidden_size * shape.intermediate_size * trained
    return b * shape.intermediate_size * tokens + max(b * shape.intermediate_size * tokens, matrix)


def compute_down_backward(job: Job) -> int:
    """At the last matrix, beside what is saved: the product's gradient, b i S, twice where an adapter has one to add;
    and the matrix's own."""
    matrix = job.shape.hidden_size * job.shape.intermediate_size * (job.adapters is None)
    return job.dtype_bytes * ((1 + _adapts_last(job)) * job.shape.intermediate_size * job.local_tokens + matrix)


def compute_gate_backward(job: Job) -> int:
    """At the first matrices, beside what is saved: b h S, their input's gradient, and that of a matrix. Of the inside
    the gate is left, with as many gradients as else has gone."""
    matrix = job.shape.hidden_size * job.shape.intermediate_size * (1 + _is_fused_mlp(job)) * (job.adapters is None)
    return compute_layer_input(job) + job.dtype_bytes * matrix


def count_mlp_tile_tokens(job: Job) -> int:
    if not job.levers.tiled_mlp:
        return job.local_tokens
    return -(-job.local_tokens // compute_num_mlp_tiles(job.local_tokens, job.shape.hidden_size))


def is_tiled(job: Job) -> bool:
    """One tile is the MLP as it is (train/memory/tiled_mlp.py)."""
    return count_mlp_tile_tokens(job) < job.local_tokens


def count_mlp_elements(job: Job, layer: Layer) -> int:
    """Weights of the block, of all its experts."""
    inner = layer.num_experts * job.shape.moe_intermediate_size or job.shape.intermediate_size
    return 3 * inner * job.shape.hidden_size


def compute_mlp_forward(job: Job, layer: Layer) -> int:
    """Three tensors of the inner width at once (fused four), the input and the residual beside them: b (3 i + 2 h) S.
    Experts: what is wider of the inner tensors and four copies of the chosen tokens (and their biases), two of which
    may be float32. In tiles, those of a tile and the output, or the output scaled."""
    shape, b, tile = job.shape, job.dtype_bytes, count_mlp_tile_tokens(job)
    around = (3 if is_tiled(job) else 2) * b * shape.hidden_size * job.local_tokens
    if layer.num_experts:
        copies = (b * (2 + job.family.experts_have_bias) + 2 * _count_weighed_bytes(job)) * shape.hidden_size
        inner = EXPERT_INNER_AT_ONCE.get(shape.model_type, 4) * shape.moe_intermediate_size
        widest = max(copies, b * (shape.hidden_size + inner))
        return around + shape.num_experts_per_token * (widest + EXPERT_INDEX_BYTES) * tile
    num_inner = 3 + _is_fused_mlp(job)
    return around + max(num_inner * b * shape.intermediate_size * tile, _compute_scaled(job))


def _is_fused_mlp(job: Job) -> bool:
    """Gate and up are one tensor, which stays until the MLP ends (modeling_phi3.py: Phi3MLP)."""
    return "gate_up_proj" in job.family.mlp_modules


def _count_weighed_bytes(job: Job) -> int:
    """Of an expert's result for one token, times its weight."""
    return 4 if job.shape.model_type in PRECISE_EXPERTS else job.dtype_bytes


def _compute_scaled(job: Job) -> int:
    """b h S: a block's result, or its gradient, beside the same scaled."""
    return compute_layer_input(job) if job.shape.model_type in SCALED_RESULTS else 0


def compute_first_forward(job: Job) -> int:
    """At the MLP's first matrix: the gate, the input and the residual, b (i + 2 h) S."""
    return job.dtype_bytes * (job.shape.intermediate_size + 2 * job.shape.hidden_size) * job.local_tokens


def compute_gate_forward(job: Job) -> int:
    """At the MLP's second matrix: the activated gate and up, the input and the residual, b (2 i + 2 h) S."""
    return job.dtype_bytes * 2 * (job.shape.intermediate_size + job.shape.hidden_size) * job.local_tokens


def compute_down_forward(job: Job) -> int:
    """At the MLP's last matrix: the product, the input, the residual and the output, b (i + 3 h) S. With adapters the
    adapter's result and the sum of both too. Experts and tiles do not gather it apart."""
    num_hidden, num_inner = 3 if job.adapters is None else 5, 1 + 2 * _is_fused_mlp(job)
    width = num_inner * job.shape.intermediate_size + num_hidden * job.shape.hidden_size
    return job.dtype_bytes * width * job.local_tokens


def compute_mlp_backward(job: Job, layer: Layer) -> int:
    """Beside what is saved: the inside's backward. In tiles, all of one tile's inside, the gradient of the input, and
    the weights' gradients, which add up over tiles in float32 (train/memory/tiling.py: WeightSums)."""
    if not is_tiled(job):
        return compute_inside_backward(job, layer, job.local_tokens)
    tile = count_mlp_tile_tokens(job)
    sums = 4 * count_mlp_elements(job, layer) * (job.adapters is None)
    inside = compute_inside_saved(job, layer, tile) + compute_inside_backward(job, layer, tile)
    if not layer.num_experts and not _adapts_last(job):
        inside = max(inside, 8 * job.dtype_bytes * job.shape.intermediate_size * tile)
    return inside + compute_layer_input(job) + _compute_scaled(job) + sums


def _adapts_last(job: Job) -> bool:
    """Whether the MLP's last matrix has an adapter. Without one a tile's backward stops before it
    (train/memory/tiled_mlp.py), and holds what it is given and the gradient of that, which autograd copies once more,
    to the end: 8 i b."""
    return job.adapters is not None and job.adapters.adapts("down_proj")


def compute_attention_forward(job: Job) -> int:
    """The projections' input and the rank's own q, k, v: b (h + q + 2 k) S; and the widest of: rotating them, 3 q or
    q + 3 k; the exchange in, 2 (q + 2 r) / n, beside the previous chunk's result and the output; the exchange out, with
    rows, result, and a buffer on either side."""
    h, q, k, r, n = job.shape.hidden_size, job.query_width, job.kv_width, job.chunk_kv_width, job.levers.head_chunks
    own = h * has_norm_before(job.shape) + q + 2 * k
    if job.layout.sp_size == 1:
        widest = q if n == 1 else q + q // n
    elif n == 1:
        widest = max(2 * (q + 2 * r), q + 2 * r + 3 * q)
    else:
        widest = max(q + 2 * (q // n + 2 * r) + q // n, q + q // n + 2 * r + 2 * (q // n))
    widest = max(count_rotating(job), widest + count_fused(job))
    return (job.dtype_bytes * (own + widest) + 4 * job.shape.num_heads) * job.local_tokens


def count_rotating(job: Job) -> int:
    """Elements per token while queries and keys are rotated; twice as many where that is done in float32."""
    is_precise = job.shape.model_type in PRECISE_ROTATION and job.dtype_bytes < 4
    return max(3 * job.query_width, job.query_width + 3 * job.kv_width) * (2 if is_precise else 1)


def compute_attention_again(job: Job) -> int:
    """While a layer's attention is computed again: as in the forward, beside what its norms save; where its result is
    kept, it ends with the rotation."""
    h, q, k = job.shape.hidden_size, job.query_width, job.kv_width
    saved = compute_query_norms_saved(job)
    if not saves_norm_input(job) and has_norm_before(job.shape):
        saved += compute_norm_saved(job, h)
    if keeps_result(job):
        own = h * has_norm_before(job.shape) + q + 2 * k
        return saved + job.dtype_bytes * (own + count_rotating(job)) * job.local_tokens
    return saved + compute_attention_forward(job)


def compute_attention_exchange(job: Job) -> int:
    """Backward, beside what is saved, while slices travel: the output's gradient, b q S, and buffers on both sides: of
    that gradient, 2 q; of slices too where they were kept, 2 (3 q + 2 r) / n. In one chunk a slice is let go once it is
    copied, and the result and its gradient travel after the others. In chunks, room for all gradients."""
    q, k, r, b, n = job.query_width, job.kv_width, job.chunk_kv_width, job.dtype_bytes, job.levers.head_chunks
    if job.layout.sp_size == 1:
        return (b * q + (_count_room_bytes(job) if n > 1 else 0)) * job.local_tokens
    if n > 1:
        return (b * (q + 2 * (3 * (q // n) + 2 * r)) + _count_room_bytes(job)) * job.local_tokens
    if keeps_slices(job):
        return b * (max(2 * q + 4 * r, 4 * q + 2 * r) - 2 * k - count_fused(job)) * job.local_tokens
    return b * 3 * q * job.local_tokens


def compute_attention_kernel(job: Job) -> int:
    """Backward, beside what is saved, while the kernel runs: the output's gradient here, b q S; of whole rows that
    gradient, q, k, v and result where they had to be exchanged; and the gradients of q, k and v. Slices that were kept
    have gone by then, unless more chunks of heads need them."""
    q, k, r, b, n = job.query_width, job.kv_width, job.chunk_kv_width, job.dtype_bytes, job.levers.head_chunks
    is_split = job.layout.sp_size > 1
    if n > 1:
        rows = 3 * (q // n) + 2 * r if is_split else 0
        return (b * (q + rows + q // n + 2 * r) + _count_room_bytes(job)) * job.local_tokens
    rows = (3 * q + 2 * r - 2 * q - 2 * k - count_fused(job) if keeps_slices(job) else q) if is_split else 0
    return b * (q + rows + q + 2 * r) * job.local_tokens


def _count_room_bytes(job: Job) -> int:
    """Per token, for the gradients of all chunks; those of shared keys add up in float32."""
    return job.dtype_bytes * job.query_width + 2 * job.kv_width * (4 if job.kv_gradients_add_up else job.dtype_bytes)


def compute_kernel_workspace(job: Job) -> int:
    """Inside flash attention's backward: a float32 accumulator of dq and a number per token and head; where the heads
    of this rank and chunk share keys also dk and dv, of every query head in b bytes (FlashAttention 2, flash_api.cpp:
    dk_expanded), or of every key head in float32 (3 and newer: dk_accum). No trace sees it. Behind it, for sinks,
    three float32 tensors of one head and whole rows (train/attention/kernels/operators.py: compute_sink_gradient)."""
    n, expanded = job.levers.head_chunks, 0
    if job.chunk_kv_width < job.query_width // n:
        is_old = job.kernel not in ("flash_attention_3", "flash_attention_4")
        expanded = 2 * job.dtype_bytes * job.query_width // n if is_old else 8 * job.chunk_kv_width
    sinks = 12 * job.shape.head_dim * job.layout.sp_size if job.shape.has_sinks else 0
    return max(4 * (job.query_width + job.shape.num_heads) // n + expanded, sinks) * job.local_tokens


def compute_adapter_saved(job: Job) -> int:
    """Each adapter keeps its narrow result, b rank S; the input it shares with the layer it adapts, but for dropout,
    which makes a copy of its own, and a mask of a byte (torch: native_dropout on a GPU)."""
    if job.adapters is None:
        return 0
    rank, own = job.adapters.rank, job.dtype_bytes + DROPOUT_MASK_BYTES if job.adapters.drops else 0
    num_bytes = 0
    for module in job.weights.modules:
        if module.layer == 0 and module.name.endswith(".a") and not (is_tiled(job) and module.in_mlp):
            num_bytes += job.dtype_bytes * rank + own * (module.weights[0][1] // rank)
    return num_bytes * job.local_tokens


def compute_adapter_work(job: Job, layer: Layer) -> int:
    """Beside a frozen layer's result in the MLP, its adapter's own before they are one: b i; in the backward the
    product has two gradients to add, as without. Experts have none."""
    if job.adapters is None or layer.num_experts or not job.adapters.adapts("gate_proj", "up_proj", "gate_up_proj"):
        return 0
    return job.dtype_bytes * job.shape.intermediate_size * count_mlp_tile_tokens(job)
