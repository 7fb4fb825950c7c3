"""Families whose layers all have softmax attention and one MLP."""

from __future__ import annotations

from ulysses_cli.plan.models.config_facts import ConfigFacts
from ulysses_cli.plan.models.family import (
    FULL_ATTENTION,
    FUSED_MLP,
    LATENT_PROJECTIONS,
    PLAIN_MLP,
    SLIDING_ATTENTION,
    Family,
    Kind,
    Trait,
)


def slide(facts: ConfigFacts, index: int) -> str:
    return SLIDING_ATTENTION


def slide_but_every(default: int, field: str = "sliding_window_pattern") -> Kind:
    """The last layer of each group has no window."""

    def find_kind(facts: ConfigFacts, index: int) -> str:
        every = facts.find_count(field) or default
        return SLIDING_ATTENTION if (index + 1) % every else FULL_ATTENTION

    return find_kind


def slide_but_first_of(every: int) -> Kind:
    return lambda facts, index: SLIDING_ATTENTION if index % every else FULL_ATTENTION


def slide_from_max_window_layers(facts: ConfigFacts, index: int) -> str:
    return SLIDING_ATTENTION if index >= (facts.find_count("max_window_layers") or 0) else FULL_ATTENTION


def slide_without_rope(facts: ConfigFacts, index: int) -> str:
    every = facts.find_count("no_rope_layer_interval") or 4
    return SLIDING_ATTENTION if (index + 1) % every == 0 else FULL_ATTENTION


def slide_gemma_4(facts: ConfigFacts, index: int) -> str:
    """The last layer has no window, whatever config.json says."""
    is_last = index == (facts.find_count("num_hidden_layers") or 0) - 1
    return FULL_ATTENTION if is_last or (index + 1) % 6 == 0 else SLIDING_ATTENTION


def find_wide_size(facts: ConfigFacts, index: int) -> int:
    """Gemma 4's layers that borrow keys and values may have an MLP twice as wide."""
    borrows = index >= facts.get_count("num_hidden_layers") - (facts.find_count("num_kv_shared_layers") or 0)
    return facts.get_count("intermediate_size") * (1 + bool(borrows and facts.find("use_double_wide_mlp")))


def count_per_layer_inputs(facts: ConfigFacts) -> int:
    """Gemma 4: a gate, a projection and a norm for the layer's own embedding of a token."""
    hidden, own = facts.get_count("hidden_size"), facts.find_count("hidden_size_per_layer_input") or 0
    total = (2 * hidden * own + hidden) if own else 0
    if facts.find("enable_moe_block"):  # beside the MLP: three norms and the router's scale
        total += 4 * hidden
    return total


def count_per_layer_embeddings(facts: ConfigFacts) -> int:
    own = facts.find_count("hidden_size_per_layer_input") or 0
    width = own * facts.get_count("num_hidden_layers")
    return width * ((facts.find_count("vocab_size_per_layer_input") or 0) + facts.get_count("hidden_size")) + own


def center(facts: ConfigFacts) -> bool:
    """transformers: modeling_cohere.py, CohereLayerNorm; Command A may have RMSNorm instead."""
    return facts.find("rms_norm_eps") is None


GEMMA_4_EXTRAS = (
    *((name, "hidden_size_per_layer_input") for name in ("per_layer_input_gate", "per_layer_projection")),
    ("per_layer_model_projection", "hidden_size_per_layer_input"),
    ("proj", "enable_moe_block"),
)
LATENT = Family(attention_modules=LATENT_PROJECTIONS, latent=True, mlp_bias=False)

DENSE: dict[str, Family] = {
    "llama": Family(),
    "qwen2": Family(qkv_bias=True, out_bias=False, mlp_bias=False, kind_of_layer=slide_from_max_window_layers),
    "qwen3": Family(query_key_norm="head", mlp_bias=False, kind_of_layer=slide_from_max_window_layers),
    "mistral": Family(qkv_bias=False, out_bias=False, mlp_bias=False, kind_of_layer=slide),
    "gemma2": Family(
        mlp_bias=False,
        norms_per_layer=4,
        kind_of_layer=slide_but_every(2, ""),
        attention_scale="query_pre_attn_scalar",
        traits=(Trait.PRECISE_NORMS, Trait.POST_NORMS),
    ),
    "gemma3_text": Family(
        query_key_norm="head",
        mlp_bias=False,
        norms_per_layer=4,
        kind_of_layer=slide_but_every(6),
        attention_scale="query_pre_attn_scalar",
        traits=(Trait.PRECISE_NORMS, Trait.POST_NORMS, Trait.NORMS_AFTER_ALL),
    ),
    "phi3": Family(
        attention_modules=("qkv_proj", "o_proj"),
        mlp_modules=FUSED_MLP,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        kind_of_layer=slide,
    ),
    "olmo2": Family(
        query_key_norm="full",
        mlp_bias=False,
        traits=(Trait.PRECISE_NORMS, Trait.PRECISE_ROTARY, Trait.POST_NORMS, Trait.WITHOUT_INPUT_NORM),
    ),
    "smollm3": Family(kind_of_layer=slide_without_rope),
    "granite": Family(attention_scale="attention_multiplier", traits=(Trait.SCALED_RESULTS,)),
    "apertus": Family(
        query_key_norm="head",
        mlp_modules=PLAIN_MLP,
        is_mlp_gated=False,
        mlp_bias=False,
        mlp_extras=2,
        activation="xielu",
    ),
    "arcee": Family(mlp_modules=PLAIN_MLP, is_mlp_gated=False),
    "cohere": Family(
        norms_per_layer=1,
        centers_norms=center,
        query_key_norm="full",
        norms_queries="use_qk_norm",
        mlp_bias=False,
        traits=(Trait.MATRIX_NORMS, Trait.COPIES_TO_ROTATE, Trait.PARALLEL),
    ),
    "cohere2": Family(
        norms_per_layer=1,
        centers_norms=center,
        mlp_bias=False,
        kind_of_layer=slide_but_every(4),
        traits=(Trait.COPIES_TO_ROTATE, Trait.PARALLEL),
    ),
    "cwm": Family(qkv_bias=False, out_bias=False, kind_of_layer=slide_but_first_of(4)),
    "ernie4_5": Family(
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        traits=(Trait.PRECISE_ROTARY,),
        interleaved_rotary=1.0,
    ),
    "exaone4": Family(
        query_key_norm="head",
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        kind_of_layer=slide_but_every(4),
        traits=(Trait.POST_NORMS, Trait.WITHOUT_INPUT_NORM),
    ),
    "gemma": Family(mlp_bias=False, traits=(Trait.PRECISE_NORMS,)),
    "gemma4_text": Family(
        linear_extras=GEMMA_4_EXTRAS,
        query_key_norm="head",
        mlp_bias=False,
        norms_per_layer=4,
        kind_of_layer=slide_gemma_4,
        has_global_heads=True,
        attention_scale="one",
        dense_size=find_wide_size,
        layer_extras=count_per_layer_inputs,
        model_extras=count_per_layer_embeddings,
        has_token_vectors=True,
        enables_experts="enable_moe_block",
        shared_size=lambda facts: facts.get_count("intermediate_size"),
        router_extras=1,
        traits=(
            Trait.PRECISE_RESULTS,
            Trait.PRECISE_NORMS,
            Trait.POST_NORMS,
            Trait.BESIDE_MLP,
            Trait.SCALED_LAYERS,
            Trait.NORMS_OF_VALUES,
            Trait.SHARED_FIRST,
            Trait.EXPERTS_LAST,
        ),
    ),
    "gemma4_unified_text": Family(
        query_key_norm="head",
        mlp_bias=False,
        norms_per_layer=4,
        kind_of_layer=slide_gemma_4,
        has_global_heads=True,
        attention_scale="one",
        dense_size=find_wide_size,
        traits=(Trait.PRECISE_NORMS, Trait.POST_NORMS, Trait.SCALED_LAYERS, Trait.NORMS_OF_VALUES),
    ),
    "glm": Family(out_bias=False, mlp_modules=FUSED_MLP, mlp_bias=False, interleaved_rotary=0.5),
    "glm4": Family(
        out_bias=False,
        mlp_modules=FUSED_MLP,
        mlp_bias=False,
        norms_per_layer=4,
        traits=(Trait.POST_NORMS,),
        interleaved_rotary=0.5,
    ),
    "granite_swa": Family(has_sinks=True, kind_of_layer=slide_but_first_of(4), attention_scale="attention_multiplier"),
    "helium": Family(out_bias=False, traits=(Trait.PRECISE_NORMS,), interleaved_rotary=1.0),
    "hunyuan_v1_dense": Family(query_key_norm="head", mlp_bias=False),
    "hyperclovax": Family(
        has_post_norms="use_post_norm",
        attention_scale="attention_multiplier",
        traits=(Trait.SCALED_RESULTS, Trait.SCALING_MULTIPLIES),
    ),
    "internlm3": Family(),
    "iquestcoder": Family(),
    "jais2": Family(mlp_modules=PLAIN_MLP, is_mlp_gated=False, norm_parts=2, traits=(Trait.NATIVE_NORMS,)),
    "minicpm3": LATENT,
    "ministral": Family(qkv_bias=False, out_bias=False, mlp_bias=False, kind_of_layer=slide),
    "ministral3": Family(qkv_bias=False, out_bias=False, mlp_bias=False, kind_of_layer=slide),
    "nanochat": Family(
        mlp_modules=("fc1", "fc2"),
        is_mlp_gated=False,
        norm_parts=0,
        query_key_norm="head",
        mlp_bias=False,
        traits=(Trait.NORMED_EMBEDDINGS,),
    ),
    "olmo": Family(norm_parts=0, mlp_bias=False, traits=(Trait.FLOAT32_NORMS, Trait.PRECISE_ROTARY)),
    "olmo3": Family(
        query_key_norm="full",
        mlp_bias=False,
        kind_of_layer=slide_but_every(4, ""),
        traits=(Trait.PRECISE_NORMS, Trait.PRECISE_ROTARY, Trait.POST_NORMS, Trait.WITHOUT_INPUT_NORM),
    ),
    "seed_oss": Family(out_bias="attention_out_bias"),
    "starcoder2": Family(
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        mlp_modules=("c_fc", "c_proj"),
        is_mlp_gated=False,
        norm_parts=2,
        kind_of_layer=slide,
        traits=(Trait.NATIVE_NORMS,),
        activation="gelu",
    ),
    "vaultgemma": Family(
        mlp_bias=False,
        kind_of_layer=slide_but_every(2, ""),
        attention_scale="query_pre_attn_scalar",
        traits=(Trait.PRECISE_NORMS,),
    ),
    "youtu": LATENT,
}
