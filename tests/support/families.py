"""A tiny model of each supported family."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 128, "sliding_window": 9,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WITH_EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss")
WITHOUT_HEAD_DIM = ("olmo2", "phi3")  # their attention takes hidden_size / num_attention_heads


def make_config(model_type: str, **changes: Any) -> Any:
    """Returns a family's config with tiny sizes; `changes` override them."""
    experts = EXPERTS if model_type in WITH_EXPERTS else {}
    head_dim = {} if model_type in WITHOUT_HEAD_DIM else {"head_dim": 16}
    return AutoConfig.for_model(model_type, **{**SIZES, **experts, **head_dim, **changes})


# Values with which a family's own features take part in two layers.
OWN_VALUES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"num_hidden_layers": 6, "query_pre_attn_scalar": 16},
    "gemma2": {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "smollm3": {"num_hidden_layers": 4},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}


def make_model(model_type: str, attention: str, **changes: Any) -> torch.nn.Module:
    """Makes a model in float64, with the same weights for every attention."""
    values = {**OWN_VALUES.get(model_type, {}), "attn_implementation": attention, "experts_implementation": "eager"}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(model_type, **{**values, **changes})).double()
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    return model
