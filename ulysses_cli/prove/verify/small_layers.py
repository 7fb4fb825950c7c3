"""Sizes of recurrent, convolution and latent layers in the small model: numbers of heads and groups, taps and the
order of layers stay; widths become small.

Pure functions. Fields that a family does not know are ignored by its config.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ulysses_cli.plan.models.family import (
    CONVOLUTION,
    FULL_ATTENTION,
    HYBRID,
    LINEAR_ATTENTION,
    ONLY_EXPERTS,
    ONLY_MLP,
    SLIDING_ATTENTION,
)
from ulysses_cli.plan.models.layers import (
    AttentionMixer,
    ConvolutionMixer,
    DeltaNetMixer,
    KimiDeltaMixer,
    Layer,
    Mamba2Mixer,
)

WIDTH = 8  # of a head's state, of a chunk, of the parts of a latent key
LATENT_RANK, VALUE_WIDTH = 16, 12
# With the usual 0.02, what a narrow layer carries from token to token would be lost in float32's rounding.
INITIALIZER_RANGE = 0.2
# What else says which layers there are, with the numbers of the large model.
OTHER_LISTS = ("hybrid_override_pattern", "layers_block_type", "full_attn_idxs", "linear_attn_config")


def shrink_mixers(small: dict[str, Any], layers: Sequence[Layer], hidden_size: int, expert_size: int) -> None:
    """Changes the content of a config.json whose other sizes are small already. `layers`: those that it keeps."""
    mixers = list(dict.fromkeys(mixer for layer in layers for mixer in layer.mixers))
    if any(isinstance(mixer, AttentionMixer) and mixer.latent is not None for mixer in mixers):
        small |= {"kv_lora_rank": LATENT_RANK, "qk_nope_head_dim": WIDTH, "qk_rope_head_dim": WIDTH}
        small |= {"v_head_dim": VALUE_WIDTH}
        if small.get("q_lora_rank"):
            small["q_lora_rank"] = LATENT_RANK
    recurrent = [mixer for mixer in mixers if not isinstance(mixer, AttentionMixer)]
    kinds = [name_kind(layer) for layer in layers]
    if recurrent or ONLY_MLP in kinds:
        for name in OTHER_LISTS:
            small.pop(name, None)
        small |= _describe_layers(small["model_type"], layers, kinds, expert_size)
        small["initializer_range"] = INITIALIZER_RANGE
    for mixer in recurrent:
        small |= _shrink_mixer(mixer, hidden_size)


def has_states(layers: Sequence[Layer]) -> bool:
    """Whether a layer carries a state from token to token."""
    mixers = dict.fromkeys(mixer for layer in layers for mixer in layer.mixers)
    return any(isinstance(mixer, DeltaNetMixer | KimiDeltaMixer | Mamba2Mixer) for mixer in mixers)


def name_kind(layer: Layer) -> str:
    """As layer_types of a config.json names it."""
    if not layer.mixers:
        return ONLY_EXPERTS if layer.num_experts else ONLY_MLP
    if len(layer.mixers) > 1:
        return HYBRID
    (mixer,) = layer.mixers
    if isinstance(mixer, ConvolutionMixer):
        return CONVOLUTION
    if not isinstance(mixer, AttentionMixer):
        return LINEAR_ATTENTION
    return SLIDING_ATTENTION if mixer.window_tokens else FULL_ATTENTION


def _describe_layers(model_type: str, layers: Sequence[Layer], kinds: list[str], expert_size: int) -> dict[str, Any]:
    described: dict[str, Any] = {"layer_types": kinds, "block_auto_adjust_ff_dim": False}
    if model_type == "bamba":
        full = [index for index, kind in enumerate(kinds) if kind == FULL_ATTENTION]
        described = {"attn_layer_indices": full}
    elif HYBRID in kinds:  # all of its layers are alike
        described = {}
    if any(layer.num_experts for layer in layers):
        num_dense = sum(not layer.num_experts for layer in layers)
        described |= dict.fromkeys(("num_dense_layers", "first_k_dense_replace"), num_dense)
        described |= dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1)
        described["mlp_layer_types"] = ["sparse" if layer.num_experts else "dense" for layer in layers]
    sizes = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
    return described | dict.fromkeys(sizes, expert_size)


def _shrink_mixer(
    mixer: DeltaNetMixer | KimiDeltaMixer | Mamba2Mixer | ConvolutionMixer, hidden_size: int
) -> dict[str, Any]:
    if isinstance(mixer, ConvolutionMixer):
        return {"conv_L_cache": mixer.conv_tokens}
    if isinstance(mixer, KimiDeltaMixer):
        return {
            "linear_num_heads": mixer.num_heads,
            "linear_head_dim": WIDTH,
            "linear_conv_kernel_dim": mixer.conv_tokens,
        }
    if isinstance(mixer, DeltaNetMixer):
        return {
            "linear_num_key_heads": mixer.num_key_heads,
            "linear_num_value_heads": mixer.num_heads,
            "linear_key_head_dim": WIDTH,
            "linear_value_head_dim": WIDTH,
            "linear_conv_kernel_dim": mixer.conv_tokens,
        }
    expand = mixer.num_heads // math.gcd(mixer.num_heads, hidden_size)  # its heads take a multiple of the hidden size
    while expand * hidden_size < mixer.num_heads * WIDTH // 2:
        expand *= 2
    width = expand * hidden_size // mixer.num_heads
    return {
        **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), mixer.num_heads),
        **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), width),
        **dict.fromkeys(("mamba_n_groups", "n_groups"), mixer.num_groups),
        **dict.fromkeys(("mamba_d_state", "ssm_state_size"), WIDTH),
        **dict.fromkeys(("mamba_d_conv", "conv_kernel"), mixer.conv_tokens),
        **dict.fromkeys(("mamba_chunk_size", "chunk_size"), WIDTH),
        "mamba_d_ssm": mixer.num_heads * width,
        "mamba_expand": expand,
    }
