"""Reads a Hugging Face config.json into a ModelShape: heads, layer kinds, windows, number of parameters; and
summarizes it in words: its layers, heads, sp sizes and positions, or why the model is refused. Takes plain JSON,
returns values or raises RecipeError. Opens no file; assumes only transformers' own defaults."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

from ulysses_cli.plan.layout import list_divisors
from ulysses_cli.plan.models.families import CROSSING, FAMILIES, find_inexact, list_traits
from ulysses_cli.plan.models.family import FULL_ATTENTION, SLIDING_ATTENTION, ConfigFacts, Family, Trait
from ulysses_cli.plan.models.layers import (
    AttentionMixer,
    ConvolutionMixer,
    DeltaNetMixer,
    DenseMlp,
    ExpertsMlp,
    KimiDeltaMixer,
    Layer,
    LayerReader,
    Mamba2Mixer,
    Mixer,
    count_written_layers,
)
from ulysses_cli.plan.sizes.sources import read_defaults
from ulysses_cli.plan.units import format_count

MAX_LAYERS = 10_000
# Fields of config.json for which transformers' defaults are taken of no family, or of those with sparing ones alone.
ALWAYS_GIVEN = {"hidden_size", "intermediate_size", "num_hidden_layers"}
MOSTLY_GIVEN = {"num_attention_heads", "vocab_size"}
TEXT_PARTS = ("text_config", "llm_config", "language_config")
UNKNOWN = Family(kind_of_layer=lambda facts, index: SLIDING_ATTENTION)
HEAD_NAMES: dict[type[Mixer], str] = {
    AttentionMixer: "attention",
    DeltaNetMixer: "linear attention",
    KimiDeltaMixer: "linear attention",
    Mamba2Mixer: "mamba",
}
STATE_NAMES: dict[type[Mixer], str] = {
    ConvolutionMixer: "convolution",
    DeltaNetMixer: "linear attention",
    KimiDeltaMixer: "linear attention",
    Mamba2Mixer: "mamba",
}
DROPOUTS = ("residual_dropout", "hidden_dropout", "embedding_dropout", "resid_pdrop", "embd_pdrop")


@dataclass(frozen=True)
class ModelShape:
    """Everything that layout, memory and speed depend on. `inexact` is why a row cannot be split over ranks, or ''."""

    name: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    layers: tuple[Layer, ...]
    num_experts: int
    num_experts_per_token: int
    attention_scale: float
    attention_softcap: float | None
    attention_dropout: float
    final_softcap: float | None
    has_sinks: bool
    rope_type: str  # '' without rotary positions
    rope_original_positions: int | None
    rope_theta: float | None  # the base; of models with several, that of full attention
    quantization: str
    inexact: str
    has_router_loss: bool = False
    logits_divisor: float = 1.0
    other_dropouts: tuple[tuple[str, float], ...] = ()
    has_per_layer_embeddings: bool = False
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)  # what it was read from

    @property
    def crosses_documents(self) -> bool:
        """Whether layers carry something from one document of a row into the next."""
        return self.inexact in CROSSING

    @property
    def family(self) -> Family | None:
        """None of one that is not listed. Never kept: rows hold functions, and a shape is sent to other processes."""
        return FAMILIES.get(self.model_type)

    @cached_property
    def traits(self) -> tuple[Trait, ...]:
        return self.family.traits if self.family else ()

    @property
    def refused_by_peft(self) -> str:
        """The linear layer on which, and on all-linear, peft refuses an adapter, or ''."""
        return self.family.refused_by_peft if self.family else ""

    @property
    def adapts_experts(self) -> bool:
        """Whether adapters on all linear layers would include the experts."""
        return Trait.EXPERTS_ADAPTED in self.traits and any(layer.num_experts for layer in self.layers)

    @property
    def has_sigmoid_routers(self) -> bool:
        """Whether a router scores each expert by a sigmoid, and not all of them by a softmax."""
        return Trait.SIGMOID_ROUTERS in self.traits or self.config.get("expert_selection_fn") == "sigmoid"

    @property
    def adapts_all(self) -> bool:
        """Whether all-linear can be asked for."""
        return not (self.adapts_experts or self.refused_by_peft)

    def __hash__(self) -> int:
        """Cheap, because every ledger looks up caches by shape."""
        return hash((self.name, self.num_layers, self.vocab_size))

    @cached_property
    def layer_kinds(self) -> tuple[Layer, ...]:
        """The kinds of layers that differ in memory, each once; windows make no difference."""
        kinds = dict.fromkeys(layer.without_window() for layer in dict.fromkeys(self.layers))
        return tuple(sorted(kinds, key=lambda kind: kind.num_experts))

    @cached_property
    def kinds_before(self) -> dict[Layer, tuple[int, ...]]:
        """Of each kind, how many there are among the first n layers, for n from 0 to all."""
        kinds = [layer.without_window() for layer in self.layers]
        return {kind: tuple(accumulate((each == kind for each in kinds), initial=0)) for kind in self.layer_kinds}

    @cached_property
    def numbers_of_kind(self) -> dict[Layer, frozenset[int]]:
        """The numbers of each kind's layers."""
        kinds = [layer.without_window() for layer in self.layers]
        return {kind: frozenset(n for n, each in enumerate(kinds) if each == kind) for kind in self.layer_kinds}

    def find_widest_window(self, kind: Layer) -> int | None:
        """Of that kind's layers, the window of one that sees most; None: it sees the whole document."""
        windows = [self.layers[number].window_tokens for number in self.numbers_of_kind[kind]]
        return None if None in windows else max(filter(None, windows))

    @cached_property
    def sp_sizes(self) -> tuple[int, ...]:
        """The sp sizes that divide the heads of every layer."""
        return tuple(list_divisors(math.gcd(*(count for _, count in self.head_counts)) or self.num_heads))

    def list_ring_sizes(self, sp_size: int) -> tuple[int, ...]:
        """The ring sizes of an sp group that leave ranks which divide the heads, the smallest first."""
        sizes = [size for size in list_divisors(sp_size) if sp_size // size in self.sp_sizes]
        return tuple(size for size in sizes if size == 1 or not self.ring_obstacle)

    @cached_property
    def ring_obstacle(self) -> str:
        """Why rows cannot be dealt to a ring, or ''."""
        if self.inexact:
            return self.inexact
        mixers = dict.fromkeys(type(mixer) for layer in dict.fromkeys(self.layers) for mixer in layer.mixers)
        kinds = dict.fromkeys(STATE_NAMES[kind] for kind in mixers if kind in STATE_NAMES)
        return f"{' and '.join(kinds)} layers need the tokens of a row in order" if kinds else ""

    @cached_property
    def rotary_follows_length(self) -> bool:
        """Whether a token's rotary frequencies depend on how long its document is, in any layer."""
        return any("dynamic" in kind or kind == "longrope" for kind in _list_rope_types(self.config))

    @cached_property
    def head_counts(self) -> tuple[tuple[str, int], ...]:
        """What its layers have heads of, and how many, each once."""
        mixers = dict.fromkeys(mixer for layer in dict.fromkeys(self.layers) for mixer in layer.mixers)
        counts = dict.fromkeys(
            (HEAD_NAMES[type(mixer)], mixer.num_heads) for mixer in mixers if not isinstance(mixer, ConvolutionMixer)
        )
        return tuple(counts)

    @property
    def conv_tokens(self) -> int:
        """Tokens that its longest convolution reads; 0 without one."""
        mixers = (mixer for layer in dict.fromkeys(self.layers) for mixer in layer.mixers)
        return max((each.conv_tokens for each in mixers if not isinstance(each, AttentionMixer)), default=0)

    @property
    def common_heads(self) -> int:
        """Heads of an attention layer; where layers differ, the number that divides all of theirs."""
        return math.gcd(*(attention.num_heads for attention in self.attentions)) or self.num_heads

    @cached_property
    def attentions(self) -> tuple[AttentionMixer, ...]:
        """The kinds of softmax attention, each once, in the order of the layers."""
        return tuple(dict.fromkeys(layer.attention for layer in dict.fromkeys(self.layers) if layer.attention))

    @cached_property
    def window_counts(self) -> tuple[tuple[int | None, int], ...]:
        """How many layers have each attention window; None is attention to the whole document."""
        counts = Counter(layer.window_tokens for layer in self.layers)
        return tuple(sorted(counts.items(), key=lambda item: item[0] or 0))

    @cached_property
    def attention_counts(self) -> tuple[tuple[Layer, int | None, int], ...]:
        """The kinds of layers with attention, the windows of each, and how many layers have both."""
        counts = Counter((layer.without_window(), layer.window_tokens) for layer in self.layers if layer.attention)
        return tuple((*each, number) for each, number in counts.items())

    @property
    def windows(self) -> tuple[int, ...]:
        """The distinct attention windows in use, in tokens."""
        return tuple(sorted({layer.window_tokens for layer in self.layers if layer.window_tokens}))


def read_model_shape(config: Mapping[str, Any], name: str, key: str = "model.name_or_path") -> ModelShape:
    """Takes config.json's content. Raises RecipeError, with the recipe's `key`, if it cannot be used."""
    facts = ConfigFacts(find_text_part(config), name, key)
    model_type = facts.get_text("model_type")
    family = FAMILIES.get(model_type)
    if family is not None:
        given = ALWAYS_GIVEN | (set() if Trait.SPARING_CONFIGS in family.traits else MOSTLY_GIVEN)
        defaults, facts.second_names = read_defaults(model_type)
        facts.defaults = {field: value for field, value in defaults.items() if field not in given}
    num_layers = facts.find_count("num_hidden_layers") or count_written_layers(facts)
    hidden_size = facts.get_count("hidden_size")
    if num_layers > MAX_LAYERS:
        raise facts.complain(f"num_hidden_layers is {num_layers}, more than {MAX_LAYERS}")
    reader = LayerReader(facts, family or UNKNOWN, hidden_size, num_layers)
    layers = reader.read_layers()
    _check_heads(facts, reader, layers)
    num_experts = max(layer.num_experts for layer in layers)
    attentions = [layer.attention for layer in layers if layer.attention]
    widest = max(attentions, key=lambda each: each.num_heads * each.head_dim, default=None)
    dense_sizes = [layer.mlp.inner_size for layer in layers if isinstance(layer.mlp, DenseMlp)]
    expert_sizes = [layer.mlp.inner_size for layer in layers if isinstance(layer.mlp, ExpertsMlp)]
    if not dense_sizes:
        dense_sizes = [facts.get_count("intermediate_size", "moe_intermediate_size")]
    rope = _read_rope(facts)
    return ModelShape(
        name=name,
        model_type=model_type,
        hidden_size=hidden_size,
        intermediate_size=max(dense_sizes),
        moe_intermediate_size=max(expert_sizes or dense_sizes),
        num_layers=num_layers,
        num_heads=widest.num_heads if widest else reader.num_heads,
        num_kv_heads=widest.num_kv_heads if widest else reader.num_kv_heads,
        head_dim=widest.head_dim if widest else reader.head_dim,
        vocab_size=facts.get_count("vocab_size"),
        max_position_embeddings=facts.get_count("max_position_embeddings", "model_max_length"),
        tie_word_embeddings=bool(facts.find("tie_word_embeddings", "tie_embedding")),
        layers=layers,
        num_experts=num_experts,
        num_experts_per_token=reader.num_chosen,
        attention_scale=_compute_scale(facts, family, widest.head_dim if widest else reader.head_dim),
        attention_softcap=facts.find_number("attn_logit_softcapping"),
        attention_dropout=facts.find_number("attention_dropout") or 0.0,
        final_softcap=facts.find_number("final_logit_softcapping"),
        has_sinks=any(attention.has_sinks for attention in attentions),
        rope_type=str(rope.get("rope_type") or rope.get("type") or "default")
        if (family or UNKNOWN).is_rotary(facts)
        else "",
        rope_original_positions=_read_original_positions(facts),
        rope_theta=_read_rope_theta(facts),
        quantization=_read_quantization(config),
        inexact=find_inexact(facts, family),
        has_router_loss=bool(facts.find("output_router_logits")),
        logits_divisor=compute_logits_divisor(model_type, _find_scaling(facts), facts.find_number("logit_scale")),
        other_dropouts=tuple((each, rate) for each in DROPOUTS if (rate := facts.find_number(each))),
        has_per_layer_embeddings=bool(family and facts.decide(family.per_layer_embeddings)),
        config=find_text_part(config),
    )


def _find_scaling(facts: ConfigFacts) -> float | None:
    """MiniCPM3 computes it from two widths (configuration_minicpm3.py: logits_scaling)."""
    if base := facts.find_number("dim_model_base"):
        return (facts.find_number("hidden_size") or base) / base
    return facts.find_number("logits_scaling")


def compute_logits_divisor(model_type: str, scaling: float | None, factor: float | None) -> float:
    """What logits are divided by: `logits_scaling`, by which HyperCLOVA X multiplies. Cohere's `logit_scale` is a
    factor."""
    divisor = scaling or 1.0
    return (1.0 / divisor if Trait.SCALING_MULTIPLIES in list_traits(model_type) else divisor) / (factor or 1.0)


def _check_heads(facts: ConfigFacts, reader: LayerReader, layers: tuple[Layer, ...]) -> None:
    for attention in dict.fromkeys(layer.attention for layer in layers if layer.attention):
        num_heads, kv_heads = attention.num_heads, attention.num_kv_heads
        if num_heads % kv_heads:
            raise facts.complain(f"{kv_heads} key/value heads do not divide {num_heads} attention heads")
    is_free = reader.is_latent or facts.find_count("head_dim", "attention_head_dim")
    if not reader.head_dim or (not is_free and reader.hidden_size % reader.num_heads):
        what = f"hidden_size {reader.hidden_size} is not a multiple of {reader.num_heads} attention heads"
        raise facts.complain(what)


def find_text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A multimodal model keeps its language model's config one level down."""
    for part in TEXT_PARTS:
        if isinstance(config.get(part), Mapping):
            return {**{k: v for k, v in config.items() if k == "tie_word_embeddings"}, **config[part]}
    return config


def _compute_scale(facts: ConfigFacts, family: Family | None, head_dim: int) -> float:
    if family and family.attention_scale == "query_pre_attn_scalar":
        scalar = facts.find_number("query_pre_attn_scalar")
        if scalar is None or scalar <= 0:
            raise facts.complain(f"query_pre_attn_scalar is {scalar}")
        return float(scalar**-0.5)
    if family and family.attention_scale == "attention_multiplier" and facts.find("attention_multiplier") is not None:
        return float(facts.find_number("attention_multiplier") or 0.0)
    if family and family.attention_scale == "half_head_dim":
        return float((head_dim / 2) ** -0.5)
    if family and family.attention_scale == "one":
        return 1.0
    return float(max(head_dim, 1) ** -0.5)


def _list_rope_types(config: Mapping[str, Any], *, is_rope: bool = False) -> Iterator[str]:
    """All that a config names, of a model's parts and kinds of layers too."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _list_rope_types(value, is_rope=is_rope or key in ("rope_parameters", "rope_scaling"))
        elif is_rope and key in ("rope_type", "type") and isinstance(value, str):
            yield value


def _read_rope(facts: ConfigFacts) -> Mapping[str, Any]:
    """The stretch that is already part of the model. transformers 5 writes rope_parameters, older files rope_scaling;
    both may hold one entry for each kind of layer."""
    rope = facts.find("rope_parameters") or facts.find("rope_scaling")
    if not isinstance(rope, Mapping):
        return {}
    inner = rope.get(FULL_ATTENTION)
    return inner if isinstance(inner, Mapping) else rope


def _read_original_positions(facts: ConfigFacts) -> int | None:
    """How many positions the model had before its own stretch; None if the config does not say."""
    count = _read_rope(facts).get("original_max_position_embeddings")
    count = facts.find("original_max_position_embeddings") if count is None else count
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None


def _read_rope_theta(facts: ConfigFacts) -> float | None:
    """The base of the rotary positions; None if the config does not say."""
    theta = _read_rope(facts).get("rope_theta", facts.find("rope_theta"))
    is_base = isinstance(theta, int | float) and not isinstance(theta, bool) and 1 < theta < math.inf
    return float(theta) if is_base else None


def _read_quantization(config: Mapping[str, Any]) -> str:
    """The method by which the stored weights are quantized, or ''."""
    section = config.get("quantization_config")
    return str(section.get("quant_method") or "an unnamed method") if isinstance(section, Mapping) else ""


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


def summarize(
    shape: ModelShape, num_parameters: int | None, gated: bool | None, auto_rings: Mapping[int, int]
) -> ModelSummary:
    kinds = Counter(describe_layer(layer) for layer in shape.layers)
    attentions = dict.fromkeys(
        f"{mixer.num_heads} attention heads of {mixer.head_dim} over {mixer.num_kv_heads}" for mixer in shape.attentions
    )
    others = (f"{count} {kind} heads" for kind, count in shape.head_counts if kind != "attention")
    return ModelSummary(
        name=shape.name,
        model_type=shape.model_type,
        num_parameters=num_parameters,
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
        shared = " and a shared one" if layer.mlp.has_shared else ""
        parts.append(f"{layer.mlp.num_per_token} of {format_count(layer.mlp.num_experts, 'expert')}{shared}")
    elif layer.mlp is not None:
        parts.append("MLP")
    if layer.shared_block:  # which the mixer of its own comes after
        mixer = parts.pop(1)
        return f"{' and '.join(parts)} of shared block {layer.shared_block}, {mixer}"
    return ", ".join(parts)


def _describe_mixer(mixer: Mixer) -> str:
    if not isinstance(mixer, AttentionMixer):
        return MIXER_NAMES[type(mixer)]
    name = "latent attention" if mixer.is_latent else "attention"
    reach = f"sliding {name} ({mixer.window_tokens:,} tokens)" if mixer.window_tokens else f"full {name}"
    return reach + (" with an earlier layer's keys" if mixer.shares_kv else "")
