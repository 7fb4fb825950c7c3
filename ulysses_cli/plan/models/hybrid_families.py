"""Families with recurrent or convolution layers, most of them beside layers with softmax attention."""

from __future__ import annotations

from dataclasses import replace

from ulysses_cli.plan.models.attention_families import follow_dense_layers
from ulysses_cli.plan.models.family import (
    CONVOLUTION,
    FULL_ATTENTION,
    HYBRID,
    LINEAR_ATTENTION,
    ONLY_EXPERTS,
    ONLY_MLP,
    SLIDING_ATTENTION,
    ConfigFacts,
    Family,
    Trait,
)

ZAMBA_HYBRIDS = {6, 12, 18, 24, 30, 36, 42, 47, 51}
NEMOTRON_LETTERS = {"M": LINEAR_ATTENTION, "E": ONLY_EXPERTS, "*": FULL_ATTENTION, "-": ONLY_MLP}


def find_qwen_kind(facts: ConfigFacts, index: int) -> str:
    every = facts.find_count("full_attention_interval") or 4
    return LINEAR_ATTENTION if (index + 1) % every else FULL_ATTENTION


def find_olmo_kind(facts: ConfigFacts, index: int) -> str:
    num_layers = facts.get_count("num_hidden_layers")
    is_full = index % 4 == 3 or (num_layers < 4 and index == num_layers - 1)
    return FULL_ATTENTION if is_full else LINEAR_ATTENTION


def find_kimi_kind(facts: ConfigFacts, index: int) -> str:
    """config.json counts layers from one."""
    own = facts.find_mapping("linear_attn_config")
    if isinstance(own.get("full_attn_layers"), list) and isinstance(own.get("kda_layers"), list):
        return FULL_ATTENTION if index + 1 in own["full_attn_layers"] else LINEAR_ATTENTION
    return FULL_ATTENTION if index and index % 4 == 0 else LINEAR_ATTENTION


def find_bailing_kind(facts: ConfigFacts, index: int) -> str:
    every = facts.find_count("layer_group_size") or 6
    return LINEAR_ATTENTION if (index + 1) % every else FULL_ATTENTION


def find_nemotron_kind(facts: ConfigFacts, index: int) -> str:
    pattern = facts.find("hybrid_override_pattern")
    letter = pattern[index] if isinstance(pattern, str) and index < len(pattern) else ""
    return NEMOTRON_LETTERS.get(letter, (LINEAR_ATTENTION, ONLY_EXPERTS, FULL_ATTENTION, ONLY_MLP)[index % 4])


def find_bamba_kind(facts: ConfigFacts, index: int) -> str:
    return FULL_ATTENTION if index in facts.find_list("attn_layer_indices") else LINEAR_ATTENTION


def find_zamba_kind(facts: ConfigFacts, index: int) -> str:
    """Without a list, the layers of the 2.7B model."""
    return HYBRID if index in ZAMBA_HYBRIDS else LINEAR_ATTENTION


def find_zamba_size(facts: ConfigFacts, index: int) -> int:
    return facts.find_count("intermediate_size") or 4 * facts.get_count("hidden_size")


def find_lfm_2_kind(facts: ConfigFacts, index: int) -> str:
    full = facts.find("full_attn_idxs")
    return FULL_ATTENTION if full is None or index in facts.find_list("full_attn_idxs") else CONVOLUTION


def find_lfm_3_kind(facts: ConfigFacts, index: int) -> str:
    return FULL_ATTENTION if index % 4 == 2 else SLIDING_ATTENTION if index % 4 == 0 and index else CONVOLUTION


def find_lfm_2_size(facts: ConfigFacts, index: int) -> int:
    size = facts.get_count("block_ff_dim", "intermediate_size")
    if not facts.find("block_auto_adjust_ff_dim"):
        return size
    factor, multiple = facts.find_number("block_ffn_dim_multiplier"), facts.find_count("block_multiple_of") or 1
    size = int((1.0 if factor is None else factor) * int(2 * size / 3))
    return -(-size // multiple) * multiple


def turn_nothing(facts: ConfigFacts) -> bool:
    return False


def turn_olmo(facts: ConfigFacts) -> bool:
    """A base of null, where config.json has one, means no rotary positions."""
    rope = facts.find_mapping("rope_parameters")
    holder = rope if "rope_theta" in rope else facts.values
    return holder.get("rope_theta", 0) is not None


def turn_zamba(facts: ConfigFacts) -> bool:
    return bool(facts.find("use_mem_rope"))


def turn_granite(facts: ConfigFacts) -> bool:
    return bool(facts.find("position_embedding_type") == "rope")


QWEN = Family(kind_of_layer=find_qwen_kind, recurrence="delta_net", other_kinds=(LINEAR_ATTENTION,))
HYBRIDS: dict[str, Family] = {
    "qwen3_next": replace(QWEN, traits=(Trait.EXPERTS_ADAPTED,)),
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN,
    "olmo_hybrid": Family(
        kind_of_layer=find_olmo_kind,
        is_rotary=turn_olmo,
        recurrence="delta_net",
        other_kinds=(LINEAR_ATTENTION,),
    ),
    "kimi_linear": Family(
        latent=True,
        kind_of_layer=find_kimi_kind,
        is_rotary=turn_nothing,
        has_experts=follow_dense_layers("first_k_dense_replace", 1),
        recurrence="kimi_delta",
        other_kinds=(LINEAR_ATTENTION,),
        traits=(Trait.SIGMOID_ROUTERS,),
    ),
    "bailing_hybrid": Family(
        latent=True,
        kind_of_layer=find_bailing_kind,
        other_kinds=(LINEAR_ATTENTION,),
        has_experts=follow_dense_layers("first_k_dense_replace", 2),
        recurrence="kimi_delta",
        has_narrow_gates=False,
        traits=(Trait.SIGMOID_ROUTERS,),
    ),
    "nemotron_h": Family(
        gates_experts=False,
        kind_of_layer=find_nemotron_kind,
        is_rotary=turn_nothing,
        recurrence="mamba2",
        other_kinds=(LINEAR_ATTENTION, ONLY_EXPERTS, ONLY_MLP),
        traits=(Trait.SIGMOID_ROUTERS,),
        refused_by_peft="out_proj",
    ),
    "granitemoehybrid": Family(
        kind_of_layer=lambda facts, index: LINEAR_ATTENTION,
        is_rotary=turn_granite,
        dense_size=lambda facts, index: facts.get_count("shared_intermediate_size"),
        attention_scale="attention_multiplier",
        recurrence="mamba2",
        other_kinds=(LINEAR_ATTENTION,),
    ),
    "falcon_h1": Family(
        kind_of_layer=lambda facts, index: HYBRID,
        recurrence="mamba2",
        norms_recurrence="mamba_rms_norm",
        other_kinds=(HYBRID,),
        refused_by_peft="out_proj",
    ),
    "bamba": Family(
        kind_of_layer=find_bamba_kind,
        traits=(Trait.NUMBERED_ATTENTION,),
        recurrence="mamba2",
        other_kinds=(LINEAR_ATTENTION,),
    ),
    "zamba2": Family(
        # the last two are its adapters
        kind_of_layer=find_zamba_kind,
        is_rotary=turn_zamba,
        dense_size=find_zamba_size,
        attention_scale="half_head_dim",
        recurrence="mamba2",
        other_kinds=(LINEAR_ATTENTION, HYBRID),
        shares_blocks=True,
    ),
    "lfm2": Family(
        kind_of_layer=find_lfm_2_kind,
        dense_size=find_lfm_2_size,
        other_kinds=(CONVOLUTION,),
    ),
    "lfm2_moe": Family(
        kind_of_layer=find_lfm_2_kind,
        has_experts=follow_dense_layers("num_dense_layers", 2),
        other_kinds=(CONVOLUTION,),
        traits=(Trait.SIGMOID_ROUTERS,),
    ),
    "lfm3": Family(
        kind_of_layer=find_lfm_3_kind,
        other_kinds=(CONVOLUTION,),
    ),
}
