"""The table of model families whose layers are known, and the models that are refused when a row is split over ranks,
since they would be inexact. A family that is not listed can be trained on one rank per row; splitting its rows is
refused."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from ulysses_cli.plan.models.attention_families import DENSE, EXPERTS
from ulysses_cli.plan.models.family import FULL_ATTENTION, RENAMED, SLIDING_ATTENTION, ConfigFacts, Family, Trait
from ulysses_cli.plan.models.hybrid_families import HYBRIDS

FAMILIES: dict[str, Family] = DENSE | EXPERTS | HYBRIDS
# Text parts of multimodal models, where their names do not follow from the whole model's.
TEXT_TYPES = {"mistral3": ("mistral", "ministral3")}


def find_text_types(model_type: str, known: Collection[str]) -> tuple[str, ...]:
    """Returns which of the known families the text part of a multimodal model may be of."""
    return tuple(each for each in TEXT_TYPES.get(model_type, (f"{model_type}_text",)) if each in known)


def list_traits(model_type: str) -> tuple[Trait, ...]:
    """None of a family that is not listed."""
    return FAMILIES[model_type].traits if model_type in FAMILIES else ()


LINEAR = "linear attention carries a state from token to token"
CONVOLUTION = "convolution layers read their neighbours' tokens"
MAMBA = "mamba layers carry a state from token to token"
STATE_SPACE = "state-space layers carry a state from token to token"
RECURRENT = "recurrent layers carry a state from token to token"
CHUNKED = "chunked attention cuts the row at positions of its own"
AHEAD = "attention looks ahead as well as back"
LATENT = "multi-head latent attention (MLA) shares one compressed key among heads"
INDEXED = "an indexer chooses the keys of each token, which no kernel here does"
MAMBA_1 = "Mamba-1 layers carry a state from token to token, and their scan has no heads to split"
RANDOM = "its router draws random numbers in training, which one rank and several draw differently"
INEXACT_LAYER_TYPES = {
    "linear_attention": LINEAR,
    "conv": CONVOLUTION,
    "mamba": MAMBA,
    "hybrid": MAMBA,
    "recurrent": RECURRENT,
    "chunked_attention": CHUNKED,
    "indexed_attention": INDEXED,
    "deepseek_sparse_attention": INDEXED,
}
INEXACT_KEYS = {
    "kv_lora_rank": LATENT,
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
CAUSAL_FOR_TEXT = "vision"  # a value of use_bidirectional_attention
# Layers that carry something from one document of a row into the next, which attention's masks cannot prevent.
CROSSING = frozenset({LINEAR, CONVOLUTION, MAMBA, MAMBA_1, STATE_SPACE, RECURRENT})
# Attention that no kernel here computes, on one rank or on many.
UNSERVED = frozenset({CHUNKED, AHEAD, INDEXED})

# Families that stay refused, whatever their config.json says.
REFUSED_FAMILIES = {
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa", "glm5_next_text", "axk2", "hy_v4"), INDEXED),
    **dict.fromkeys(("qwen4_exp_text", "minimax_m3_vl_text", "dots3_note_text"), INDEXED),
    "llama4_text": CHUNKED,
    "minimax": LINEAR,
    "minimax_m1": LINEAR,
    "mamba": MAMBA_1,
    "falcon_mamba": MAMBA_1,
    "jamba": MAMBA_1,
    "phimoe": RANDOM,
    "recurrent_gemma": RECURRENT,
    "rwkv": RECURRENT,
    "xlstm": RECURRENT,
    "gemma3n_text": "its layers have several streams of hidden states, which have not been tried on split rows",
    "longcat_flash": "its layers attend twice, which has not been tried on split rows",
}


def find_inexact(facts: ConfigFacts, family: Family | None) -> str:
    """Returns why rows cannot be split, or ''. A field that is a family's own is judged by the family's own fact."""
    for field, reason in INEXACT_KEYS.items():
        is_own = family is not None and field in facts.defaults and reason not in UNSERVED
        if facts.find(field) not in (None, False, 0, "", CAUSAL_FOR_TEXT) and not is_own:
            return reason
    known = {FULL_ATTENTION, SLIDING_ATTENTION, *(family.other_kinds if family else ())}
    for kind in (*facts.find_list("layer_types"), *facts.find_list("layers_block_type")):
        if RENAMED.get(str(kind), str(kind)) not in known:
            return INEXACT_LAYER_TYPES.get(str(kind), f"layers of kind {kind} are not known to this tool")
    if family is None and facts.find("model_type") in REFUSED_FAMILIES:
        return REFUSED_FAMILIES[str(facts.find("model_type"))]
    if family is None:
        name = str(facts.find("model_type"))
        close = difflib.get_close_matches(name, FAMILIES, n=1, cutoff=0.75)
        near = f": did you mean {close[0]}?" if close else ""
        return f"model type {name} is not on the list of those proven exact{near}"
    if family.hides_windows and facts.find("use_sliding_window"):
        return "its layers do not tell attention their window"
    return family.refused
