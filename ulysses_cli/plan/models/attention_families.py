"""The families whose layers all have softmax attention: with one MLP each, and with experts of which each token takes
a few. One row for each family; hybrid_families.py has those with recurrences or convolutions. Reads no file."""

from __future__ import annotations

from ulysses_cli.plan.models.family import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    Chooses,
    ConfigFacts,
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
    return facts.get_count("intermediate_size") * (1 + int(bool(borrows and facts.find("use_double_wide_mlp"))))


LATENT = Family(latent=True)

DENSE: dict[str, Family] = {
    "llama": Family(),
    "qwen2": Family(kind_of_layer=slide_from_max_window_layers),
    "qwen3": Family(kind_of_layer=slide_from_max_window_layers),
    "mistral": Family(kind_of_layer=slide),
    "gemma2": Family(
        kind_of_layer=slide_but_every(2, ""),
        attention_scale="query_pre_attn_scalar",
        traits=(Trait.SPARING_CONFIGS,),
    ),
    "gemma3_text": Family(
        kind_of_layer=slide_but_every(6),
        attention_scale="query_pre_attn_scalar",
        traits=(Trait.SPARING_CONFIGS,),
    ),
    "phi3": Family(kind_of_layer=slide),
    "olmo2": Family(),
    "smollm3": Family(kind_of_layer=slide_without_rope),
    "granite": Family(attention_scale="attention_multiplier"),
    "apertus": Family(),
    "arcee": Family(),
    "cohere": Family(),
    "cohere2": Family(kind_of_layer=slide_but_every(4)),
    "cohere_compass_text": Family(),
    "cwm": Family(kind_of_layer=slide_but_first_of(4)),
    "ernie4_5": Family(),
    "exaone4": Family(kind_of_layer=slide_but_every(4)),
    "gemma": Family(),
    "gemma4_text": Family(
        kind_of_layer=slide_gemma_4,
        has_global_heads=True,
        attention_scale="one",
        dense_size=find_wide_size,
        per_layer_embeddings="hidden_size_per_layer_input",
        enables_experts="enable_moe_block",
        traits=(Trait.BESIDE_MLP, Trait.SPARING_CONFIGS),
    ),
    "gemma4_unified_text": Family(
        kind_of_layer=slide_gemma_4,
        has_global_heads=True,
        attention_scale="one",
        dense_size=find_wide_size,
        traits=(Trait.SPARING_CONFIGS,),
    ),
    "glm": Family(),
    "glm4": Family(),
    "granite_swa": Family(has_sinks=True, kind_of_layer=slide_but_first_of(4), attention_scale="attention_multiplier"),
    "helium": Family(),
    "hunyuan_v1_dense": Family(),
    "hyperclovax": Family(attention_scale="attention_multiplier", traits=(Trait.SCALING_MULTIPLIES,)),
    "internlm3": Family(),
    "iquestcoder": Family(),
    "jais2": Family(),
    "minicpm3": LATENT,
    "ministral": Family(kind_of_layer=slide),
    "ministral3": Family(kind_of_layer=slide),
    "nanochat": Family(),
    "olmo": Family(),
    "olmo3": Family(kind_of_layer=slide_but_every(4, "")),
    "seed_oss": Family(),
    "starcoder2": Family(kind_of_layer=slide),
    "vaultgemma": Family(
        kind_of_layer=slide_but_every(2, ""),
        attention_scale="query_pre_attn_scalar",
        traits=(Trait.SPARING_CONFIGS,),
    ),
    "youtu": LATENT,
}


def follow_dense_layers(field: str, default: int) -> Chooses:
    """The first layers have a dense MLP."""

    def has_experts(facts: ConfigFacts, index: int) -> bool:
        count = facts.find_count(field)
        return index >= (default if count is None else count)

    return has_experts


def choose_ernie_layers(facts: ConfigFacts, index: int) -> bool:
    first, step = facts.find_count("moe_layer_start_index") or 0, facts.find_count("moe_layer_interval") or 1
    last = facts.find_number("moe_layer_end_index")
    stop = facts.get_count("num_hidden_layers") - 1 if last in (None, -1) else last
    return (index + 1) % step == 0 and first <= index <= (stop or 0)


def find_flint_kind(facts: ConfigFacts, index: int) -> str:
    is_full = index < 2 or index % 4 == 1 or index == facts.get_count("num_hidden_layers") - 1
    return FULL_ATTENTION if is_full else SLIDING_ATTENTION


def choose_flint_layers(facts: ConfigFacts, index: int) -> bool:
    step = facts.find_count("decoder_sparse_step") or 1
    dense = [0, 1] if facts.find("mlp_only_layers") is None else facts.find_list("mlp_only_layers")
    return index not in dense and (index + 1) % step == 0


def slide_qwen_2(facts: ConfigFacts, index: int) -> str:
    slides = index % 2 == 0 and index < (facts.find_count("max_window_layers") or 0)
    return SLIDING_ATTENTION if slides else FULL_ATTENTION


def find_prefix_size(facts: ConfigFacts, index: int) -> int:
    return facts.find_count("prefix_dense_intermediate_size") or facts.get_count("intermediate_size")


EXPERTS: dict[str, Family] = {
    "qwen3_moe": Family(kind_of_layer=slide, traits=(Trait.EXPERTS_ADAPTED,)),
    "mixtral": Family(kind_of_layer=slide, traits=(Trait.EXPERTS_ADAPTED,)),
    "gpt_oss": Family(has_sinks=True, kind_of_layer=slide_but_every(2, "")),
    "afmoe": Family(
        kind_of_layer=slide_but_every(4, "global_attn_every_n_layers"),
        has_experts=follow_dense_layers("num_dense_layers", 1),
        traits=(Trait.SIGMOID_ROUTERS, Trait.EXPERTS_ADAPTED),
    ),
    "cohere2_moe": Family(
        kind_of_layer=slide_but_every(4),
        has_experts=follow_dense_layers("first_k_dense_replace", 0),
        dense_size=find_prefix_size,
        traits=(Trait.EXPERTS_ADAPTED,),
    ),
    "deepseek_v2": Family(
        latent=True,
        has_experts=follow_dense_layers("first_k_dense_replace", 0),
        traits=(Trait.EXPERTS_ADAPTED,),
    ),
    "deepseek_v3": Family(
        latent=True,
        has_experts=follow_dense_layers("first_k_dense_replace", 3),
        traits=(Trait.SIGMOID_ROUTERS, Trait.EXPERTS_ADAPTED),
    ),
    "dots1": Family(
        kind_of_layer=slide_from_max_window_layers,
        has_experts=follow_dense_layers("first_k_dense_replace", 0),
        traits=(Trait.SIGMOID_ROUTERS, Trait.EXPERTS_ADAPTED),
    ),
    "ernie4_5_moe": Family(
        has_experts=choose_ernie_layers,
        traits=(Trait.EXPERTS_ADAPTED,),
    ),
    "exaone_moe": Family(
        kind_of_layer=slide_but_every(4),
        has_experts=follow_dense_layers("first_k_dense_replace", 1),
        traits=(Trait.SIGMOID_ROUTERS, Trait.EXPERTS_ADAPTED),
    ),
    "flex_olmo": Family(traits=(Trait.EXPERTS_ADAPTED,)),
    "flint": Family(
        has_sinks=True,
        kind_of_layer=find_flint_kind,
        has_experts=choose_flint_layers,
        traits=(Trait.SIGMOID_ROUTERS,),
    ),
    "glm4_moe": Family(
        has_experts=follow_dense_layers("first_k_dense_replace", 1),
        traits=(Trait.SIGMOID_ROUTERS, Trait.EXPERTS_ADAPTED),
    ),
    "glm4_moe_lite": Family(
        latent=True,
        has_experts=follow_dense_layers("first_k_dense_replace", 1),
        traits=(Trait.SIGMOID_ROUTERS, Trait.EXPERTS_ADAPTED),
    ),
    "granitemoe": Family(attention_scale="attention_multiplier"),
    "granitemoe_swa": Family(
        has_sinks=True,
        attention_scale="attention_multiplier",
        kind_of_layer=slide_but_first_of(4),
    ),
    "granitemoeshared": Family(
        attention_scale="attention_multiplier",
    ),
    "hunyuan_v1_moe": Family(traits=(Trait.EXPERTS_ADAPTED, Trait.SHARED_EXPERT)),
    "hy_v3": Family(
        has_experts=follow_dense_layers("first_k_dense_replace", 1),
        traits=(Trait.SIGMOID_ROUTERS,),
    ),
    "kolibri1": Family(
        kind_of_layer=slide_but_every(5, ""),
        traits=(Trait.SIGMOID_ROUTERS,),
    ),
    "laguna": Family(
        has_experts=follow_dense_layers("", 1),
        traits=(Trait.SIGMOID_ROUTERS,),
    ),
    "mellum": Family(traits=(Trait.EXPERTS_ADAPTED,)),
    "minimax_m2": Family(traits=(Trait.SIGMOID_ROUTERS, Trait.EXPERTS_ADAPTED)),
    "olmoe": Family(traits=(Trait.EXPERTS_ADAPTED,)),
    "qwen2_moe": Family(
        kind_of_layer=slide_qwen_2,
        hides_windows=True,
    ),
    "solar_open": Family(traits=(Trait.SIGMOID_ROUTERS, Trait.EXPERTS_ADAPTED)),
}
