"""The model's floating-point operations in a step, without recomputation: the numerator of MFU.

A multiplication and an addition are two operations; the backward is twice the forward.
"""

from __future__ import annotations

from collections.abc import Sequence

from ulysses_cli.plan.ledger.products import count_products
from ulysses_cli.plan.models.layers import AttentionMixer, DeltaNetMixer, KimiDeltaMixer, Layer, Mamba2Mixer
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.rows.ring import count_pairs


def compute_model_flops(
    shape: ModelShape, lengths: Sequence[int], num_targets: int | None = None, shared: Sequence[int] = ()
) -> float:
    """Forward and backward of documents of these lengths, each behind `shared` tokens that another one computes. The
    head runs for targets alone; by default all tokens are targets."""
    head = 2 * (sum(lengths) if num_targets is None else num_targets) * shape.hidden_size * shape.vocab_size
    return 3 * (head + compute_layers_flops(shape, lengths, shared))


def compute_layers_flops(shape: ModelShape, lengths: Sequence[int], shared: Sequence[int] = ()) -> float:
    """Forward of documents of these lengths, without the head."""
    products, tokens, shared = count_products(shape), sum(lengths), shared or (0,) * len(lengths)
    total = 2.0 * tokens * (products.mlp + products.others)
    for layer in shape.layers:
        pairs = sum(count_pairs(length, layer.window_tokens, at) for length, at in zip(lengths, shared, strict=True))
        total += tokens * count_state_flops(layer)
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


def count_values(mixer: DeltaNetMixer | Mamba2Mixer) -> int:
    """Elements of the result."""
    return mixer.num_heads * (mixer.head_dim if isinstance(mixer, Mamba2Mixer) else mixer.value_head_dim)
