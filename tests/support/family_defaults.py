"""Writes transformers' own defaults of the fields that shapes are read from:
`PYTHONPATH=tests:. python -m support.family_defaults`."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from support.paths import ROOT
from ulysses_cli.plan.models.attention_families import DENSE, EXPERTS
from ulysses_cli.plan.models.families import INEXACT_KEYS
from ulysses_cli.plan.models.hybrid_families import HYBRIDS
from ulysses_cli.plan.models.layers import NUM_CHOSEN, NUM_EXPERTS, OTHER_NAMES

FILE = ROOT / "ulysses_cli" / "plan" / "models" / "defaults" / "transformers.json"
FIELDS = (
    *("num_key_value_heads", "head_dim", "attention_head_dim", "tie_word_embeddings", "max_position_embeddings"),
    *("use_qk_norm", "use_post_norm"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern", "no_rope_layer_interval"),
    *("global_attn_every_n_layers", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
    *(
        "attention_multiplier", "logits_scaling", "logit_scale", "attention_dropout", "residual_dropout",
        "hidden_dropout",
    ),
    *("embedding_dropout", "output_router_logits", "num_experts", "num_local_experts", "n_routed_experts"),
    *("moe_num_experts", "num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("num_shared_experts", "n_shared_experts", "moe_num_shared_experts", "moe_latent_size", "num_dense_layers"),
    *("first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers", "moe_layer_start_index"),
    *("moe_layer_end_index", "moe_layer_interval", "prefix_dense_intermediate_size", "enable_moe_block"),
    *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "attention_k_eq_v"),
    *("num_kv_shared_layers", "use_double_wide_mlp", "hidden_size_per_layer_input", "vocab_size_per_layer_input"),
    *("gating", "use_attention_gate", "use_sandwich_norm", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "linear_num_heads"),
    *(
        "linear_head_dim", "short_conv_kernel_size", "layer_group_size", "mamba_num_heads", "mamba_n_heads",
        "mamba_head_dim", "mamba_d_head", "mamba_d_ssm",
    ),
    *("mamba_expand", "n_groups", "mamba_n_groups", "ssm_state_size", "mamba_d_state", "conv_kernel"),
    *("mamba_d_conv", "chunk_size", "mamba_chunk_size"),
    *("mamba_rms_norm", "attn_layer_indices", "conv_L_cache", "full_attn_idxs"),
    *("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"),
    *("n_mamba_heads", "mamba_ngroups", "num_mem_blocks", "adapter_rank", "use_mem_rope"),
    "use_shared_attention_adapter",
    *INEXACT_KEYS,
)  # fmt: skip
# Published config.json files of these leave out sizes too.
SPARING = {"gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "vaultgemma"}
SPARED = ("num_attention_heads", "vocab_size")
# Arguments of a config's own constructor that are no fields of it.
HIDDEN = {"gemma4_text": {"global_head_dim": 512}, "gemma4_unified_text": {"global_head_dim": 512}}


def read_defaults(model_type: str, names: Iterable[str]) -> dict[str, Any]:
    fields = {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
    found = {name: fields[name] for name in names if name in fields}
    return {name: value for name, value in found.items() if value is not dataclasses.MISSING}


def read_other_names(model_type: str) -> dict[str, Any]:
    """Second names of the fields that count experts. Of each pair in the attribute_map, one is a field."""
    config_type = CONFIG_MAPPING[model_type]
    fields = {field.name for field in dataclasses.fields(config_type)}
    pairs = ({*pair} for pair in config_type.attribute_map.items())
    others = {name for pair in pairs if pair & fields for name in pair - fields}
    found = [name for name in (*NUM_EXPERTS, *NUM_CHOSEN) if name in others]
    return {OTHER_NAMES: found} if found else {}


def make_defaults() -> dict[str, dict[str, Any]]:
    return {
        name: read_defaults(name, (*FIELDS, *(SPARED if name in SPARING else ())))
        | HIDDEN.get(name, {})
        | read_other_names(name)
        for name in (DENSE | EXPERTS | HYBRIDS)
    }


def format_defaults() -> str:
    lines = (f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in make_defaults().items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(format_defaults())
