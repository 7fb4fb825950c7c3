"""What makes a model inexact when a row is split over ranks: a field or a layer type of config.json, or its family."""

from __future__ import annotations

from ulysses_cli.plan.models.config_facts import ConfigFacts
from ulysses_cli.plan.models.family import FULL_ATTENTION, RENAMED, SLIDING_ATTENTION, Family

LINEAR = "linear attention carries a state from token to token"
CONVOLUTION = "convolution layers read their neighbours' tokens"
MAMBA = "mamba layers carry a state from token to token"
STATE_SPACE = "state-space layers carry a state from token to token"
RECURRENT = "recurrent layers carry a state from token to token"
CHUNKED = "chunked attention cuts the row at positions of its own"
AHEAD = "attention looks ahead as well as back"
LATENT = "multi-head latent attention (MLA) shares one compressed key among heads"
INDEXED = "an indexer chooses the keys of each token, which no kernel here does"
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
CROSSING = frozenset({LINEAR, CONVOLUTION, MAMBA, STATE_SPACE, RECURRENT})
# Attention that no kernel here computes, on one rank or on many.
UNSERVED = frozenset({CHUNKED, AHEAD, INDEXED})


def find_inexact(facts: ConfigFacts, family: Family | None) -> str:
    """Returns why rows cannot be split, or ''. A field that is a family's own is judged by the family's own fact."""
    for field, reason in INEXACT_KEYS.items():
        is_own = family is not None and field in family.defaults and reason not in UNSERVED
        if facts.find(field) not in (None, False, 0, "", CAUSAL_FOR_TEXT) and not is_own:
            return reason
    known = {FULL_ATTENTION, SLIDING_ATTENTION, *(family.other_kinds if family else ())}
    for kind in (*facts.find_list("layer_types"), *facts.find_list("layers_block_type")):
        if RENAMED.get(str(kind), kind) not in known:
            return INEXACT_LAYER_TYPES.get(str(kind), f"layers of kind {kind} are not known to this tool")
    if family is None:
        return f"model type {facts.find('model_type')} is not on the list of those proven exact"
    if family.hides_windows and facts.find("use_sliding_window"):
        return "its layers do not tell attention their window"
    return family.refused
