"""Reads the decoder layers of a config.json: their mixers, MLPs and numbers of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from ulysses_cli.plan.models.config_facts import ConfigFacts
from ulysses_cli.plan.models.family import (
    CONVOLUTION,
    HYBRID,
    LINEAR_ATTENTION,
    ONLY_EXPERTS,
    ONLY_MLP,
    RENAMED,
    SLIDING_ATTENTION,
    Family,
)
from ulysses_cli.plan.models.layers import (
    AttentionMixer,
    ConvolutionMixer,
    DeltaNetMixer,
    DenseMlp,
    ExpertsMlp,
    KimiDeltaMixer,
    Latent,
    Layer,
    Mamba2Mixer,
    Mixer,
    SharedBlock,
)
from ulysses_cli.plan.models.parameter_counts import count_layer

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
NUM_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
OTHER_NAMES = "other_names"  # in a family's defaults: second names of its fields


class LayerReader:
    """Reads one config.json. Equal layers are one object."""

    def __init__(self, facts: ConfigFacts, family: Family, hidden_size: int, num_layers: int) -> None:
        self.facts, self.family, self.hidden_size, self.num_layers = facts, family, hidden_size, num_layers
        self.num_heads = facts.get_count("num_attention_heads")
        self.num_kv_heads = facts.find_count("num_key_value_heads") or self.num_heads
        self.latent = _read_latent(facts) if family.latent else None
        nope = facts.find_count("qk_nope_head_dim") or 0
        num_inputs = 1 + family.shares_blocks
        own_dim = facts.find_count("attention_head_dim", "head_dim") or num_inputs * hidden_size // self.num_heads
        self.head_dim = nope + self.latent.rope_dim if self.latent else own_dim
        takes_experts = not family.defaults or any(name in family.defaults for name in NUM_EXPERTS)
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
        defaults = self.family.defaults
        own = tuple(name for name in names if name in defaults)
        others = tuple(name for name in names if name in defaults.get(OTHER_NAMES, ()))
        return self.facts.find_count(*(others + own if own else names))

    def read_layers(self) -> tuple[Layer, ...]:
        known: dict[Layer, Layer] = {}
        layers: list[Layer] = []
        for index in range(self.num_layers):
            kind = self.find_kind(index)
            shared = self._read_shared(sum(each.shared is not None for each in layers)) if kind == HYBRID else None
            layer = Layer(self._read_mixers(kind, index), self._read_mlp(kind, index), shared=shared)
            if layer not in known:
                num_parameters = count_layer(layer, self.hidden_size, self.facts, self.family)
                known[layer] = replace(layer, num_parameters=num_parameters)
            layers.append(known[layer])
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
                head_dim = value_dim = facts.get_count("global_head_dim")
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
            borrows_kv=borrows,
            gate_width=gate if facts.decide(family.is_gated) else 0,
            latent=self.latent,
            num_inputs=1 + family.shares_blocks,
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
                inner_size=read_expert_size(facts, family),
                shared_size=family.shared_size(facts) if family.shared_size else 0,
                is_gated=family.is_mlp_gated,
            )
        return DenseMlp(family.dense_size(facts, index), family.is_mlp_gated)


def count_written_layers(facts: ConfigFacts) -> int:
    """Nemotron-H writes one kind or letter for each layer, and no number."""
    pattern = facts.find("hybrid_override_pattern")
    num_written = len(facts.find_list("layers_block_type")) or (len(pattern) if isinstance(pattern, str) else 0)
    return num_written or facts.get_count("num_hidden_layers")


def read_expert_size(facts: ConfigFacts, family: Family) -> int:
    """Families without their own size for experts ignore the field."""
    has_own = not family.defaults or "moe_intermediate_size" in family.defaults
    size = facts.find_count("moe_intermediate_size") if has_own else None
    return size or facts.get_count("intermediate_size")


def _read_latent(facts: ConfigFacts) -> Latent | None:
    rank = facts.find_count("kv_lora_rank")
    return Latent(facts.find_count("q_lora_rank") or None, rank, facts.get_count("qk_rope_head_dim")) if rank else None
