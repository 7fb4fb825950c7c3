"""Training of models with convolutions and recurrences on ranks equals plain torch on one process: loss, every gradient
and the weights after five steps, with packed documents."""

from __future__ import annotations

from typing import Any

import pytest
from support.hybrids import HYBRIDS, TINY
from support.tiers import mark_by
from test_exact_training import LEVERS, check_training

SIZES = {"vocab_size": 64, "max_position_embeddings": 256, "tie_word_embeddings": False}
CONFIGS: dict[str, dict[str, Any]] = {
    model_type: {**TINY, **SIZES, **HYBRIDS[model_type], "model_type": model_type} for model_type in HYBRIDS
}
# A rank of eight has one head of each kind.
EIGHT_HEADS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"num_attention_heads": 8, "linear_num_value_heads": 8},
    "nemotron_h": {"num_attention_heads": 8},
    "lfm2": {"num_attention_heads": 8},
}
# transformers' rules compute in float32. Gradients of A_log and dt_bias are sums of terms that nearly cancel: on one
# rank too they differ by 2e-4 between a packed row and its documents. Some are 1e-8 to 1e-6 long, and up to 4e-9 of
# them is rounding, on one rank as on two.
TOLERANCE, FLOOR = 5e-4, 2e-5

# family, layout, ZeRO stage, LoRA, levers
CASES = [
    ("qwen3_5_text", "2x1", 3, False, "none"),
    ("qwen3_5_text", "2x2", 1, False, "default"),
    ("qwen3_5_text", "2x1", 3, True, "all"),
    ("qwen3_next", "1x2", 3, False, "default"),
    ("bamba", "2x1", 3, False, "default"),
    ("bamba", "1x2", 1, True, "none"),
    ("nemotron_h", "2x1", 1, False, "default"),
    ("lfm2", "2x1", 3, False, "all"),
    ("lfm2", "1x1", 1, False, "none"),
    ("kimi_linear", "2x1", 3, False, "full"),
    ("zamba2", "2x1", 3, False, "default"),
    ("granitemoehybrid", "2x1", 3, False, "all"),
    ("qwen3_5_text", "2x1", 2, False, "default"),
    ("nemotron_h", "2x2", 2, False, "default"),
    ("lfm2", "2x1", 2, True, "none"),
    ("qwen3_5_text", "4x1", 3, False, "default"),
    ("bamba", "4x1", 3, False, "full"),
    ("kimi_linear", "4x1", 1, False, "default"),
    ("lfm2", "4x1", 3, False, "default"),
    ("falcon_h1", "2x1", 3, False, "default"),
    ("falcon_h1", "2x1", 1, False, "none"),
    ("olmo_hybrid", "2x1", 3, False, "full"),
    ("olmo_hybrid", "2x2", 1, False, "default"),
    ("bailing_hybrid", "2x1", 3, False, "default"),
    ("bailing_hybrid", "2x1", 1, False, "none"),
    ("lfm2_moe", "2x1", 3, False, "all"),
    ("lfm2_moe", "2x1", 1, False, "default"),
    ("lfm3", "2x1", 3, False, "default"),
    ("lfm3", "4x1", 1, False, "none"),
    ("qwen3_5_moe_text", "2x1", 3, False, "default"),
    ("qwen3_5_moe_text", "2x1", 1, False, "full"),
    ("nemotron_h", "2x1", 3, False, "default"),
    ("nemotron_h", "2x1", 3, False, "all"),
    ("qwen3_next", "2x1", 3, False, "default"),
    ("zamba2", "2x1", 1, False, "none"),
    ("zamba2", "2x1", 3, False, "all"),
    ("zamba2", "2x1", 3, True, "default"),
    ("zamba2", "2x2", 1, True, "all"),
    ("granitemoehybrid", "2x1", 1, False, "default"),
    *((name, "2x1", 3, False, "host") for name in ("qwen3_5_text", "nemotron_h", "lfm2")),
    ("qwen3_5_text", "2x2", 3, True, "host"),
]
CHECKED = (CASES[0], ("nemotron_h", "2x1", 3, False, "default"))


@pytest.mark.parametrize(
    ("model_type", "layout", "stage", "lora", "levers"),
    [pytest.param(*case, marks=mark_by(False, case in CHECKED)) for case in CASES],
)
def test_training_equals_plain_torch(model_type: str, layout: str, stage: int, lora: bool, levers: str) -> None:
    more = LEVERS.get(levers, ())
    check_training(layout, 1, stage, lora, *more, config=CONFIGS[model_type], tolerance=TOLERANCE, floor=FLOOR)


@pytest.mark.full
@pytest.mark.parametrize(("model_type", "stage"), [("qwen3_5_text", 3), ("nemotron_h", 1), ("lfm2", 3)])
def test_eight_ranks_of_a_row(model_type: str, stage: int) -> None:
    config = {**CONFIGS[model_type], **EIGHT_HEADS[model_type]}
    check_training("8x1", 1, stage, False, config=config, tolerance=TOLERANCE, floor=FLOOR)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "stage"), [("2x1", 3), ("2x2", 2)])
def test_adapters_on_the_attention_of_shared_blocks(layout: str, stage: int) -> None:
    targets = "lora.target_modules=[q_proj, k_proj, v_proj, o_proj]"
    check_training(layout, 1, stage, True, targets, config=CONFIGS["zamba2"], tolerance=TOLERANCE, floor=FLOOR)
