"""Reads a Hugging Face config.json into a ModelShape: heads, layer kinds, windows, number of parameters.

Takes plain JSON, returns a ModelShape or raises RecipeError. Opens no file; assumes only transformers' own defaults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ulysses_cli.plan.models.families import (
    CROSSING,
    EXPERTS_ADAPTED,
    FAMILIES,
    INEXACT_KEYS,
    INEXACT_LAYER_TYPES,
    Family,
)
from ulysses_cli.plan.problem import Problem, RecipeError

MAX_LAYERS = 10_000
TEXT_PARTS = ("text_config", "llm_config", "language_config")
FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"


@dataclass(frozen=True)
class Layer:
    """One decoder layer: its attention window (None: back to the document's start) and its number of experts."""

    window_tokens: int | None
    num_experts: int


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
    rope_type: str
    rope_original_positions: int | None
    quantization: str
    linear_modules: tuple[str, ...]
    num_parameters: int | None
    inexact: str
    has_router_loss: bool = False
    logits_divisor: float = 1.0

    @property
    def crosses_documents(self) -> bool:
        """Whether layers carry something from one document of a row into the next."""
        return self.inexact in CROSSING

    @property
    def adapts_experts(self) -> bool:
        """Whether adapters on all linear layers would include the experts."""
        return self.model_type in EXPERTS_ADAPTED and any(layer.num_experts for layer in self.layers)

    def __hash__(self) -> int:
        """Cheap, because every ledger looks up caches by shape."""
        return hash((self.name, self.num_layers, self.num_parameters))

    @cached_property
    def layer_kinds(self) -> tuple[Layer, ...]:
        """The kinds of layers that differ in memory, each once; windows make no difference."""
        return tuple(Layer(None, num_experts) for num_experts in sorted({layer.num_experts for layer in self.layers}))

    @property
    def windows(self) -> tuple[int, ...]:
        """The distinct attention windows in use, in tokens."""
        return tuple(sorted({layer.window_tokens for layer in self.layers if layer.window_tokens}))


def read_model_shape(config: Mapping[str, Any], name: str, key: str = "model.name_or_path") -> ModelShape:
    """Takes config.json's content. Raises RecipeError, with the recipe's `key`, if it cannot be used."""
    facts = _Facts(_find_text_part(config), name, key)
    model_type = facts.get_text("model_type")
    family = FAMILIES.get(model_type)
    facts.defaults = dict((family or Family({})).defaults)
    num_layers = facts.get_count("num_hidden_layers")
    num_heads = facts.get_count("num_attention_heads")
    hidden_size = facts.get_count("hidden_size")
    num_kv_heads = facts.find_count("num_key_value_heads") or num_heads
    head_dim = facts.find_count("head_dim") or hidden_size // num_heads
    if num_layers > MAX_LAYERS:
        raise facts.complain(f"num_hidden_layers is {num_layers}, more than {MAX_LAYERS}")
    if num_heads % num_kv_heads:
        raise facts.complain(f"{num_kv_heads} key/value heads do not divide {num_heads} attention heads")
    if not head_dim or (facts.find_count("head_dim") is None and hidden_size % num_heads):
        raise facts.complain(f"hidden_size {hidden_size} is not a multiple of {num_heads} attention heads")
    num_experts = facts.find_count("num_local_experts") or facts.find_count("num_experts") or 0
    layers = _list_layers(facts, family, num_layers, num_experts)
    takes_experts = num_experts > 0 and (model_type in EXPERTS_ADAPTED or all(layer.num_experts for layer in layers))
    mlp_modules = () if family is None or takes_experts else family.mlp_modules
    intermediate_size = facts.get_count("intermediate_size")
    shape = ModelShape(
        name=name,
        model_type=model_type,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        moe_intermediate_size=_read_expert_size(facts, family) or intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=facts.get_count("vocab_size"),
        max_position_embeddings=facts.get_count("max_position_embeddings"),
        tie_word_embeddings=bool(facts.find("tie_word_embeddings")),
        layers=layers,
        num_experts=num_experts,
        num_experts_per_token=facts.find_count("num_experts_per_tok") or 0,
        attention_scale=_compute_scale(facts, family, head_dim),
        attention_softcap=facts.find_number("attn_logit_softcapping"),
        attention_dropout=facts.find_number("attention_dropout") or 0.0,
        final_softcap=facts.find_number("final_logit_softcapping"),
        has_sinks=family is not None and family.has_sinks,
        rope_type=str(_read_rope(facts).get("rope_type") or _read_rope(facts).get("type") or "default"),
        rope_original_positions=_read_original_positions(facts),
        quantization=_read_quantization(config),
        linear_modules=() if family is None else family.attention_modules + mlp_modules,
        num_parameters=None,
        inexact=_find_inexact(facts, family),
        has_router_loss=bool(facts.find("output_router_logits")),
        logits_divisor=facts.find_number("logits_scaling") or 1.0,
    )
    return shape if family is None else _with_parameters(shape, facts, family)


@dataclass
class _Facts:
    """config.json with the family's defaults for missing fields; errors name the model and the field."""

    values: Mapping[str, Any]
    name: str
    key: str
    defaults: Mapping[str, Any] | None = None

    def find(self, field: str) -> Any:
        return self.values[field] if field in self.values else (self.defaults or {}).get(field)

    def find_number(self, field: str) -> float | None:
        value = self.find(field)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)):
            return value
        raise self.complain(f"{field} is {value!r}, not a number")

    def find_count(self, field: str) -> int | None:
        number = self.find_number(field)
        if number is None:
            return None
        if number != int(number) or number < 0 or number > 2**40:
            raise self.complain(f"{field} is {number}, not a count")
        return int(number)

    def find_list(self, field: str) -> list[Any]:
        items = self.find(field)
        if items is None or isinstance(items, list | tuple):
            return list(items or ())
        raise self.complain(f"{field} is {items!r}, not a list")

    def get_count(self, field: str) -> int:
        count = self.find_count(field)
        if not count:
            raise self.complain(f"{field} is missing" if count is None else f"{field} is {count}")
        return count

    def get_text(self, field: str) -> str:
        text = self.find(field)
        if not isinstance(text, str) or not text:
            raise self.complain(f"{field} is {'missing' if text is None else repr(text)}")
        return text

    def complain(self, what: str) -> RecipeError:
        hint = "a model's config.json gives model_type, sizes and head counts"
        return RecipeError([Problem(self.key, f"the config of {self.name} cannot be used: {what}", hint)])


def _find_text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A multimodal model keeps its language model's config one level down."""
    for part in TEXT_PARTS:
        if isinstance(config.get(part), Mapping):
            return {**{k: v for k, v in config.items() if k == "tie_word_embeddings"}, **config[part]}
    return config


def _list_layers(facts: _Facts, family: Family | None, num_layers: int, num_experts: int) -> tuple[Layer, ...]:
    window = facts.find_count("sliding_window")
    if facts.find("use_sliding_window") is False:
        window = None
    written = facts.find_list("layer_types")
    step = facts.find_count("decoder_sparse_step") or 1
    dense = facts.find_list("mlp_only_layers")

    def slides(index: int) -> bool:
        if index < len(written):
            return bool(written[index] == SLIDING_ATTENTION)
        if family is None or family.windows in ("all", "none"):
            return family is None or family.windows == "all"
        if family.windows == "from_max_window_layers":
            return index >= (facts.find_count("max_window_layers") or 0)
        if family.windows == "without_rope":
            return (index + 1) % (facts.find_count("no_rope_layer_interval") or 4) == 0
        every = facts.find_count("sliding_window_pattern") if family.windows == "all_but_every_6th" else 2
        return (index + 1) % (every or 6) != 0

    return tuple(
        Layer(
            window_tokens=window if window and slides(index) else None,
            num_experts=num_experts if (index + 1) % step == 0 and index not in dense else 0,
        )
        for index in range(num_layers)
    )


def _read_expert_size(facts: _Facts, family: Family | None) -> int | None:
    """Families without their own size for experts ignore the key."""
    has_own = family is None or "moe_intermediate_size" in family.defaults
    return facts.find_count("moe_intermediate_size") if has_own else None


def _compute_scale(facts: _Facts, family: Family | None, head_dim: int) -> float:
    if family and family.attention_scale == "query_pre_attn_scalar":
        scalar = facts.find_number("query_pre_attn_scalar")
        if scalar is None or scalar <= 0:
            raise facts.complain(f"query_pre_attn_scalar is {scalar}")
        return float(scalar**-0.5)
    if family and family.attention_scale == "attention_multiplier":
        multiplier = facts.find_number("attention_multiplier")
        return 1.0 if multiplier is None else float(multiplier)
    return float(max(head_dim, 1) ** -0.5)


def _read_rope(facts: _Facts) -> Mapping[str, Any]:
    """The stretch that is already part of the model. transformers 5 writes rope_parameters, older files rope_scaling;
    both may hold one entry for each kind of layer."""
    rope = facts.find("rope_parameters") or facts.find("rope_scaling")
    if not isinstance(rope, Mapping):
        return {}
    inner = rope.get(FULL_ATTENTION)
    return inner if isinstance(inner, Mapping) else rope


def _read_original_positions(facts: _Facts) -> int | None:
    """How many positions the model had before its own stretch; None if the config does not say."""
    count = _read_rope(facts).get("original_max_position_embeddings")
    count = facts.find("original_max_position_embeddings") if count is None else count
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None


def _read_quantization(config: Mapping[str, Any]) -> str:
    """The method by which the stored weights are quantized, or ''."""
    section = config.get("quantization_config")
    return str(section.get("quant_method") or "an unnamed method") if isinstance(section, Mapping) else ""


def _find_inexact(facts: _Facts, family: Family | None) -> str:
    for field, reason in INEXACT_KEYS.items():
        if facts.find(field):
            return reason
    for kind in facts.find_list("layer_types"):
        if kind not in (FULL_ATTENTION, SLIDING_ATTENTION):
            return INEXACT_LAYER_TYPES.get(str(kind), f"layers of kind {kind} are not known to this tool")
    return "" if family else f"model type {facts.find('model_type')} is not on the list of those proven exact"


def _with_parameters(shape: ModelShape, facts: _Facts, family: Family) -> ModelShape:
    total = count_parameters(
        shape,
        family,
        attention_bias=bool(facts.find("attention_bias")),
        mlp_bias=bool(facts.find("mlp_bias")),
    )
    return ModelShape(**{**vars(shape), "num_parameters": total})


def count_parameters(shape: ModelShape, family: Family, *, attention_bias: bool, mlp_bias: bool) -> int:
    """Unique weights: embedding, layers, final norm, and the head where it is not the embedding."""
    hidden, query, kv = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    has_qkv_bias = attention_bias if family.has_qkv_bias is None else family.has_qkv_bias
    has_out_bias = attention_bias if family.has_out_bias is None else family.has_out_bias
    attention = hidden * (query + 2 * kv) + query * hidden
    attention += has_qkv_bias * (query + 2 * kv) + has_out_bias * hidden
    attention += {"": 0, "head": 2 * shape.head_dim, "full": query + kv}[family.query_key_norm]
    attention += family.has_sinks * shape.num_heads
    dense = 3 * hidden * shape.intermediate_size + mlp_bias * (2 * shape.intermediate_size + hidden)
    expert = 3 * hidden * shape.moe_intermediate_size
    expert += family.experts_have_bias * (2 * shape.moe_intermediate_size + hidden)
    router = hidden + family.experts_have_bias
    norms = family.norms_per_layer * hidden
    mlps = sum(layer.num_experts * (expert + router) if layer.num_experts else dense for layer in shape.layers)
    head = 0 if shape.tie_word_embeddings else shape.vocab_size * hidden
    return shape.vocab_size * hidden + shape.num_layers * (attention + norms) + mlps + hidden + head
