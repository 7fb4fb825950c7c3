"""Sizes of recurrent, convolution and latent layers in the small model: numbers of heads and groups, taps and the
order of layers stay; widths become small.

Pure functions. Fields that a family does not know are ignored by its config.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ulysses_cli.plan.models.config_layers import NUM_CHOSEN, NUM_EXPERTS
from ulysses_cli.plan.models.families import list_traits
from ulysses_cli.plan.models.family import (
    CONVOLUTION,
    FULL_ATTENTION,
    HYBRID,
    LINEAR_ATTENTION,
    ONLY_EXPERTS,
    ONLY_MLP,
    SLIDING_ATTENTION,
    Trait,
)
from ulysses_cli.plan.models.layers import (
    AttentionMixer,
    ConvolutionMixer,
    DeltaNetMixer,
    ExpertsMlp,
    KimiDeltaMixer,
    Layer,
    Mamba2Mixer,
)

WIDTH = 8  # of a head's state, of a chunk, of the parts of a latent key
LATENT_RANK, VALUE_WIDTH = 16, 12
NUM_SMALL_EXPERTS = 4
FIRST_WITH_EXPERTS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
SHARED_SIZES = ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size")
# With the usual 0.02, what a narrow layer carries from token to token would be lost in float32's rounding.
INITIALIZER_RANGE = 0.2
# What else says which layers there are, with the numbers of the large model.
OTHER_LISTS = ("hybrid_override_pattern", "layers_block_type", "full_attn_idxs", "linear_attn_config")
# What Zamba2's config computes, writes into its file, and believes when it reads that.
COMPUTED = (
    *("hybrid_layer_ids", "attention_hidden_size", "attention_head_dim", "head_dim", "mamba_headdim", "kv_channels"),
    "num_query_groups",
)


def shrink_mixers(small: dict[str, Any], layers: Sequence[Layer], hidden_size: int, expert_size: int) -> None:
    """Changes the content of a config.json whose other sizes are small already. `layers`: those that it keeps."""
    mixers = list(dict.fromkeys(mixer for layer in layers for mixer in layer.mixers))
    if any(isinstance(mixer, AttentionMixer) and mixer.latent is not None for mixer in mixers):
        small |= {"kv_lora_rank": LATENT_RANK, "qk_nope_head_dim": WIDTH, "qk_rope_head_dim": WIDTH}
        small |= {"v_head_dim": VALUE_WIDTH, "head_dim": WIDTH}  # which is the rotary part's
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
    for name in COMPUTED if any(layer.shared for layer in layers) else ():
        small.pop(name, None)


def shrink_experts(config: Mapping[str, Any], layers: Sequence[Layer], expert_size: int) -> dict[str, Any]:
    """A few experts, one group of them, and as many dense layers at the front as are kept."""
    chosen = min(2, max(layer.mlp.num_per_token for layer in layers if isinstance(layer.mlp, ExpertsMlp)))
    num_dense = sum(not layer.num_experts for layer in layers)
    small: dict[str, Any] = {"decoder_sparse_step": 1, "moe_intermediate_size": expert_size}
    small |= dict.fromkeys(NUM_EXPERTS, NUM_SMALL_EXPERTS)
    small |= {name: chosen for name in NUM_CHOSEN if name in config or name == NUM_CHOSEN[0]}
    small |= {name: num_dense for name in FIRST_WITH_EXPERTS if name in config}
    small |= {name: 1 for name in ("n_group", "topk_group", "num_expert_group") if config.get(name)}
    return small | {name: expert_size for name in SHARED_SIZES if config.get(name)}


def shrink_heads(config: Mapping[str, Any], layers: Sequence[Layer], head_dim: int) -> dict[str, Any]:
    """Where layers without a window have heads of another width, they keep heads twice as wide, and what they share."""
    mixers = [layer.attention for layer in layers if layer.attention]
    small: dict[str, Any] = {}
    if "per_layer_config" in config or "global_head_dim" in config or len({mixer.head_dim for mixer in mixers}) > 1:
        full = {str(at): mixer for at, mixer in enumerate(mixers) if not mixer.window_tokens}
        small["per_layer_config"] = {
            at: {"head_dim": 2 * head_dim, "num_key_value_heads": mixer.num_kv_heads} for at, mixer in full.items()
        }
    if "num_kv_shared_layers" in config:
        small["num_kv_shared_layers"] = sum(mixer.borrows_kv for mixer in mixers)
    if config.get("hidden_size_per_layer_input"):
        small |= {"hidden_size_per_layer_input": WIDTH, "vocab_size_per_layer_input": config["vocab_size"]}
    if isinstance(config.get("time_step_limit"), list):  # files spell infinity in several ways; it is the default
        small["time_step_limit"] = (0.0, math.inf)
    return small


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
    if Trait.NUMBERED_ATTENTION in list_traits(model_type):
        full = [index for index, kind in enumerate(kinds) if kind == FULL_ATTENTION]
        described = {"attn_layer_indices": full}
    elif any(layer.shared for layer in layers):  # `layer_types` would be set after the numbers of such layers
        described = {"layers_block_type": kinds}
    elif set(kinds) == {HYBRID}:  # all of its layers are alike
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
        **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), mixer.num_heads),
        **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), width),
        **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), mixer.num_groups),
        **dict.fromkeys(("mamba_d_state", "ssm_state_size"), WIDTH),
        **dict.fromkeys(("mamba_d_conv", "conv_kernel"), mixer.conv_tokens),
        **dict.fromkeys(("mamba_chunk_size", "chunk_size"), WIDTH),
        "mamba_d_ssm": mixer.num_heads * width,
        "mamba_expand": expand,
    }
