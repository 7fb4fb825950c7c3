"""Compares the model's own FLOPs with a count by hand and pair by pair."""

from hypothesis import given
from hypothesis import strategies as st

from ulysses_cli.plan.flops import (
    compute_layers_flops,
    compute_model_flops,
    compute_pair_flops,
    count_layer_weights,
    count_pairs,
)
from ulysses_cli.plan.models.shape import read_model_shape

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip


@given(st.integers(1, 60), st.none() | st.integers(1, 80))
def test_pairs_are_counted_within_a_causal_window(length: int, window: int | None) -> None:
    pairs = sum(1 for q in range(length) for k in range(q + 1) if window is None or q - k < window)
    assert count_pairs(length, window) == pairs


def test_a_small_model_by_hand() -> None:
    shape = read_model_shape(CONFIG, "test")
    per_layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96  # q, k and v, out, MLP
    tokens, pairs = 10 + 3, 55 + 6
    forward = 2 * tokens * (2 * per_layer + 64 * 128) + 2 * 4 * 4 * 16 * pairs
    assert compute_model_flops(shape, [10, 3]) == 3 * forward
    saved = compute_model_flops(shape, [10, 3]) - compute_model_flops(shape, [10, 3], 4)
    assert saved == 9 * 6 * shape.hidden_size * shape.vocab_size  # the head of 9 tokens that are no targets
    assert compute_layers_flops(shape, [10, 3]) == forward - 2 * tokens * 64 * 128
    assert compute_pair_flops(shape) == 3 * 2 * 4 * 4 * 16


def test_only_experts_that_a_token_reaches_count() -> None:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    shape = read_model_shape({**CONFIG, "model_type": "mixtral", **experts, "head_dim": 16}, "test")
    dense = read_model_shape(CONFIG, "test")
    more = 3 * 2 * 2 * (3 * 64 * 96 + 64 * 8)  # forward and backward, two layers, one more expert and the router
    assert compute_model_flops(shape, [1]) - compute_model_flops(dense, [1]) == more


def test_vectors_of_layers_and_keys_that_a_layer_makes_count() -> None:
    """Gemma 4: all matrices of its modules but the embeddings, which no token is multiplied with."""
    config = {
        **{"model_type": "gemma4_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
        **{"use_double_wide_mlp": True, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 50},
    }
    shape = read_model_shape(config, "test")
    makes = 2 * (2 * 64 * 64 + 2 * 64 * 128) + 2 * 64 * 32 + 2 * 64 * 64  # q and out of all, k and v of the first two
    mlps = 2 * 3 * 64 * (96 + 192)
    vectors = 64 * 4 * 8 + 4 * 2 * 64 * 8  # their projection; a gate and an output in each layer
    assert sum(count_layer_weights(shape, layer) for layer in shape.layers) == makes + mlps + vectors
