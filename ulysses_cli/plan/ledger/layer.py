"""Bytes that all parts of a decoder layer share, per rank and micro-step: its input, norms, tiles, what adapters
save; and beside them Gemma's per-layer inputs and the keys that later layers borrow (transformers:
modeling_gemma4.py). Widths count elements per token: h hidden, q queries, k keys (or values), r keys after the
exchange, i inside the MLP; p one layer's vector of a token, w those of all layers. S local tokens, b bytes of the
dtype."""

from __future__ import annotations

from collections.abc import Iterator

from ulysses_cli.plan.ledger.job import Job, Lines
from ulysses_cli.plan.ledger.modules import VECTOR_GATE, VECTOR_OUTPUT, VECTOR_PROJECTION
from ulysses_cli.plan.levers import compute_num_mlp_tiles
from ulysses_cli.plan.models.family import Trait
from ulysses_cli.plan.models.layers import Layer
from ulysses_cli.plan.rows.indexing import LINEAR, runs_in_pieces

DROPOUT_MASK_BYTES = 1  # of an element


def compute_layer_input(job: Job) -> int:
    """b h S: recomputation starts from it."""
    return job.dtype_bytes * job.shape.hidden_size * job.local_tokens


def saves_result(job: Job) -> bool:
    """Recomputation spares attention: its result is saved."""
    return job.levers.gradient_checkpointing is True


def saves_input(job: Job, *names: str) -> bool:
    """Whether any of these linear layers saves its input, for its weight's gradient. A frozen layer does so only under
    ZeRO-3 (runtime/zero/linear.py: LinearFunctionForZeroStage3). Otherwise its adapter does, unless dropout gives the
    adapter a copy."""
    adapters = job.adapters
    return adapters is None or job.zero_stage == 3 or (adapters.adapts(*names) and not adapters.drops)


def count_mlp_tile_tokens(job: Job) -> int:
    if not job.levers.tiled_mlp:
        return job.local_tokens
    hidden, is_large = job.shape.hidden_size, job.levers.large_tiles
    num_tiles = compute_num_mlp_tiles(job.local_tokens, hidden, is_large=is_large)
    return -(-job.local_tokens // num_tiles)


def is_tiled(job: Job) -> bool:
    """False for a single tile, which is the plain MLP (train/memory/tiled_mlp.py)."""
    return count_mlp_tile_tokens(job) < job.local_tokens


def compute_weight_gradient(job: Job, inputs: int, outputs: int) -> int:
    """Of a linear layer while its backward ends: b elements. Where a row of its inputs or outputs passes it in pieces,
    also their sum in float32: 4 elements (train/memory/tiled_mlp.py: _Pieces; train/memory/tiling.py: WeightSums).
    Weights of adapters are narrow. Attention's projections need no line: where they run in pieces, the attention
    kernel's tensors of the same layer are larger than such a sum."""
    is_pieced = runs_in_pieces(job.dtype_bytes * max(inputs, outputs) * job.local_tokens, *LINEAR)
    return (job.dtype_bytes + (4 if is_pieced else 0)) * inputs * outputs if job.adapters is None else 0


def compute_norm_saved(job: Job, width: int) -> int:
    """RMSNorm saves its float32 input and, for its weight's gradient, the normalized one in the model's dtype: (4 + b)
    S width. With frozen weights, or none, it saves only the first; fused or in tiles, only its input in the model's
    dtype. A centered norm saves the centered input, once for its square and once for its product, and the normalized
    one, all in float32."""
    if saves_norm_input(job):
        return job.dtype_bytes * width * job.local_tokens
    return _count_norm_bytes(job) * width * job.local_tokens


def compute_norm_input_saved(job: Job, width: int) -> int:
    """Of that, what only its input's gradient needs: the float32 copy, 4 S width. One kernel, or a tile, saves what it
    saves for both gradients."""
    return 0 if saves_norm_input(job) or job.shape.centers_norms else 4 * width * job.local_tokens


def compute_query_norm_saved(job: Job, width: int) -> int:
    if Trait.MATRIX_NORMS in job.shape.traits:
        return _count_norm_bytes(job) * width * job.local_tokens
    return compute_norm_saved(job, width)


def compute_query_norm_backward(job: Job, width: int) -> int:
    if Trait.MATRIX_NORMS in job.shape.traits:
        return 12 * width * job.local_tokens
    return compute_norm_backward(job, width)


def compute_norm_forward(job: Job, width: int) -> int:
    """While it is computed: its input, the input in float32, normalized, cast to the model's dtype, and scaled: (8 + 3
    b) S width. Where it is scaled in float32 too: (12 + 2 b) S width; where it is centered, (16 + 2 b) S width; without
    weights, (8 + 2 b) S width. Fused: input and output. In tiles: input, output and all of one tile."""
    b = job.dtype_bytes
    precise = 4 if Trait.PRECISE_NORMS in job.shape.traits else b
    if job.family.norm_parts == 0:
        precise = 0
    elif job.shape.centers_norms:
        precise = 8
    whole = 8 + 2 * b + precise
    if saves_norm_input(job):
        tile = 0 if is_one_kernel(job) else whole * width * count_mlp_tile_tokens(job)
        return 2 * b * width * job.local_tokens + tile
    return whole * width * job.local_tokens


def compute_norm_backward(job: Job, width: int) -> int:
    """At most four float32 tensors in addition to what was saved: 16 S width, and one more instead of the scaled result
    where that was not saved. Fused: the gradient alone. In tiles: that gradient, and all of this for one tile."""
    if is_one_kernel(job):
        return job.dtype_bytes * width * job.local_tokens
    scaled = _count_scaled_bytes(job)
    if saves_norm_input(job):
        tile = (20 + scaled) * width * count_mlp_tile_tokens(job)
        return job.dtype_bytes * width * job.local_tokens + tile
    if job.shape.centers_norms:
        return 12 * width * job.local_tokens
    if Trait.FLOAT32_NORMS in job.shape.traits:
        return 8 * width * job.local_tokens
    return (16 + (scaled if not job.trains("norm") else 0)) * width * job.local_tokens


def is_one_kernel(job: Job) -> bool:
    """A norm that saves its input alone. Only norms that divide by the root mean square and have weights are replaced
    (train/elementwise/interface.py: recognise_norm)."""
    is_usual = job.family.norm_parts == 1 and not job.shape.centers_norms
    return Trait.NATIVE_NORMS in job.shape.traits or (job.fused_norms and is_usual)


def saves_norm_input(job: Job) -> bool:
    """In one kernel, or in tiles, which a norm without weights has not (train/memory/tiling.py: _is_norm)."""
    return is_one_kernel(job) or (is_tiled(job) and job.family.norm_parts > 0)


def saves_input_unchanged(job: Job) -> bool:
    """Whether a norm saves its input without a float32 copy of it."""
    return saves_norm_input(job) or job.dtype_bytes == 4


def _count_norm_bytes(job: Job) -> int:
    num_bytes = 8 if job.shape.centers_norms else 4
    return num_bytes + (_count_scaled_bytes(job) if job.trains("norm") else 0)


def _count_scaled_bytes(job: Job) -> int:
    if job.family.norm_parts == 0:
        return 0
    return 4 if job.shape.centers_norms or Trait.PRECISE_NORMS in job.shape.traits else job.dtype_bytes


def compute_adapter_saved(job: Job, kind: Layer) -> int:
    return sum(num_bytes for _, num_bytes, _ in list_adapter_saved(job, kind))


def list_adapter_saved(job: Job, kind: Layer) -> Iterator[tuple[str, int, bool]]:
    """(Adapted linear layer, bytes that its adapter saves, whether it is in the MLP), apart from MLPs in tiles."""
    for name, width, in_mlp in _list_adapters(job, kind):
        if not (is_tiled(job) and in_mlp):
            yield name, width * job.local_tokens, in_mlp


def compute_tile_adapter_saved(job: Job, kind: Layer, *, of_last: bool = True) -> int:
    """What adapters save of one tile of the MLP. `of_last`: also that of the MLP's last matrix."""
    widths = (width for name, width, in_mlp in _list_adapters(job, kind) if in_mlp and (of_last or name != "down_proj"))
    return sum(widths) * count_mlp_tile_tokens(job)


def _list_adapters(job: Job, kind: Layer) -> Iterator[tuple[str, int, bool]]:
    """(Adapted linear layer, bytes per token that its adapter saves, whether it is in the MLP). An adapter saves its
    narrow result, b rank. It shares its input with the layer that it adapts, except under dropout, which makes a copy
    and a mask of one byte per element (torch: native_dropout on a GPU)."""
    if job.adapters is None:
        return
    rank, own = job.adapters.rank, job.dtype_bytes + DROPOUT_MASK_BYTES if job.adapters.drops else 0
    number = job.shape.kinds_before[kind].index(1) - 1  # of the first such layer
    for module in job.weights.modules:
        if module.layer == number and module.name.endswith(".a"):
            width = job.dtype_bytes * rank + own * (module.weights[0][1] // rank)
            yield module.name.removesuffix(".a"), width, module.in_mlp


def is_kv_source(job: Job) -> bool:
    return any(layer.attention and layer.attention.shares_kv for layer in job.shape.layer_kinds)


def find_kv_sources(job: Job) -> dict[int, tuple[int, int]]:
    """By the number of a layer whose keys later ones use: (the last of those, the width of its keys)."""
    kv_sources: dict[bool, int] = {}
    found: dict[int, tuple[int, int]] = {}
    for number, layer in enumerate(job.shape.layers):
        attention = layer.attention
        if attention is None:
            continue
        slides = attention.window_tokens is not None
        if not attention.shares_kv:
            kv_sources[slides] = number
        else:
            found[kv_sources[slides]] = number, attention.num_kv_heads * attention.head_dim
    return found


def compute_lent_keys(job: Job) -> int:
    """2 k b S for each lending layer: every layer's recomputation may read them."""
    return sum(2 * job.dtype_bytes * width * job.local_tokens for _, width in find_kv_sources(job).values())


def compute_lent_keys_waiting(job: Job, num_left: int) -> int:
    """2 k b S: in the backward when the first `num_left` layers are left, the gradients of borrowed keys wait for the
    layer that made them."""
    waiting = (width for at, (last, width) in find_kv_sources(job).items() if at < num_left <= last)
    return sum(2 * job.dtype_bytes * width * job.local_tokens for width in waiting)


def count_vectors_width(job: Job) -> int:
    return job.shape.per_layer_embeddings.width if job.shape.per_layer_embeddings else 0


def have_vectors_gradient(job: Job) -> bool:
    """Whether what makes the vectors is trained, or their projection's input."""
    is_adapted = job.adapters is None or job.adapters.adapts(VECTOR_PROJECTION)
    return is_adapted or job.trains("embed_tokens") or job.trains("norm")


def compute_vectors(job: Job) -> int:
    """b w S: one tensor, of which each layer's vector is a view."""
    return job.dtype_bytes * count_vectors_width(job) * job.local_tokens


def list_vectors_saved(job: Job) -> Lines:
    """From the forward on: the vectors, which a layer that leaves for the host takes with it, what their norm saved,
    and with recomputation the keys and values that layers lend."""
    if job.shape.per_layer_embeddings is None:
        return {"lent_keys": compute_lent_keys(job)} if is_kv_source(job) else {}
    leaves = job.levers.offloaded_layers >= job.shape.num_layers
    norm = compute_norm_saved(job, count_vectors_width(job)) if have_vectors_gradient(job) else 0
    saved = {"token_vectors": compute_vectors(job) if not leaves else 0, "token_vectors_norm": norm}
    return saved | ({"lent_keys": compute_lent_keys(job)} if is_kv_source(job) else {})


def list_vectors_used(job: Job) -> Lines:
    """The same in a forward without a backward."""
    return {"token_vectors": compute_vectors(job), "lent_keys": compute_lent_keys(job)}


def list_vectors_gradients(job: Job, num_left: int) -> Lines:
    """In the backward when the first `num_left` layers are left: the vectors' gradient, to which each layer that is
    done has added its own, and the gradients of borrowed keys, which wait for the layer that made them."""
    lines = {}
    if job.shape.per_layer_embeddings and have_vectors_gradient(job) and num_left < job.shape.num_layers:
        lines["token_vectors_gradient"] = compute_vectors(job)
    if is_kv_source(job):
        lines["borrowed_gradients"] = compute_lent_keys_waiting(job, num_left)
    return lines


def compute_own_vector(job: Job) -> int:
    """b p S: one layer's vector."""
    size = job.shape.per_layer_embeddings.size if job.shape.per_layer_embeddings else 0
    return job.dtype_bytes * size * job.local_tokens


def compute_vector_saved(job: Job) -> int:
    """At the end of a layer: the gate's input, the gate, the activated gate where the vector has a gradient, the
    product and what the norm saves."""
    if job.shape.per_layer_embeddings is None:
        return 0
    num = 1 + int(have_vectors_gradient(job)) + int(saves_input(job, VECTOR_OUTPUT))
    gate_input = compute_layer_input(job) if saves_input(job, VECTOR_GATE) else 0
    return gate_input + num * compute_own_vector(job) + compute_norm_saved(job, job.shape.hidden_size)


def compute_vectors_waiting(job: Job) -> int:
    """Until the end of a layer's backward its vector's gradient waits."""
    has_gradient = job.shape.per_layer_embeddings and have_vectors_gradient(job)
    return compute_own_vector(job) if has_gradient else 0


def compute_vectors_embedding_forward(job: Job) -> int:
    """What was looked up, and the same scaled: 2 b w S."""
    return 2 * compute_vectors(job)


def compute_vector_forward(job: Job) -> int:
    """What was looked up, and the norm of what was projected."""
    return compute_vectors(job) + compute_norm_forward(job, count_vectors_width(job))


def compute_vector_backward(job: Job) -> int:
    """The vectors' gradient, which waits for the embedding, and the norm's backward with what it saved."""
    width = count_vectors_width(job)
    return compute_vectors(job) + compute_norm_saved(job, width) + compute_norm_backward(job, width)


def compute_vectors_embedding_gradient(job: Job) -> int:
    """b V w: whole on every rank until it is reduced; not of a frozen one."""
    vectors = job.shape.per_layer_embeddings
    return job.dtype_bytes * vectors.vocab_size * vectors.width if vectors and job.adapters is None else 0
