"""What is said of a model: its layers, heads, sp sizes and positions, or why it is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ulysses_cli.plan.models.layers import (
    AttentionMixer,
    ConvolutionMixer,
    DeltaNetMixer,
    ExpertsMlp,
    KimiDeltaMixer,
    Layer,
    Mamba2Mixer,
    Mixer,
)
from ulysses_cli.plan.models.shape import ModelShape
from ulysses_cli.plan.nouns import format_count

MIXER_NAMES: dict[type[Mixer], str] = {
    DeltaNetMixer: "gated delta net",
    KimiDeltaMixer: "Kimi delta attention",
    Mamba2Mixer: "Mamba2",
    ConvolutionMixer: "short convolution",
}


@dataclass(frozen=True)
class ModelSummary:
    """`sp_sizes`: those that divide the heads. `auto_rings`: the ring that `auto` takes, by sp size. `ring_obstacle`:
    why no ring is possible, or ''. `rope_type`: '' without rotary positions. `gated`: whether the hub asks to accept a
    licence; None: not known. `refused`: why rows are not split, or ''."""

    name: str
    model_type: str
    num_parameters: int | None
    layers: tuple[str, ...]
    heads: tuple[str, ...]
    sp_sizes: tuple[int, ...]
    auto_rings: Mapping[int, int]
    ring_obstacle: str
    max_positions: int
    rope_type: str
    gated: bool | None
    refused: str


def summarize(shape: ModelShape, gated: bool | None, auto_rings: Mapping[int, int]) -> ModelSummary:
    kinds = Counter(describe_layer(layer) for layer in shape.layers)
    attentions = dict.fromkeys(
        f"{mixer.num_heads} attention heads of {mixer.head_dim} over {mixer.num_kv_heads}" for mixer in shape.attentions
    )
    others = (f"{count} {kind} heads" for kind, count in shape.head_counts if kind != "attention")
    return ModelSummary(
        name=shape.name,
        model_type=shape.model_type,
        num_parameters=shape.num_parameters,
        layers=tuple(f"{count} x {kind}" for kind, count in kinds.items()),
        heads=(*attentions, *others),
        sp_sizes=(1,) if shape.inexact else shape.sp_sizes,
        auto_rings={} if shape.inexact else auto_rings,
        ring_obstacle=shape.ring_obstacle,
        max_positions=shape.max_position_embeddings,
        rope_type=shape.rope_type,
        gated=gated,
        refused=shape.inexact,
    )


def describe_layer(layer: Layer) -> str:
    parts = [_describe_mixer(mixer) for mixer in layer.mixers]
    if isinstance(layer.mlp, ExpertsMlp):
        shared = " and a shared one" if layer.mlp.shared_size else ""
        parts.append(f"{layer.mlp.num_per_token} of {format_count(layer.mlp.num_experts, 'expert')}{shared}")
    elif layer.mlp is not None:
        parts.append("MLP")
    if layer.shared:  # which the mixer of its own comes after
        mixer = parts.pop(1)
        return f"{' and '.join(parts)} of shared block {layer.shared.number + 1}, {mixer}"
    return ", ".join(parts)


def _describe_mixer(mixer: Mixer) -> str:
    if not isinstance(mixer, AttentionMixer):
        return MIXER_NAMES[type(mixer)]
    name = "latent attention" if mixer.latent else "attention"
    reach = f"sliding {name} ({mixer.window_tokens:,} tokens)" if mixer.window_tokens else f"full {name}"
    return reach + (" with an earlier layer's keys" if mixer.borrows_kv else "")
