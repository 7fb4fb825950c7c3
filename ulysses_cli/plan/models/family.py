"""What a model family is, as facts: which parts its layers have, and the fields of config.json that decide; and
config.json itself with transformers' defaults for what it leaves out. A value that cannot be used raises a
RecipeError that names the model and the field. Knows no family by its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Literal

from ulysses_cli.plan.problem import Problem, RecipeError


@dataclass
class ConfigFacts:
    """`key`: the recipe's key that named the model. `second_names`: of fields that transformers also reads by these."""

    values: Mapping[str, Any]
    name: str
    key: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    second_names: Collection[str] = ()

    def find(self, *names: str) -> Any:
        """The first of the fields that config.json has, else the first that has a default."""
        for source in (self.values, self.defaults):
            for name in names:
                if name in source:
                    return source[name]
        return None

    def find_number(self, *names: str) -> float | None:
        value = self.find(*names)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)):
            return value
        raise self.complain(f"{self._choose_name(names)} is {value!r}, not a number")

    def find_count(self, *names: str) -> int | None:
        number = self.find_number(*names)
        if number is None:
            return None
        if number != int(number) or number < 0 or number > 2**40:
            raise self.complain(f"{self._choose_name(names)} is {number}, not a count")
        return int(number)

    def find_list(self, name: str) -> list[Any]:
        items = self.find(name)
        if items is None or isinstance(items, list | tuple):
            return list(items or ())
        raise self.complain(f"{name} is {items!r}, not a list")

    def find_mapping(self, name: str) -> Mapping[str, Any]:
        value = self.find(name)
        return value if isinstance(value, Mapping) else {}

    def get_count(self, *names: str) -> int:
        count = self.find_count(*names)
        if not count:
            name = self._choose_name(names)
            raise self.complain(f"{name} is missing" if count is None else f"{name} is {count}")
        return count

    def get_text(self, name: str) -> str:
        text = self.find(name)
        if not isinstance(text, str) or not text:
            raise self.complain(f"{name} is {'missing' if text is None else repr(text)}")
        return text

    def decide(self, flag: bool | str) -> bool:
        """A fact of the family, or the field that decides."""
        return bool(self.find(flag)) if isinstance(flag, str) else flag

    def complain(self, what: str) -> RecipeError:
        hint = "a model's config.json gives model_type, sizes and head counts"
        return RecipeError([Problem(self.key, f"the config of {self.name} cannot be used: {what}", hint)])

    def _choose_name(self, names: tuple[str, ...]) -> str:
        return next((name for name in names if name in self.values), names[0])


FULL_ATTENTION, SLIDING_ATTENTION, LINEAR_ATTENTION = "full_attention", "sliding_attention", "linear_attention"
CONVOLUTION = "conv"
HYBRID = "hybrid"
ONLY_EXPERTS = "moe"
ONLY_MLP = "mlp"
# transformers 5 renamed these (configuration_utils.py: remap_legacy_layer_types).
RENAMED = {"mamba": LINEAR_ATTENTION, "attention": FULL_ATTENTION}

Flag = bool | str  # a fact, or the field of config.json that decides
Kind = Callable[[ConfigFacts, int], str]
Chooses = Callable[[ConfigFacts, int], bool]


def _attends_fully(facts: ConfigFacts, index: int) -> str:
    return FULL_ATTENTION


def _is_sparse(facts: ConfigFacts, index: int) -> bool:
    """Every layer of a model with experts, but for those that the config names."""
    step = facts.find_count("decoder_sparse_step") or 1
    return (index + 1) % step == 0 and index not in facts.find_list("mlp_only_layers")


def _get_inner_size(facts: ConfigFacts, index: int) -> int:
    return facts.get_count("intermediate_size")


class Trait(Enum):
    """How a family differs from Llama, or what peft does with it. Each is of the installed modeling file that its
    comment names, or of all that have it."""

    SCALING_MULTIPLIES = auto()  # logits, which it divides elsewhere (modeling_hyperclovax.py)
    NUMBERED_ATTENTION = auto()  # config.json has the numbers of layers with attention (configuration_bamba.py)
    SIGMOID_ROUTERS = auto()  # each expert is scored by itself
    # Experts read the residual that the MLP beside them reads, and have norms of their own (modeling_gemma4.py:
    # Gemma4TextDecoderLayer.forward). That MLP is what all tokens go to, as in a block with a shared expert.
    BESIDE_MLP = auto()
    SHARED_EXPERT = auto()  # in every block of experts, though no field says so (modeling_hunyuan_v1_moe.py)
    # Given all-linear or the MLP's names, peft adapts their experts and routers too, as it once found them: one matrix
    # each (utils/transformers_weight_conversion.py).
    EXPERTS_ADAPTED = auto()
    SPARING_CONFIGS = auto()  # published ones leave out how many heads there are, and the size of the vocabulary


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    `kind_of_layer`: by index, where config.json has no layer_types. `has_experts`: by index, in a model with experts,
    where it has no mlp_layer_types. `is_rotary`: whether any layer turns queries and keys by their positions.
    `refused_by_peft`: a linear layer on which, and on all-linear with it, peft refuses an adapter
    (tuners/tuners_utils.py: _check_lora_target_modules_mamba). `refused`: why rows are not split over ranks, or ''."""

    kind_of_layer: Kind = _attends_fully
    other_kinds: tuple[str, ...] = ()  # of layers, besides attention with and without a window
    has_sinks: bool = False
    gates_experts: bool = True  # by a matrix beside the first
    has_experts: Chooses = _is_sparse
    enables_experts: Flag = True
    dense_size: Callable[[ConfigFacts, int], int] = _get_inner_size
    latent: bool = False
    has_global_heads: bool = False
    per_layer_embeddings: Flag = False
    shares_blocks: bool = False  # layers of kind HYBRID use a block that others use too; the rest have no MLP
    recurrence: Literal["", "delta_net", "kimi_delta", "mamba2"] = ""
    has_narrow_gates: bool = True  # Kimi's gates are made through a narrow vector
    norms_recurrence: Flag = True
    attention_scale: Literal["head_dim", "half_head_dim", "query_pre_attn_scalar", "attention_multiplier", "one"] = (
        "head_dim"
    )
    is_rotary: Callable[[ConfigFacts], bool] = lambda facts: True
    hides_windows: bool = False
    traits: tuple[Trait, ...] = ()
    refused_by_peft: str = ""
    refused: str = ""
