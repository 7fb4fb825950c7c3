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
from ulysses_cli.plan.models.family import Family, Trait
from ulysses_cli.plan.models.hybrid_families import HYBRIDS

# A test compares the file with the installed transformers and says how to write it anew.
DEFAULTS: Mapping[str, Mapping[str, Any]] = json.loads(
    (Path(__file__).parent / "defaults" / "transformers.json").read_bytes()
)
FAMILIES: dict[str, Family] = {
    name: replace(family, defaults=DEFAULTS[name]) for name, family in (DENSE | EXPERTS | HYBRIDS).items()
}
# Text parts of multimodal models, where their names do not follow from the whole model's.
TEXT_TYPES = {"mistral3": ("mistral", "ministral3")}


def find_text_types(model_type: str, known: Collection[str]) -> tuple[str, ...]:
    """Returns which of the known families the text part of a multimodal model may be of."""
    return tuple(each for each in TEXT_TYPES.get(model_type, (f"{model_type}_text",)) if each in known)


def list_traits(model_type: str) -> tuple[Trait, ...]:
    """None of a family that is not listed."""
    return FAMILIES[model_type].traits if model_type in FAMILIES else ()
