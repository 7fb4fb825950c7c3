"""What a decoder layer is made of: mixers, which read other tokens, and an MLP, with the sizes that memory,
operations and legal sp sizes depend on. Reads the layers of a config.json as plain values, and counts their
parameters as transformers builds them. Opens no file and holds no tensor."""

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
)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (MLA): keys and values are made from `kv_rank` numbers per token, queries from
    `query_rank` (None: from the hidden state). The last `rope_dim` numbers of a key are the same in all heads."""

    query_rank: int | None
    kv_rank: int
    rope_dim: int


@dataclass(frozen=True)
class AttentionMixer:
    """Softmax attention. `window_tokens`: None reaches back to the document's start. `keys_are_values`: one projection
    makes both. `shares_kv`: an earlier layer's keys and values are used. `gate_width`: outputs are multiplied with
    this many gates per token, made by a projection of their own. `num_inputs`: queries, keys and values are made from
    as many vectors of the hidden size, 2 where the embedding stands beside the hidden state."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    window_tokens: int | None = None
    has_sinks: bool = False
    keys_are_values: bool = False
    shares_kv: bool = False
    gate_width: int = 0
    latent: Latent | None = None
    num_inputs: int = 1

    @property
    def num_made(self) -> int:
        """Projections that make its keys and values."""
        return 0 if self.shares_kv else 2 - self.keys_are_values


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


@dataclass(frozen=True)
class PerLayerEmbeddings:
    """A vector of `size` numbers that each layer has for each token, from an embedding of its own and from the model's,
    which is projected to all of them at once."""

    size: int
    num_layers: int
    vocab_size: int

    @property
    def width(self) -> int:
        """Numbers per token for all layers."""
        return self.num_layers * self.size


Mixer = AttentionMixer | DeltaNetMixer | KimiDeltaMixer | Mamba2Mixer | ConvolutionMixer


@dataclass(frozen=True)
class DenseMlp:
    """`is_gated`: three matrices instead of two."""

    inner_size: int
    is_gated: bool = True


@dataclass(frozen=True)
class ExpertsMlp:
    """`shared_size`: the inner size of the expert that every token goes to; 0: there is none. `latent_size`: the width
    to which tokens are projected for experts; 0: they are not."""

    num_experts: int
    num_per_token: int
    inner_size: int
    shared_size: int = 0
    is_gated: bool = True
    latent_size: int = 0


@dataclass(frozen=True)
class SharedBlock:
    """Attention and an MLP whose weights several layers use, before a mixer of their own (Zamba2). Block `number` of
    the model. Each of these layers has narrow adapters, of `rank`, beside the MLP's first matrix and, where
    `adapts_attention`, beside queries, keys and values."""

    number: int
    rank: int
    adapts_attention: bool


@dataclass(frozen=True)
class Layer:
    """One decoder layer. Most have one mixer and an MLP; Falcon-H1 has two mixers side by side, Nemotron-H either a
    mixer or an MLP. `shared`: its attention and MLP are a block that other layers use too, and run before its other
    mixer."""

    mixers: tuple[Mixer, ...]
    mlp: DenseMlp | ExpertsMlp | None
    shared: SharedBlock | None = None

    def __hash__(self) -> int:
        """Cheap, because every ledger looks up sizes by kind of layer, and a model has few kinds."""
        return hash((len(self.mixers), type(self.mlp), self.shared is None))

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


NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
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
        self.latent = _read_latent(facts) if family.latent else None
        nope = facts.find_count("qk_nope_head_dim") or 0
        num_inputs = 1 + int(family.shares_blocks)
        own_dim = facts.find_count("attention_head_dim", "head_dim") or num_inputs * hidden_size // self.num_heads
        self.head_dim = nope + self.latent.rope_dim if self.latent else own_dim
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
            shared = self._read_shared(sum(each.shared is not None for each in layers)) if kind == HYBRID else None
            layer = Layer(self._read_mixers(kind, index), self._read_mlp(kind, index), shared=shared)
            layers.append(known.setdefault(layer, layer))
        return tuple(layers)

    def _read_shared(self, num_before: int) -> SharedBlock | None:
        """Of the layer after so many that use such blocks, which take turns."""
        facts = self.facts
        if not self.family.shares_blocks:
            return None
        if not facts.find("tie_word_embeddings"):  # PreTrainedModel.get_expanded_tied_weights_keys
            raise facts.complain("tie_word_embeddings is false: transformers then shares no blocks either")
        number = num_before % facts.get_count("num_mem_blocks")
        return SharedBlock(number, facts.get_count("adapter_rank"), bool(facts.find("use_shared_attention_adapter")))

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
        if self.latent:
            kv_heads, value_dim = num_heads, facts.find_count("v_head_dim") or self.hidden_size // num_heads
        keys_are_values = borrows = False
        if family.has_global_heads:  # layers without a window have heads of another size
            borrows = index >= self.num_layers - (facts.find_count("num_kv_shared_layers") or 0)
            if not slides:
                keys_are_values = bool(facts.find("attention_k_eq_v"))
                head_dim = value_dim = facts.find_count("global_head_dim") or GLOBAL_HEAD_DIM
                kv_heads = (keys_are_values and facts.find_count("num_global_key_value_heads")) or kv_heads
        of_layer = self.own_facts.get(index)
        if of_layer:
            num_heads = of_layer.find_count("num_attention_heads") or num_heads
            kv_heads = of_layer.find_count("num_key_value_heads") or kv_heads
            head_dim = value_dim = of_layer.find_count("head_dim") or head_dim
        gate = {"": 0, "elements": num_heads * head_dim, "heads": num_heads}[family.attention_gate]
        return AttentionMixer(
            num_heads=num_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            value_head_dim=value_dim,
            window_tokens=self.window if slides else None,
            has_sinks=family.has_sinks,
            keys_are_values=keys_are_values,
            shares_kv=borrows,
            gate_width=gate if facts.decide(family.is_gated) else 0,
            latent=self.latent,
            num_inputs=1 + int(family.shares_blocks),
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
            return ExpertsMlp(
                num_experts=self.num_experts,
                num_per_token=self.num_chosen,
                inner_size=read_expert_size(facts),
                shared_size=family.shared_size(facts) if family.shared_size else 0,
                is_gated=family.is_mlp_gated,
                latent_size=facts.find_count("moe_latent_size") or 0,
            )
        return DenseMlp(family.dense_size(facts, index), family.is_mlp_gated)


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


def _read_latent(facts: ConfigFacts) -> Latent | None:
    rank = facts.find_count("kv_lora_rank")
    return Latent(facts.find_count("q_lora_rank") or None, rank, facts.get_count("qk_rope_head_dim")) if rank else None
