"""Counts the parameters of a decoder layer from its parts, as transformers builds them."""

from __future__ import annotations

from ulysses_cli.plan.models.config_facts import ConfigFacts
from ulysses_cli.plan.models.family import Family
from ulysses_cli.plan.models.layers import (
    AttentionMixer,
    DeltaNetMixer,
    DenseMlp,
    ExpertsMlp,
    KimiDeltaMixer,
    Layer,
    Mamba2Mixer,
    Mixer,
)


def count_layer(layer: Layer, hidden: int, facts: ConfigFacts, family: Family) -> int:
    total = sum(_count_mixer(mixer, hidden, facts, family) for mixer in layer.mixers)
    total += _count_mlp(layer.mlp, hidden, facts, family) if layer.mlp else 0
    total += count_own_of_shared(layer, hidden) + count_shared_norms(hidden) if layer.shared else 0
    return total + count_norms(facts, family) * family.norm_parts * hidden + family.layer_extras(facts)


def count_model(layers: tuple[Layer, ...], facts: ConfigFacts, family: Family) -> int:
    """Unique weights: embedding, layers, final norm, and the head where it is not the embedding."""
    hidden = facts.get_count("hidden_size")
    embedding = facts.get_count("vocab_size") * hidden
    head = 0 if facts.find("tie_word_embeddings", "tie_embedding") else embedding
    inside = sum(layer.num_parameters for layer in layers) - _count_repeated(layers, hidden, facts, family)
    return embedding + inside + family.norm_parts * hidden + head + family.model_extras(facts)


def count_own_of_shared(layer: Layer, hidden: int) -> int:
    """Of a layer that uses a shared block: its adapters, two matrices each, and the matrix behind the block."""
    shared, attention, mlp = layer.shared, layer.attention, layer.mlp
    if shared is None or attention is None or mlp is None:
        return 0
    width = 3 * (2 * hidden + 2 * hidden) * shared.adapts_attention + hidden + 2 * mlp.inner_size
    return shared.rank * width + hidden * hidden


def count_shared_norms(hidden: int) -> int:
    """Of a shared block: the norm of both its inputs, and the one before its MLP."""
    return 3 * hidden


def _count_repeated(layers: tuple[Layer, ...], hidden: int, facts: ConfigFacts, family: Family) -> int:
    """Weights of shared blocks that layers count although another one has done so."""
    repeated, known = 0, set()
    for layer in layers:
        if layer.shared and layer.shared.number in known and layer.attention and layer.mlp:
            repeated += _count_attention(layer.attention, hidden, facts, family) + count_shared_norms(hidden)
            repeated += _count_mlp(layer.mlp, hidden, facts, family)
        known |= {layer.shared.number} if layer.shared else set()
    return repeated


def count_norms(facts: ConfigFacts, family: Family) -> int:
    return family.norms_per_layer + 2 * facts.decide(family.has_post_norms)


def _count_mixer(mixer: Mixer, hidden: int, facts: ConfigFacts, family: Family) -> int:
    if isinstance(mixer, AttentionMixer):
        return _count_attention(mixer, hidden, facts, family)
    if isinstance(mixer, Mamba2Mixer):
        return _count_mamba(mixer, hidden, facts, family)
    if isinstance(mixer, DeltaNetMixer):
        values = mixer.num_heads * mixer.value_head_dim
        projections = hidden * (mixer.conv_channels + values + 2 * mixer.num_heads) + values * hidden
        return projections + mixer.conv_channels * mixer.conv_tokens + 2 * mixer.num_heads + mixer.value_head_dim
    if isinstance(mixer, KimiDeltaMixer):
        width, dim = mixer.num_heads * mixer.head_dim, mixer.head_dim
        gate = hidden * dim + dim * width if family.has_narrow_gates else hidden * width
        gates = 2 * gate + hidden * mixer.num_heads
        own = width + mixer.num_heads + dim  # dt_bias, A_log, the norm of a head
        return 4 * hidden * width + gates + mixer.conv_channels * mixer.conv_tokens + own
    bias = facts.decide("conv_bias")
    return hidden * (4 * hidden + mixer.conv_tokens) + bias * 5 * hidden


def _count_attention(mixer: AttentionMixer, hidden: int, facts: ConfigFacts, family: Family) -> int:
    query, values = mixer.num_heads * mixer.head_dim, mixer.num_heads * mixer.value_head_dim
    has_qkv_bias, has_out_bias = facts.decide(family.qkv_bias), facts.decide(family.out_bias)
    total = values * hidden + has_out_bias * hidden + mixer.has_sinks * mixer.num_heads + hidden * mixer.gate_width
    if mixer.latent is not None:
        latent = mixer.latent
        expanded = query - mixer.num_heads * latent.rope_dim + values
        total += hidden * (latent.kv_rank + latent.rope_dim) + latent.kv_rank * (1 + expanded)
        total += has_qkv_bias * (latent.kv_rank + latent.rope_dim)
        if latent.query_rank is None:
            return total + hidden * query
        return total + latent.query_rank * (hidden + has_qkv_bias + 1 + query)
    kv = mixer.num_kv_heads * mixer.head_dim
    made = 0 if mixer.borrows_kv else kv if mixer.keys_are_values else 2 * kv
    total += (mixer.num_inputs * hidden + has_qkv_bias) * (query + made)
    if not facts.decide(family.norms_queries):
        return total
    keys = 0 if mixer.borrows_kv else 1
    return (
        total
        + family.norm_parts
        * {"": 0, "head": (1 + keys) * mixer.head_dim, "full": query + keys * kv}[family.query_key_norm]
    )


def _count_mamba(mixer: Mamba2Mixer, hidden: int, facts: ConfigFacts, family: Family) -> int:
    inner = mixer.num_heads * mixer.head_dim
    projected = inner + mixer.conv_channels + mixer.num_heads
    total = hidden * (projected + inner) + mixer.conv_channels * mixer.conv_tokens + 3 * mixer.num_heads
    total += facts.decide(family.recurrence_conv_bias) * mixer.conv_channels
    total += facts.decide(family.recurrence_bias) * projected + facts.decide(family.recurrence_out_bias) * hidden
    return total + facts.decide(family.norms_recurrence) * inner


def _count_mlp(mlp: DenseMlp | ExpertsMlp, hidden: int, facts: ConfigFacts, family: Family) -> int:
    num_inner = 1 + mlp.is_gated
    has_bias = facts.decide(family.mlp_bias)
    if isinstance(mlp, DenseMlp):
        return (
            (num_inner + 1) * hidden * mlp.inner_size
            + has_bias * (num_inner * mlp.inner_size + hidden)
            + family.mlp_extras
        )
    latent = facts.find_count("moe_latent_size") or 0
    width = latent or hidden
    expert = (num_inner + 1) * width * mlp.inner_size + family.experts_have_bias * (num_inner * mlp.inner_size + hidden)
    router = hidden + family.experts_have_bias + family.router_extras
    shared = (num_inner + 1) * hidden * mlp.shared_size + family.has_shared_gate * hidden
    return mlp.num_experts * (expert + router) + shared + 2 * hidden * latent
