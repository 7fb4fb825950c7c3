"""What a decoder layer is made of: mixers, which read other tokens, and an MLP, with the sizes that memory,
operations and legal sp sizes depend on. Reads the layers of a config.json as plain values. Opens no file and holds no
tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ulysses_cli.plan.models.family import (
    CONVOLUTION,
    HYBRID,
    LINEAR_ATTENTION,
    ONLY_EXPERTS,
    ONLY_MLP,
    RENAMED,
    SLIDING_ATTENTION,
    ConfigFacts,
    Family,
    Trait,
)


@dataclass(frozen=True)
class AttentionMixer:
    """Softmax attention. `window_tokens`: None reaches back to the document's start. `shares_kv`: an earlier layer's
    keys and values are used. `is_latent`: keys and values of all heads are made from a few numbers of each token."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    window_tokens: int | None = None
    has_sinks: bool = False
    shares_kv: bool = False
    is_latent: bool = False


@dataclass(frozen=True)
class DeltaNetMixer:
    """Gated delta net: a convolution over queries, keys and values, then a state [key_head_dim, value_head_dim] for
    each value head."""

    num_key_heads: int
    num_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_tokens: int

    @property
    def conv_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_head_dim + self.num_heads * self.value_head_dim


@dataclass(frozen=True)
class KimiDeltaMixer:
    """Kimi delta attention: a delta net whose state decays by a factor of its own in each key channel."""

    num_heads: int
    head_dim: int
    conv_tokens: int

    @property
    def conv_channels(self) -> int:
        return 3 * self.num_heads * self.head_dim


@dataclass(frozen=True)
class Mamba2Mixer:
    """Mamba2: a convolution, then a scan with a state [head_dim, state_dim] for each head. `num_groups` groups of heads
    share what writes and reads the state (B and C). `gating`: the result is gated, then normed, or
    the other way round, or there is no norm."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_tokens: int
    chunk_tokens: int
    gating: Literal["before norm", "after norm", "alone"] = "before norm"

    @property
    def conv_channels(self) -> int:
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.state_dim


@dataclass(frozen=True)
class ConvolutionMixer:
    """A short convolution over `conv_channels` channels. It has no heads, so that any sp size serves."""

    conv_channels: int
    conv_tokens: int


Mixer = AttentionMixer | DeltaNetMixer | KimiDeltaMixer | Mamba2Mixer | ConvolutionMixer


@dataclass(frozen=True)
class DenseMlp:
    inner_size: int


@dataclass(frozen=True)
class ExpertsMlp:
    """`has_shared`: there is one that every token goes to."""

    num_experts: int
    num_per_token: int
    inner_size: int
    has_shared: bool = False


@dataclass(frozen=True)
class Layer:
    """One decoder layer. Most have one mixer and an MLP; Falcon-H1 has two mixers side by side, Nemotron-H either a
    mixer or an MLP. `shared_block`: the number, from 1 on, of a block that other layers use too (Zamba2): its attention
    and MLP, which run before its other mixer."""

    mixers: tuple[Mixer, ...]
    mlp: DenseMlp | ExpertsMlp | None
    shared_block: int = 0

    def __hash__(self) -> int:
        """Cheap, because every ledger looks up sizes by kind of layer, and a model has few kinds."""
        return hash((len(self.mixers), type(self.mlp), self.shared_block))

    @cached_property
    def attention(self) -> AttentionMixer | None:
        return next((mixer for mixer in self.mixers if isinstance(mixer, AttentionMixer)), None)

    @property
    def window_tokens(self) -> int | None:
        """Tokens that its attention reaches back; None: to the document's start."""
        return self.attention.window_tokens if self.attention else None

    @property
    def num_experts(self) -> int:
        return self.mlp.num_experts if isinstance(self.mlp, ExpertsMlp) else 0

    def without_window(self) -> Layer:
        """The same layer as far as memory is concerned."""
        mixers = (
            replace(mixer, window_tokens=None) if isinstance(mixer, AttentionMixer) else mixer for mixer in self.mixers
        )
        return replace(self, mixers=tuple(mixers))


NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SHARED_EXPERTS = (  # how many, or how wide they are together
    *("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "shared_expert_intermediate_size"),
    *("moe_shared_expert_intermediate_size", "shared_intermediate_size"),
)
NUM_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
GLOBAL_HEAD_DIM = 512  # where config.json has none (configuration_gemma4.py)


class LayerReader:
    """Reads one config.json. Equal layers are one object."""

    def __init__(self, facts: ConfigFacts, family: Family, hidden_size: int, num_layers: int) -> None:
        self.facts = facts
        self.family = family
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.num_heads = facts.get_count("num_attention_heads")
        self.num_kv_heads = facts.find_count("num_key_value_heads") or self.num_heads
        self.is_latent = family.latent and bool(facts.find_count("kv_lora_rank"))
        num_inputs = 1 + int(family.shares_blocks)  # Zamba2's attention reads the embedding, too
        self.head_dim = facts.find_count("attention_head_dim", "head_dim") or num_inputs * hidden_size // self.num_heads
        if self.is_latent:
            self.head_dim = (facts.find_count("qk_nope_head_dim") or 0) + facts.get_count("qk_rope_head_dim")
        takes_experts = not facts.defaults or any(name in facts.defaults for name in NUM_EXPERTS)
        is_on = takes_experts and facts.decide(family.enables_experts)
        self.num_experts = (self._find_own_count(NUM_EXPERTS) or 0) if is_on else 0
        self.num_chosen = self._find_own_count(NUM_CHOSEN) or 0
        self.own_facts = {  # what a saved config.json says of single layers; keys are filled up with zeros
            int(index): ConfigFacts(values, facts.name, facts.key)
            for index, values in facts.find_mapping("per_layer_config").items()
            if str(index).isdecimal() and isinstance(values, Mapping)
        }
        self.window = facts.find_count("sliding_window") or None
        if facts.find("use_sliding_window") is False:
            self.window = None

    def _find_own_count(self, names: tuple[str, ...]) -> int | None:
        """Of the field that the family's config has, or of its second name, which transformers reads last. Transformers
        ignores the names that other families have for it."""
        own = tuple(name for name in names if name in self.facts.defaults)
        others = tuple(name for name in names if name in self.facts.second_names)
        return self.facts.find_count(*(others + own if own else names))

    def read_layers(self) -> tuple[Layer, ...]:
        known: dict[Layer, Layer] = {}
        layers: list[Layer] = []
        for index in range(self.num_layers):
            kind = self.find_kind(index)
            shared = self._read_shared(sum(each.shared_block > 0 for each in layers)) if kind == HYBRID else 0
            layer = Layer(self._read_mixers(kind, index), self._read_mlp(kind, index), shared)
            layers.append(known.setdefault(layer, layer))
        return tuple(layers)

    def _read_shared(self, num_before: int) -> int:
        """The block of the layer after so many that use one: they take turns."""
        facts = self.facts
        if not self.family.shares_blocks:
            return 0
        if not facts.find("tie_word_embeddings"):  # PreTrainedModel.get_expanded_tied_weights_keys
            raise facts.complain("tie_word_embeddings is false: transformers then shares no blocks either")
        return 1 + num_before % facts.get_count("num_mem_blocks")

    def find_kind(self, index: int) -> str:
        written = self.facts.find_list("layer_types") or self.facts.find_list("layers_block_type")
        kind = str(written[index]) if index < len(written) else self.family.kind_of_layer(self.facts, index)
        return RENAMED.get(kind, kind)

    def _read_mixers(self, kind: str, index: int) -> tuple[Mixer, ...]:
        if kind not in self.family.other_kinds:
            return (self._read_attention(kind == SLIDING_ATTENTION, index),)
        if kind == CONVOLUTION:
            return (ConvolutionMixer(self.hidden_size, self.facts.get_count("conv_L_cache")),)
        if kind == HYBRID:  # in the order in which they run
            both = (self._read_recurrence(), self._read_attention(False, index))
            return both[::-1] if self.family.shares_blocks else both
        return (self._read_recurrence(),) if kind == LINEAR_ATTENTION else ()

    def _read_attention(self, slides: bool, index: int) -> AttentionMixer:
        facts, family = self.facts, self.family
        by_layer = facts.find_list("num_attention_heads_per_layer")
        num_heads = by_layer[index] if index < len(by_layer) and isinstance(by_layer[index], int) else self.num_heads
        kv_heads, head_dim, value_dim = self.num_kv_heads, self.head_dim, self.head_dim
        if self.is_latent:
            kv_heads, value_dim = num_heads, facts.find_count("v_head_dim") or self.hidden_size // num_heads
        borrows = False
        if family.has_global_heads:  # layers without a window have heads of another size
            borrows = index >= self.num_layers - (facts.find_count("num_kv_shared_layers") or 0)
            if not slides:
                head_dim = value_dim = facts.find_count("global_head_dim") or GLOBAL_HEAD_DIM
                keys_are_values = facts.find("attention_k_eq_v")
                kv_heads = (keys_are_values and facts.find_count("num_global_key_value_heads")) or kv_heads
        of_layer = self.own_facts.get(index)
        if of_layer:
            num_heads = of_layer.find_count("num_attention_heads") or num_heads
            kv_heads = of_layer.find_count("num_key_value_heads") or kv_heads
            head_dim = value_dim = of_layer.find_count("head_dim") or head_dim
        return AttentionMixer(
            num_heads=num_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            value_head_dim=value_dim,
            window_tokens=self.window if slides else None,
            has_sinks=family.has_sinks,
            shares_kv=borrows,
            is_latent=self.is_latent,
        )

    def _read_recurrence(self) -> Mixer:
        facts = self.facts
        if self.family.recurrence == "kimi_delta":
            own = facts.find_mapping("linear_attn_config")
            heads, width = own.get("num_heads"), own.get("head_dim")
            return KimiDeltaMixer(
                heads if isinstance(heads, int) else facts.find_count("linear_num_heads") or self.num_heads,
                width if isinstance(width, int) else facts.get_count("linear_head_dim", "head_dim"),
                facts.get_count("linear_conv_kernel_dim", "short_conv_kernel_size"),
            )
        if self.family.recurrence == "delta_net":
            num_keys = facts.find_count("linear_num_key_heads") or self.num_heads
            key_dim = facts.find_count("linear_key_head_dim") or int(0.75 * self.hidden_size / num_keys)
            return DeltaNetMixer(
                num_key_heads=num_keys,
                num_heads=facts.find_count("linear_num_value_heads") or self.num_heads,
                key_head_dim=key_dim,
                value_head_dim=facts.find_count("linear_value_head_dim") or 2 * key_dim,
                conv_tokens=facts.get_count("linear_conv_kernel_dim"),
            )
        num_heads = facts.get_count("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
        inner = facts.find_count("mamba_d_ssm") or (facts.find_count("mamba_expand") or 2) * self.hidden_size
        written = facts.find("mamba_head_dim", "mamba_d_head")
        return Mamba2Mixer(
            num_heads=num_heads,
            head_dim=inner // num_heads
            if written in (None, "auto")
            else facts.get_count("mamba_head_dim", "mamba_d_head"),
            num_groups=facts.get_count("n_groups", "mamba_n_groups", "mamba_ngroups"),
            state_dim=facts.get_count("ssm_state_size", "mamba_d_state"),
            conv_tokens=facts.get_count("conv_kernel", "mamba_d_conv"),
            chunk_tokens=facts.get_count("chunk_size", "mamba_chunk_size"),
            gating=self._read_gating(),
        )

    def _read_gating(self) -> Literal["before norm", "after norm", "alone"]:
        if not self.facts.decide(self.family.norms_recurrence):
            return "alone"
        return "after norm" if self.facts.find("mamba_norm_before_gate") else "before norm"

    def _read_mlp(self, kind: str, index: int) -> DenseMlp | ExpertsMlp | None:
        facts, family = self.facts, self.family
        if family.shares_blocks and kind != HYBRID:
            return None
        has_lone_parts = ONLY_MLP in family.other_kinds
        if has_lone_parts and kind not in (ONLY_EXPERTS, ONLY_MLP):
            return None
        written = facts.find_list("mlp_layer_types")
        is_sparse = written[index] == "sparse" if index < len(written) else family.has_experts(facts, index)
        if has_lone_parts:
            is_sparse = kind == ONLY_EXPERTS
        if self.num_experts and is_sparse:
            own = tuple(name for name in SHARED_EXPERTS if not facts.defaults or name in facts.defaults)
            is_unsaid = Trait.BESIDE_MLP in family.traits or Trait.SHARED_EXPERT in family.traits
            return ExpertsMlp(
                num_experts=self.num_experts,
                num_per_token=self.num_chosen,
                inner_size=read_expert_size(facts),
                has_shared=bool(self._find_own_count(own)) if own else is_unsaid,
            )
        return DenseMlp(family.dense_size(facts, index))


def count_written_layers(facts: ConfigFacts) -> int:
    """Nemotron-H writes one kind or letter for each layer, and no number."""
    pattern = facts.find("hybrid_override_pattern")
    num_written = len(facts.find_list("layers_block_type")) or (len(pattern) if isinstance(pattern, str) else 0)
    return num_written or facts.get_count("num_hidden_layers")


def read_expert_size(facts: ConfigFacts) -> int:
    """Families without their own size for experts ignore the field."""
    has_own = not facts.defaults or "moe_intermediate_size" in facts.defaults
    size = facts.find_count("moe_intermediate_size") if has_own else None
    return size or facts.get_count("intermediate_size")
