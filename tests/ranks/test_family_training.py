"""Training of families with attention of other kinds on ranks equals plain torch on one process: latent keys, an
expert that every token goes to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.families import make_config
from test_exact_training import LEVERS, check_training

CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"first_k_dense_replace": 1},
    "glm4_moe": {"first_k_dense_replace": 1, "use_qk_norm": True},
}  # fmt: skip
# family, layout, ZeRO stage, LoRA, levers
CASES = [
    *((model_type, "2x1", stage, False, "default") for model_type in CHANGES for stage in (1, 3)),
    ("deepseek_v3", "2x2", 3, False, "none"),
    ("glm4_moe", "2x1", 3, True, "full"),
]


def describe(model_type: str) -> dict[str, Any]:
    """The content of its config.json."""
    config = make_config(model_type, **CHANGES[model_type])
    content: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {**content, "model_type": model_type, "tie_word_embeddings": False}


@pytest.mark.full
@pytest.mark.parametrize(("model_type", "layout", "stage", "lora", "levers"), CASES)
def test_training_equals_plain_torch(model_type: str, layout: str, stage: int, lora: bool, levers: str) -> None:
    check_training(layout, 1, stage, lora, *LEVERS.get(levers, ()), config=describe(model_type))
