"""The model families whose layers are known, with transformers' defaults for what their config.json leaves out.

A family that is not listed can be trained on one rank per row; splitting its rows over ranks is refused.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ulysses_cli.plan.models.dense_families import DENSE
from ulysses_cli.plan.models.expert_families import EXPERTS
from ulysses_cli.plan.models.family import Family
from ulysses_cli.plan.models.hybrid_families import HYBRIDS

# A test compares the file with the installed transformers and says how to write it anew.
DEFAULTS: Mapping[str, Mapping[str, Any]] = json.loads(
    (Path(__file__).parent / "defaults" / "transformers.json").read_bytes()
)
FAMILIES: dict[str, Family] = {
    name: replace(family, defaults=DEFAULTS[name]) for name, family in (DENSE | EXPERTS | HYBRIDS).items()
}
# Given all-linear or the MLP's names, peft adapts their experts and routers too, as it once found them: one matrix each
# (utils/transformers_weight_conversion.py).
EXPERTS_ADAPTED = frozenset(
    {"afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo"}
    | {"glm4_moe", "glm4_moe_lite", "hunyuan_v1_moe", "mellum", "minimax_m2", "mixtral", "olmoe", "qwen3_moe"}
    | {"qwen3_next", "solar_open"}
)
# peft refuses an adapter on this linear layer of their Mamba layers, and all-linear with it (tuners/tuners_utils.py:
# _check_lora_target_modules_mamba).
REFUSED_BY_PEFT = {"falcon_h1": "out_proj", "nemotron_h": "out_proj"}
# Text parts of multimodal models, where their names do not follow from the whole model's.
TEXT_TYPES = {"mistral3": ("mistral", "ministral3")}


def find_text_types(model_type: str, known: Collection[str]) -> tuple[str, ...]:
    """Returns which of the known families the text part of a multimodal model may be of."""
    return tuple(each for each in TEXT_TYPES.get(model_type, (f"{model_type}_text",)) if each in known)
