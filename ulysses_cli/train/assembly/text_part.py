"""The language model inside a multimodal model's files: under which names it stands there. transformers knows them for
some families; the rules here hold for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from ulysses_cli.plan.models.shape import TEXT_PARTS

# A text model stands within its parent's `model`, or as a model of its own with a head of its own.
INNER_BODY, OWN_BODY, OWN_HEAD = "model.language_model.", "language_model.model.", "language_model.lm_head."
BODIES = (INNER_BODY, OWN_BODY)
TEXT_NAMES = {**{f"^{re.escape(body)}": "model." for body in BODIES}, f"^{re.escape(OWN_HEAD)}": "lm_head."}


def find_key_mapping(path: str, revision: str | None = None) -> dict[str, str] | None:
    """Returns transformers' key_mapping to load a text model from the files of a multimodal model; None for the files
    of a text model."""
    content, _ = PretrainedConfig.get_config_dict(path, revision=revision)
    return dict(TEXT_NAMES) if find_part(content) else None


def find_part(content: Mapping[str, Any]) -> str:
    """Returns the key under which a multimodal model's config.json holds its text model, or ''."""
    return next((part for part in TEXT_PARTS if isinstance(content.get(part), Mapping)), "")


def is_text_name(name: str) -> bool:
    """Returns whether a tensor of a multimodal model's files belongs to its text model."""
    return name.startswith((*BODIES, OWN_HEAD, "lm_head."))
