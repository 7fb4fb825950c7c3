"""What a model family is, as facts: which parts its layers have, and the fields of config.json that decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ulysses_cli.plan.models.config_facts import ConfigFacts

SPLIT_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT_PROJECTIONS = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj")  # besides those of queries
SPLIT_MLP = ("gate_proj", "up_proj", "down_proj")
FUSED_MLP = ("gate_up_proj", "down_proj")
PLAIN_MLP = ("up_proj", "down_proj")
FULL_ATTENTION, SLIDING_ATTENTION, LINEAR_ATTENTION = "full_attention", "sliding_attention", "linear_attention"
CONVOLUTION, HYBRID, ONLY_EXPERTS, ONLY_MLP = "conv", "hybrid", "moe", "mlp"
# transformers 5 renamed these (configuration_utils.py: remap_legacy_layer_types).
RENAMED = {"mamba": LINEAR_ATTENTION, "attention": FULL_ATTENTION}

Flag = bool | str  # a fact, or the field of config.json that decides
Kind = Callable[[ConfigFacts, int], str]
Chooses = Callable[[ConfigFacts, int], bool]
Count = Callable[[ConfigFacts], int]


def _attends_fully(facts: ConfigFacts, index: int) -> str:
    return FULL_ATTENTION


def _is_sparse(facts: ConfigFacts, index: int) -> bool:
    """Every layer of a model with experts, but for those that the config names."""
    step = facts.find_count("decoder_sparse_step") or 1
    return (index + 1) % step == 0 and index not in facts.find_list("mlp_only_layers")


def _get_inner_size(facts: ConfigFacts, index: int) -> int:
    return facts.get_count("intermediate_size")


def _count_nothing(facts: ConfigFacts) -> int:
    return 0


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    `kind_of_layer`: by index, where config.json has no layer_types. `has_experts`: by index, in a model with experts,
    where it has no mlp_layer_types. `router_extras`: parameters of the router for each expert besides its row.
    `linear_extras`: names of linear layers besides those of plain attention and MLP,
    some with the field of config.json that has them made. `norm_parts`: 2 with a bias, 1
    without, 0 for norms without weights. `is_rotary`: whether any layer turns queries and keys by their positions.
    `refused`: why rows are not split over ranks, or ''."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    attention_modules: tuple[str, ...] = SPLIT_PROJECTIONS
    mlp_modules: tuple[str, ...] = SPLIT_MLP
    linear_extras: tuple[str | tuple[str, str], ...] = ()
    kind_of_layer: Kind = _attends_fully
    other_kinds: tuple[str, ...] = ()  # of layers, besides attention with and without a window
    qkv_bias: Flag = "attention_bias"
    out_bias: Flag = "attention_bias"
    mlp_bias: Flag = "mlp_bias"
    query_key_norm: Literal["", "head", "full"] = ""  # normalised per head, or over all heads at once
    norms_queries: Flag = True
    attention_gate: Literal["", "elements", "heads"] = ""
    is_gated: Flag = True
    has_sinks: bool = False
    norms_per_layer: int = 2
    norm_parts: int = 1
    centers_norms: Callable[[ConfigFacts], bool] = lambda facts: False
    is_mlp_gated: bool = True
    mlp_extras: int = 0
    has_experts: Chooses = _is_sparse
    experts_have_bias: bool = False
    router_extras: int = 0
    shared_size: Count | None = None
    has_shared_gate: bool = False
    enables_experts: Flag = True
    dense_size: Callable[[ConfigFacts, int], int] = _get_inner_size
    layer_extras: Count = _count_nothing
    model_extras: Count = _count_nothing
    has_post_norms: Flag = False
    latent: bool = False
    has_global_heads: bool = False
    has_token_vectors: bool = False
    shares_blocks: bool = False  # layers of kind HYBRID use a SharedBlock; the others have no MLP
    recurrence: Literal["", "delta_net", "kimi_delta", "mamba2"] = ""
    has_narrow_gates: bool = True  # Kimi's gates are made through a narrow vector
    recurrence_bias: Flag = False
    recurrence_out_bias: Flag = False
    recurrence_conv_bias: Flag = True
    norms_recurrence: Flag = True
    attention_scale: Literal["head_dim", "half_head_dim", "query_pre_attn_scalar", "attention_multiplier", "one"] = (
        "head_dim"
    )
    is_rotary: Callable[[ConfigFacts], bool] = lambda facts: True
    hides_windows: bool = False
    refused: str = ""
