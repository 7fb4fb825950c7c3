"""A tiny model of each family with convolutions or recurrences."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TINY: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 128, "attention_dropout": 0.0,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_expand": 2,
    "mamba_chunk_size": 8,
}  # fmt: skip
LATENT = {  # latent attention, with values as wide as keys
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**DELTA, **EXPERTS},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS},
    "olmo_hybrid": {**DELTA, "linear_num_key_heads": 4},
    "kimi_linear": {
        **LATENT,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "num_hidden_layers": 3,
    },
    "bailing_hybrid": {
        **LATENT,
        "head_dim": 8,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
    },
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8,
        "layer_types": ["mamba", "moe", "mamba", "attention"], "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24,
    },
    "granitemoehybrid": {
        **MAMBA, "layer_types": ["mamba", "mamba", "attention", "mamba"], "num_local_experts": 4,
        "num_experts_per_tok": 2, "shared_intermediate_size": 24,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "num_hidden_layers": 2},
    "bamba": {**MAMBA, "attn_layer_indices": [1], "num_hidden_layers": 3},
    "zamba2": {
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 8,
        "chunk_size": 8,
        "num_key_value_heads": 4,
        "adapter_rank": 4,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
        "tie_word_embeddings": True,
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "num_dense_layers": 1,
    },
    "lfm3": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
}  # fmt: skip


def describe_hybrid(model_type: str, **changes: Any) -> dict[str, Any]:
    """A tiny model's config.json, for recipes of tests that train it."""
    sizes = {"vocab_size": 64, "max_position_embeddings": 256, "tie_word_embeddings": False}
    return {**TINY, **sizes, **HYBRIDS[model_type], "model_type": model_type, **changes}


def make_hybrid_config(model_type: str, **changes: Any) -> Any:
    return AutoConfig.for_model(model_type, **{**TINY, **HYBRIDS[model_type], **changes})


def make_hybrid(model_type: str, attention: str, **changes: Any) -> torch.nn.Module:
    """In float64, with the same weights for every attention. Parts that a new model sets to zero are at work."""
    config = make_hybrid_config(model_type, **changes, attn_implementation=attention, experts_implementation="eager")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double()
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias", "conv1d.bias", "conv.bias")):
            torch.nn.init.uniform_(parameter, 0.1, 1.0)
    return model
