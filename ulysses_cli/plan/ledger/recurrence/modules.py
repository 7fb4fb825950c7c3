"""The modules of convolutions, recurrences and latent attention with the sizes of their weights, in forward order.
`make` makes one module, `linear` a linear layer with its adapter (plan/ledger/weights.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from ulysses_cli.plan.ledger.adapters.modules import ATTENTION, BIAS
from ulysses_cli.plan.models.families import FAMILIES
from ulysses_cli.plan.models.family import Family, Trait
from ulysses_cli.plan.models.layers import (
    AttentionMixer,
    Biases,
    ConvolutionMixer,
    DeltaNetMixer,
    KimiDeltaMixer,
    Latent,
    Mamba2Mixer,
)
from ulysses_cli.plan.models.shape import ModelShape

M = TypeVar("M")


def walk_convolution(
    shape: ModelShape,
    mixer: ConvolutionMixer,
    make: Callable[..., M],
    linear: Callable[..., Iterator[M]],
) -> Iterator[M]:
    """The convolution's weight is read without its module; DeepSpeed then counts it to the module that reads it."""
    hidden, channels, has_bias = shape.hidden_size, mixer.conv_channels, shape.biases.convolution
    last = name_last_projection(FAMILIES[shape.model_type])
    yield make(3, ATTENTION, ("conv", channels * mixer.conv_tokens), *[(f"conv{BIAS}", channels)] * has_bias)
    yield from linear("in_proj", hidden, 3 * channels, num_biases=3 * channels * has_bias)
    yield from linear(last, channels, hidden, num_biases=hidden * has_bias)


def name_last_projection(family: Family) -> str:
    """The ledger's name of a convolution's last projection. Its own name is `out_proj`, which adapters find; where
    attention's is called so too, both are `o_proj` here (ledger/job.py: name_linear)."""
    return "o_proj" if "out_proj" in family.attention_modules else "out_proj"


def projects_gate_last(family: Family) -> bool:
    """Whether a delta net projects queries, keys and values each by itself, and its gate after the rule (transformers:
    modeling_olmo_hybrid.py, OlmoHybridGatedDeltaNet)."""
    return family.recurrence == "delta_net" and "g_proj" in family.linear_extras


def walk_delta_net(
    shape: ModelShape,
    mixer: DeltaNetMixer,
    make: Callable[..., M],
    linear: Callable[..., Iterator[M]],
) -> Iterator[M]:
    """transformers: modeling_qwen3_5.py, Qwen3_5GatedDeltaNet."""
    hidden, heads, values = shape.hidden_size, mixer.num_heads, mixer.num_heads * mixer.value_head_dim
    conv = ("conv", mixer.conv_channels * mixer.conv_tokens)
    yield make(3, ATTENTION, ("dt_bias", heads), ("A_log", heads), conv)
    if projects_gate_last(FAMILIES[shape.model_type]):
        keys = mixer.num_key_heads * mixer.key_head_dim
        for name, width in (("q_proj", keys), ("k_proj", keys), ("v_proj", values), ("b_proj", heads)):
            yield from linear(name, hidden, width)
        yield from linear("a_proj", hidden, heads)
        yield from linear("g_proj", hidden, values)
        yield make(4, "gated_norm", ("gated_norm", mixer.value_head_dim))
        yield from linear("o_proj", values, hidden)
        return
    if "in_proj_qkvz" in FAMILIES[shape.model_type].linear_extras:
        yield from linear("in_proj_qkvz", hidden, mixer.conv_channels + values)
        yield from linear("in_proj_ba", hidden, 2 * heads)
    else:
        yield from linear("in_proj_qkv", hidden, mixer.conv_channels)
        yield from linear("in_proj_z", hidden, values)
        yield from linear("in_proj_b", hidden, heads)
        yield from linear("in_proj_a", hidden, heads)
    yield make(4, "gated_norm", ("gated_norm", mixer.value_head_dim))
    yield from linear("out_proj", values, hidden)


def walk_scan(
    shape: ModelShape,
    mixer: Mamba2Mixer,
    make: Callable[..., M],
    linear: Callable[..., Iterator[M]],
) -> Iterator[M]:
    """transformers: modeling_bamba.py, BambaMixer. It hands its last weight to a kernel that may do all in one."""
    hidden, heads, inner = shape.hidden_size, mixer.num_heads, mixer.num_heads * mixer.head_dim
    biases, projected = shape.biases, inner + mixer.conv_channels + heads
    conv = [("conv", mixer.conv_channels * mixer.conv_tokens)]
    conv += [(f"conv{BIAS}", mixer.conv_channels)] * biases.convolution
    name = "mixer" if Trait.GIVES_POSITION in shape.traits else ATTENTION
    yield make(
        3, name, ("dt_bias", heads), ("A_log", heads), ("D", heads), *conv, reads=(("out_proj", inner * hidden),)
    )
    yield from linear("in_proj", hidden, projected, num_biases=projected * biases.scan)
    if mixer.gating != "alone":
        yield make(4, "gated_norm", ("gated_norm", inner))
    yield from linear("out_proj", inner, hidden, num_biases=hidden * biases.scan_out)


def walk_kimi_delta(
    shape: ModelShape, mixer: KimiDeltaMixer, make: Callable[..., M], linear: Callable[[str, int, int], Iterator[M]]
) -> Iterator[M]:
    """transformers: modeling_kimi_linear.py, KimiLinearDeltaAttention; modeling_bailing_hybrid.py."""
    hidden, heads, width = shape.hidden_size, mixer.num_heads, mixer.num_heads * mixer.head_dim

    def gate(name: str) -> Iterator[M]:
        if FAMILIES[shape.model_type].has_narrow_gates:
            yield from linear(f"{name}_a_proj", hidden, mixer.head_dim)
            yield from linear(f"{name}_b_proj", mixer.head_dim, width)
        else:
            yield from linear(f"{name}_proj", hidden, width)

    yield make(3, ATTENTION, ("conv", mixer.conv_channels * mixer.conv_tokens))
    for name in ("q_proj", "k_proj", "v_proj"):
        yield from linear(name, hidden, width)
    yield make(4, "forget_gate", ("dt_bias", width), ("A_log", heads))
    yield from gate("f")
    yield from linear("b_proj", hidden, heads)
    yield from gate("g")
    yield make(4, "gated_norm", ("gated_norm", mixer.head_dim))
    yield from linear("o_proj", width, hidden)


def walk_latent_attention(
    hidden: int,
    biases: Biases,
    attention: AttentionMixer,
    latent: Latent,
    make: Callable[..., M],
    linear: Callable[..., Iterator[M]],
) -> Iterator[M]:
    """transformers: modeling_deepseek_v3.py, DeepseekV3Attention."""
    query, values = attention.num_heads * attention.head_dim, attention.num_heads * attention.value_head_dim
    yield make(3, ATTENTION)
    if latent.query_rank is None:
        yield from linear("q_proj", hidden, query)
    else:
        yield from linear("q_a_proj", hidden, latent.query_rank, num_biases=latent.query_rank * biases.qkv)
        yield make(4, "q_a_norm", ("q_a_norm", latent.query_rank))
        yield from linear("q_b_proj", latent.query_rank, query)
    narrow = latent.kv_rank + latent.rope_dim
    yield from linear("kv_a_proj_with_mqa", hidden, narrow, num_biases=narrow * biases.qkv)
    yield make(4, "kv_a_norm", ("kv_a_norm", latent.kv_rank))
    yield from linear("kv_b_proj", latent.kv_rank, query - attention.num_heads * latent.rope_dim + values)
    yield from linear("o_proj", values, hidden, num_biases=hidden * biases.out)
