"""The model's floating-point operations in a step, without recomputation: the numerator of MFU.

A multiplication and an addition are two operations; the backward is twice the forward.
"""

from __future__ import annotations

from collections.abc import Sequence

from ulysses_cli.plan.models.layers import Layer
from ulysses_cli.plan.models.shape import ModelShape


def compute_model_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """Forward and backward of documents of these lengths."""
    tokens = sum(lengths)
    total = float(tokens * 2 * shape.hidden_size * shape.vocab_size)
    for layer in shape.layers:
        pairs = sum(count_pairs(length, layer.window_tokens) for length in lengths)
        total += 2 * tokens * count_layer_weights(shape, layer) + 4 * shape.num_heads * shape.head_dim * pairs
    return 3 * total


def compute_pair_flops(shape: ModelShape) -> float:
    """Forward and backward of one (query, key) pair, over all layers without a sliding window."""
    return 12.0 * shape.num_heads * shape.head_dim * sum(layer.window_tokens is None for layer in shape.layers)


def count_pairs(length: int, window_tokens: int | None) -> int:
    """(query, key) pairs of one causal document."""
    window = min(window_tokens or length, length)
    return window * (window + 1) // 2 + (length - window) * window


def count_layer_weights(shape: ModelShape, layer: Layer) -> int:
    """Weights of a layer that one token is multiplied with: projections, and the experts that it is sent to."""
    attention = shape.hidden_size * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    if not layer.num_experts:
        return attention + 3 * shape.hidden_size * shape.intermediate_size
    experts = 3 * shape.hidden_size * shape.moe_intermediate_size * shape.num_experts_per_token
    return attention + experts + shape.hidden_size * layer.num_experts
