"""The model's floating-point operations in a step, without recomputation: the numerator of MFU.

A multiplication and an addition are two operations; the backward is twice the forward.
"""

from __future__ import annotations

from collections.abc import Sequence

from ulysses_cli.plan.models.layers import (
    AttentionMixer,
    ConvolutionMixer,
    DeltaNetMixer,
    DenseMlp,
    ExpertsMlp,
    KimiDeltaMixer,
    Latent,
    Layer,
    Mamba2Mixer,
    Mixer,
    count_own_of_shared,
)
from ulysses_cli.plan.models.shape import ModelShape


def compute_model_flops(
    shape: ModelShape, lengths: Sequence[int], num_targets: int | None = None, shared: Sequence[int] = ()
) -> float:
    """Forward and backward of documents of these lengths, each behind `shared` tokens that another one computes. The
    head runs for targets alone; by default all tokens are targets."""
    head = 2 * (sum(lengths) if num_targets is None else num_targets) * shape.hidden_size * shape.vocab_size
    return 3 * (head + compute_layers_flops(shape, lengths, shared))


def compute_layers_flops(shape: ModelShape, lengths: Sequence[int], shared: Sequence[int] = ()) -> float:
    """Forward of documents of these lengths, without the head."""
    tokens, total, shared = sum(lengths), 0.0, shared or (0,) * len(lengths)
    for layer in shape.layers:
        pairs = sum(count_pairs(length, layer.window_tokens, at) for length, at in zip(lengths, shared, strict=True))
        total += tokens * (2 * count_layer_weights(shape, layer) + count_state_flops(layer))
        total += count_pair_flops(layer) * pairs
    return total


def compute_pair_flops(shape: ModelShape) -> float:
    """Forward and backward of one (query, key) pair, over all layers without a sliding window."""
    return 3.0 * sum(count_pair_flops(layer) for layer in shape.layers if layer.window_tokens is None)


def count_pair_flops(layer: Layer) -> int:
    """Forward of one (query, key) pair in all heads: the product with the key, and that with the value."""
    attention = layer.attention
    return 2 * attention.num_heads * (attention.head_dim + attention.value_head_dim) if attention else 0


def count_state_flops(layer: Layer) -> int:
    """Forward of one token in a recurrence, for each element of the states: a product to write and one to read, and for
    a delta rule one to find what is replaced. A convolution has a product for each tap."""
    total = 0
    for mixer in layer.mixers:
        if isinstance(mixer, AttentionMixer):
            continue
        total += 2 * mixer.conv_channels * mixer.conv_tokens
        if isinstance(mixer, Mamba2Mixer):
            total += 4 * mixer.num_heads * mixer.head_dim * mixer.state_dim
        elif isinstance(mixer, DeltaNetMixer):
            total += 6 * mixer.num_heads * mixer.key_head_dim * mixer.value_head_dim
        elif isinstance(mixer, KimiDeltaMixer):
            total += 6 * mixer.num_heads * mixer.head_dim * mixer.head_dim
    return total


def count_pairs(length: int, window_tokens: int | None, num_shared: int = 0) -> int:
    """(query, key) pairs of one causal document, whose queries follow `num_shared` keys."""
    if num_shared:
        return count_pairs(num_shared + length, window_tokens) - count_pairs(num_shared, window_tokens)
    window = min(window_tokens or length, length)
    return window * (window + 1) // 2 + (length - window) * window


def count_layer_weights(shape: ModelShape, layer: Layer) -> int:
    """Weights of a layer that one token is multiplied with: projections, and the experts that it is sent to."""
    return count_projected(shape, layer) + count_mlp_weights(shape, layer)


def count_projected(shape: ModelShape, layer: Layer) -> int:
    """Weights of its projections: q, k, v and out, and gates; of a convolution 4 h c; of a delta net or Mamba2 what its
    convolution takes, the gate, the output, and a number or two for each head."""
    own = count_own_of_shared(layer, shape.hidden_size) + count_vector_weights(shape)
    return sum(_count_projected_of(shape, mixer) for mixer in layer.mixers) + own


def _count_projected_of(shape: ModelShape, mixer: Mixer) -> int:
    hidden = shape.hidden_size
    if isinstance(mixer, AttentionMixer):
        if mixer.latent is not None:
            return _count_latent(hidden, mixer, mixer.latent)
        made = mixer.num_inputs * (mixer.num_heads + mixer.num_made * mixer.num_kv_heads)
        return hidden * ((mixer.num_heads + made) * mixer.head_dim + mixer.gate_width)
    if isinstance(mixer, ConvolutionMixer):
        return hidden * 4 * mixer.conv_channels
    if isinstance(mixer, KimiDeltaMixer):
        width, is_narrow = mixer.num_heads * mixer.head_dim, shape.family is None or shape.family.has_narrow_gates
        gate = mixer.head_dim * (hidden + width) if is_narrow else hidden * width
        return hidden * (4 * width + mixer.num_heads) + 2 * gate
    small = (1 + int(isinstance(mixer, DeltaNetMixer))) * mixer.num_heads
    return hidden * (mixer.conv_channels + 2 * count_values(mixer) + small)


def _count_latent(hidden: int, mixer: AttentionMixer, latent: Latent) -> int:
    queries, values = mixer.num_heads * mixer.head_dim, mixer.num_heads * mixer.value_head_dim
    expanded = queries - mixer.num_heads * latent.rope_dim + values
    of_queries = hidden * queries if latent.query_rank is None else latent.query_rank * (hidden + queries)
    return of_queries + hidden * (latent.kv_rank + latent.rope_dim + values) + latent.kv_rank * expanded


def count_values(mixer: DeltaNetMixer | Mamba2Mixer) -> int:
    """Elements of the result."""
    return mixer.num_heads * (mixer.head_dim if isinstance(mixer, Mamba2Mixer) else mixer.value_head_dim)


def count_mlp_weights(shape: ModelShape, layer: Layer) -> int:
    """With experts, for each expert of a token, and the router."""
    hidden, mlp = shape.hidden_size, layer.mlp
    if mlp is None:
        return 0
    num_matrices = 2 + int(mlp.is_gated)
    if isinstance(mlp, DenseMlp):
        return num_matrices * hidden * mlp.inner_size
    experts = mlp.num_per_token * num_matrices * (mlp.latent_size or hidden) * mlp.inner_size
    return experts + hidden * (num_matrices * mlp.shared_size + mlp.num_experts + 2 * mlp.latent_size)


def count_vector_weights(shape: ModelShape) -> int:
    """Of a layer with a vector of its own for each token: its part of what projects to them, a gate and an output."""
    return 3 * shape.hidden_size * shape.per_layer_embeddings.size if shape.per_layer_embeddings else 0


def count_idle(shape: ModelShape, layer: Layer, num_tokens: int = 1) -> int:
    """Weights of the experts that none of the tokens is sent to, if no two of them share an expert."""
    if not isinstance(layer.mlp, ExpertsMlp):
        return 0
    matrices = (2 + int(layer.mlp.is_gated)) * (layer.mlp.latent_size or shape.hidden_size) * layer.mlp.inner_size
    return max(0, layer.mlp.num_experts - num_tokens * layer.mlp.num_per_token) * matrices
