"""The model families that are exact under sequence parallelism, with the facts that their config.json leaves out.

Facts only: transformers' own defaults (a test compares them with the installed version) and the weights of a layer. A
family that is not listed can be trained on one rank per row; splitting its rows over ranks is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

SPLIT_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
SPLIT_MLP = ("gate_proj", "up_proj", "down_proj")
# Given all-linear or the MLP's names, peft adapts experts and routers too (utils/transformers_weight_conversion.py).
EXPERTS_ADAPTED = frozenset({"mixtral", "qwen3_moe"})


@dataclass(frozen=True)
class Family:
    """One `model_type`. `windows`: which layers use sliding_window if config.json has no layer_types."""

    defaults: Mapping[str, Any]
    attention_modules: tuple[str, ...] = SPLIT_PROJECTIONS
    mlp_modules: tuple[str, ...] = SPLIT_MLP
    has_qkv_bias: bool | None = None  # None: attention_bias of the config decides
    has_out_bias: bool | None = None
    query_key_norm: Literal["", "head", "full"] = ""  # normalised per head, or over all heads at once
    norms_per_layer: int = 2
    windows: Literal[
        "none", "all", "from_max_window_layers", "all_but_every_2nd", "all_but_every_6th", "without_rope"
    ] = "none"
    has_sinks: bool = False
    experts_have_bias: bool = False
    attention_scale: Literal["head_dim", "query_pre_attn_scalar", "attention_multiplier"] = "head_dim"


def _list_defaults(**values: Any) -> dict[str, Any]:
    common: dict[str, Any] = {
        "num_key_value_heads": None,
        "head_dim": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    return {**common, **values}


GEMMA_2_DEFAULTS = _list_defaults(
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    tie_word_embeddings=True,
    query_pre_attn_scalar=256,
    sliding_window=4096,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    max_position_embeddings=8192,
    vocab_size=256000,
)
GEMMA_3_DEFAULTS = {
    **GEMMA_2_DEFAULTS,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "max_position_embeddings": 131072,
    "vocab_size": 262208,
}
QWEN_WINDOW_DEFAULTS = {"use_sliding_window": False, "sliding_window": 4096}

FAMILIES: dict[str, Family] = {
    "llama": Family(_list_defaults(max_position_embeddings=2048)),
    "qwen2": Family(
        _list_defaults(
            num_key_value_heads=32, max_position_embeddings=32768, max_window_layers=28, **QWEN_WINDOW_DEFAULTS
        ),
        has_qkv_bias=True,
        has_out_bias=False,
        windows="from_max_window_layers",
    ),
    "qwen3": Family(
        _list_defaults(
            num_key_value_heads=32,
            head_dim=128,
            max_position_embeddings=32768,
            max_window_layers=28,
            **QWEN_WINDOW_DEFAULTS,
        ),
        query_key_norm="head",
        windows="from_max_window_layers",
    ),
    "qwen3_moe": Family(
        _list_defaults(
            num_key_value_heads=4,
            max_position_embeddings=32768,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            decoder_sparse_step=1,
            mlp_only_layers=None,
            **QWEN_WINDOW_DEFAULTS,
        ),
        query_key_norm="head",
        windows="all",
    ),
    "mistral": Family(
        _list_defaults(num_key_value_heads=8, sliding_window=4096, max_position_embeddings=131072),
        has_qkv_bias=False,
        has_out_bias=False,
        windows="all",
    ),
    "mixtral": Family(
        _list_defaults(
            num_key_value_heads=8, max_position_embeddings=131072, num_local_experts=8, num_experts_per_tok=2
        ),
        has_qkv_bias=False,
        has_out_bias=False,
        windows="all",
    ),
    "gemma2": Family(
        GEMMA_2_DEFAULTS,
        norms_per_layer=4,
        windows="all_but_every_2nd",
        attention_scale="query_pre_attn_scalar",
    ),
    "gemma3_text": Family(
        GEMMA_3_DEFAULTS,
        query_key_norm="head",
        norms_per_layer=4,
        windows="all_but_every_6th",
        attention_scale="query_pre_attn_scalar",
    ),
    "phi3": Family(
        _list_defaults(max_position_embeddings=4096),
        attention_modules=("qkv_proj", "o_proj"),
        mlp_modules=("gate_up_proj", "down_proj"),
        has_qkv_bias=False,
        has_out_bias=False,
        windows="all",
    ),
    "gpt_oss": Family(
        _list_defaults(
            num_key_value_heads=8,
            head_dim=64,
            attention_bias=True,
            sliding_window=128,
            max_position_embeddings=131072,
            num_local_experts=128,
            num_experts_per_tok=4,
        ),
        windows="all_but_every_2nd",
        has_sinks=True,
        experts_have_bias=True,
    ),
    "olmo2": Family(_list_defaults(max_position_embeddings=2048), query_key_norm="full"),
    "smollm3": Family(
        _list_defaults(
            num_key_value_heads=4, tie_word_embeddings=True, max_position_embeddings=32768, use_sliding_window=False
        ),
        windows="without_rope",
    ),
    "granite": Family(_list_defaults(max_position_embeddings=2048), attention_scale="attention_multiplier"),
}

# What makes a model inexact when a row is split over ranks, recognized by a key or a layer type of config.json.
LINEAR = "linear attention carries a state from token to token"
CONVOLUTION = "convolution layers read their neighbours' tokens"
MAMBA = "mamba layers carry a state from token to token"
STATE_SPACE = "state-space layers carry a state from token to token"
RECURRENT = "recurrent layers carry a state from token to token"
CHUNKED = "chunked attention cuts the row at positions of its own"
AHEAD = "attention looks ahead as well as back"
INEXACT_LAYER_TYPES = {
    "linear_attention": LINEAR,
    "conv": CONVOLUTION,
    "mamba": MAMBA,
    "hybrid": MAMBA,
    "recurrent": RECURRENT,
    "chunked_attention": CHUNKED,
}
INEXACT_KEYS = {
    "kv_lora_rank": "multi-head latent attention (MLA) shares one compressed key among heads",
    "mamba_d_state": MAMBA,
    "mamba_d_conv": MAMBA,
    "ssm_cfg": MAMBA,
    "state_size": STATE_SPACE,
    "conv_L_cache": CONVOLUTION,
    "linear_num_key_heads": LINEAR,
    "lru_width": RECURRENT,
    "attention_chunk_size": CHUNKED,
    "use_bidirectional_attention": AHEAD,
}
# Layers that carry something from one document of a row into the next, which attention's masks cannot prevent.
CROSSING = frozenset({LINEAR, CONVOLUTION, MAMBA, STATE_SPACE, RECURRENT})
# Attention that no kernel here computes, on one rank or on many.
UNSERVED = frozenset({CHUNKED, AHEAD})
