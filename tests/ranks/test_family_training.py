"""Training of families with attention of other kinds on ranks equals plain torch on one process: latent keys, sinks, an
expert that every token goes to, Gemma 4 with keys that are values or another layer's."""

from typing import Any

import pytest
from support.families import describe_family
from test_exact_training import LEAVES, LEVERS, check_training
from test_models import GEMMA_4

# family, what its config has of its own
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", {"first_k_dense_replace": 1}),
    "glm4_moe": ("glm4_moe", {"first_k_dense_replace": 1, "use_qk_norm": True}),
    "glm4_moe_lite": ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse"]}),
    "gpt_oss": ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    **{variant: ("gemma4_text", {"num_hidden_layers": 6, **changes}) for variant, changes in GEMMA_4.items()},
}
ALL_LEVERS = LEVERS | {"leaf": LEAVES["all"]}
# model, layout, ZeRO stage, LoRA, levers
CASES = [
    *((model, "2x1", stage, False, "default") for model in ("deepseek_v3", "glm4_moe") for stage in (1, 3)),
    ("deepseek_v3", "2x2", 3, False, "none"),
    ("glm4_moe", "2x1", 3, True, "full"),
    *((model, "2x1", stage, False, "default") for model in GEMMA_4 for stage in (1, 3)),
    *((model, "2x1", 1, False, "none") for model in GEMMA_4),
    *((model, "2x1", 3, False, levers) for model in GEMMA_4 for levers in ("full", "all")),
    ("keys of an earlier layer", "2x2", 3, True, "default"),
    *((model, "2x1", 1, False, "none") for model in ("glm4_moe_lite", "gpt_oss")),
    *((model, "2x1", 3, False, "all") for model in ("glm4_moe_lite", "gpt_oss")),
    ("gpt_oss", "4x1", 3, True, "default"),
    *(
        (model, "2x1", 3, lora, "leaf")
        for model in ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
        for lora in (False, True)
    ),
    ("gpt_oss", "2x2", 3, True, "leaf"),
    ("keys as values", "2x1", 3, False, "leaf"),
]
# Gemma 4 scales no scores: a new model's softmax is so sharp that gradients differ by 3e-5 on one rank too, and wide
# steps drive such differences apart.
TOLERANCES = dict.fromkeys(GEMMA_4, 2e-4)
SMALL_STEPS = dict.fromkeys(GEMMA_4, ("train.learning_rate=1e-6",))


@pytest.mark.full
@pytest.mark.parametrize(("model", "layout", "stage", "lora", "levers"), CASES)
def test_training_equals_plain_torch(model: str, layout: str, stage: int, lora: bool, levers: str) -> None:
    """Checkpointing is ours, which saves attention's result, where no lever says otherwise."""
    model_type, changes = MODELS[model]
    more, config = (*ALL_LEVERS.get(levers, ()), *SMALL_STEPS.get(model, ())), describe_family(model_type, **changes)
    check_training(layout, 1, stage, lora, *more, config=config, tolerance=TOLERANCES.get(model, 1e-5))
