"""A tiny model of each supported family."""

import json
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ulysses_cli.plan.models.families import FAMILIES
from ulysses_cli.plan.models.layers import NUM_EXPERTS
from ulysses_cli.plan.sizes.sources import read_defaults

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 128, "sliding_window": 9,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
    "shared_intermediate_size": 20, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "num_key_value_heads": 4, "head_dim": 4,
}  # fmt: skip
DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8,
}  # fmt: skip
# Their attention takes hidden_size / num_attention_heads.
WITHOUT_HEAD_DIM = ("olmo2", "phi3", "olmo3", "olmoe", "cohere2", "cohere_compass_text")
# Those that share no code with the others, for tests that take long.
TELLING = (
    "gemma2", "gemma3_text", "gpt_oss", "granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3",
    "qwen3_moe", "smollm3",
)  # fmt: skip


# Families whose layers read other tokens by attention alone; support/hybrids.py has the others.
ATTENTION_ONLY = [name for name, family in FAMILIES.items() if not family.other_kinds]


def has_experts(model_type: str) -> bool:
    return any(name in read_defaults(model_type)[0] for name in NUM_EXPERTS)


def make_config(model_type: str, **changes: Any) -> Any:
    """Returns a family's config with tiny sizes; `changes` override them."""
    family = FAMILIES[model_type]
    experts = EXPERTS if has_experts(model_type) else {}
    head_dim = {} if model_type in WITHOUT_HEAD_DIM else {"head_dim": 16}
    latent = LATENT if family.latent else {}
    values = {**SIZES, **experts, **head_dim, **latent, **FIXED_VALUES.get(model_type, {}), **changes}
    for name in {"layer_types", "layers_block_type"} & values.keys():
        num_layers = values["num_hidden_layers"]
        values[name] = (values[name] * num_layers)[:num_layers]
    return AutoConfig.for_model(model_type, **values)


# Sizes that a family's config has under names of its own.
FIXED_VALUES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), DELTA_NET),
    "olmo_hybrid": {**DELTA_NET, "linear_num_key_heads": 4},
    "kimi_linear": {"q_lora_rank": None, "linear_attn_config": {"num_heads": 4, "head_dim": 8}},
    "bailing_hybrid": {"q_lora_rank": None, "num_mtp_layers": 0},
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8,
        "layer_types": ["mamba", "moe", "attention", "mlp"], "moe_shared_expert_intermediate_size": 20,
    },
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "zamba2": {
        "n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 8, "chunk_size": 8, "num_mem_blocks": 1,
        "layers_block_type": ["hybrid", "hybrid", "mamba"], "adapter_rank": 4, "tie_word_embeddings": True,
    },
    **{key: {"layer_types": ["conv", "full_attention"]} for key in ("lfm2", "lfm2_moe")},
    "gemma4_text": {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "helium": {"head_dim": 8},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")
        },
    },
    "seed_oss": {"residual_dropout": 0.0},
    "olmoe": {"sliding_window": None},
}  # fmt: skip

# Values with which a family's own features take part in two layers.
OWN_VALUES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"num_hidden_layers": 6, "query_pre_attn_scalar": 16},
    "gemma2": {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "smollm3": {"num_hidden_layers": 4},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    **{
        key: {"attention_multiplier": 0.2}
        for key in ("granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared")
    },
    **{
        key: {"num_hidden_layers": 4}
        for key in ("afmoe", "cohere2", "cohere2_moe", "cwm", "exaone4", "exaone_moe", "flint", "olmo3")
    },
    "dots1": {"num_hidden_layers": 3, "first_k_dense_replace": 1, "max_window_layers": 1},
    "deepseek_v2": {"first_k_dense_replace": 1},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "gemma4_text": {"num_hidden_layers": 6},
    "gemma4_unified_text": {"num_hidden_layers": 6},
    "glm4_moe": {"use_qk_norm": True, "attention_bias": True},
    "cohere": {"use_qk_norm": True},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "logit_scale": 0.25,
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": None},
    },
    "hyperclovax": {"logits_scaling": 0.25, "residual_multiplier": 0.5, "use_post_norm": True},
    "kolibri1": {"num_hidden_layers": 5},
    "laguna": {"layer_types": ["full_attention", "sliding_attention"], "num_attention_heads_per_layer": [4, 8]},
    "mellum": {"layer_types": ["full_attention", "sliding_attention"]},
    "kimi_linear": {"num_hidden_layers": 5},
    "ministral": {"layer_types": ["full_attention", "sliding_attention"]},
}


def describe_family(model_type: str, **changes: Any) -> dict[str, Any]:
    """The content of a tiny model's config.json, for recipes of tests that train it."""
    content: dict[str, Any] = json.loads(make_config(model_type, **changes).to_json_string(use_diff=False))
    return {**content, "model_type": model_type, "tie_word_embeddings": False}


def make_model(model_type: str, attention: str, **changes: Any) -> torch.nn.Module:
    """Makes a model in float64, with the same weights for every attention."""
    values = {**OWN_VALUES.get(model_type, {}), "attn_implementation": attention, "experts_implementation": "eager"}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(model_type, **{**values, **changes})).double()
    for name, parameter in model.named_parameters():
        if "sinks" in name or name.endswith(("A_log", "dt_bias", "conv1d.bias", "conv.bias")):
            torch.nn.init.normal_(parameter)
    return model
