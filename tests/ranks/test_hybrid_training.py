"""Training of models with convolutions and recurrences on ranks equals plain torch on one process: loss, every gradient
and the weights after five steps, with packed documents. An evaluation between steps has the plain model's loss."""

from typing import Any

import pytest
import torch
from support.hybrids import describe_hybrid
from support.rank_pool import run_on_ranks
from support.run_harness import RunHarness, train_alone
from support.tiers import mark_by
from support.training import MemoryRows, make_recipe
from test_exact_training import LEAVES, LEVERS, ROWS, check_training
from torch.nn import functional

from ulysses_cli.data.steps import make_eval_batching
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.train.evaluation import evaluate
from ulysses_cli.train.loop import train

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
    *((name, "2x1", 3, lora, "leaf") for name in ("qwen3_5_text", "bamba", "lfm2") for lora in (False, True)),
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
    ("qwen3_5_text", "8x1", 3, False, "default"),
    ("nemotron_h", "8x1", 1, False, "default"),
    ("lfm2", "8x1", 3, False, "default"),
    ("zamba2", "2x1", 3, True, "attention"),
    ("zamba2", "2x2", 2, True, "attention"),
]
MORE_LEVERS = LEVERS | {
    "leaf": LEAVES["none"],
    "attention": ("lora.target_modules=[q_proj, k_proj, v_proj, o_proj]",),  # of shared blocks alone
}


@pytest.mark.parametrize(
    ("model_type", "layout", "stage", "lora", "levers"),
    [pytest.param(*case, marks=mark_by(False, case == CASES[0])) for case in CASES],
)
def test_training_equals_plain_torch(model_type: str, layout: str, stage: int, lora: bool, levers: str) -> None:
    config = {**describe_hybrid(model_type), **(EIGHT_HEADS[model_type] if layout == "8x1" else {})}
    words = MORE_LEVERS.get(levers, ())
    check_training(layout, 1, stage, lora, *words, config=config, tolerance=TOLERANCE, floor=FLOOR)


HELD_OUT = [[(20, 0), (9, 0), (31, 12)], [(64, 0)], [(1, 0), (50, 3)]]
NUM_EVALUATED = 3  # steps with an evaluation before each


@torch.no_grad()
def compute_plain_loss(harness: RunHarness, rows: MemoryRows) -> float:
    """The loss of the plain model with the weights of training, document by document."""
    plain = harness.make_plain_model()
    total, num_targets = 0.0, 0
    for tokens, labels in (document for row in rows.documents for document in row):
        logits = plain(torch.from_numpy(tokens)[None], use_cache=False).logits[0]
        total += functional.cross_entropy(logits.double(), torch.from_numpy(labels), reduction="sum").item()
        num_targets += int((labels >= 0).sum())
    return total / num_targets


def train_and_evaluate(recipe: Recipe) -> tuple[list[float], list[float], list[float]]:
    """On one rank: the losses of steps, of evaluations between them, and of the plain model."""
    harness, held_out = RunHarness(recipe, MemoryRows(ROWS), NUM_EVALUATED), MemoryRows(HELD_OUT)
    state, batching = harness.train_state, make_eval_batching(harness.plan.shape, harness.plan.resolved)
    found: list[tuple[float, float]] = []

    def evaluate_both(*_: object) -> None:
        own = evaluate(state.engine, state.groups, held_out, batching)
        found.append((own["loss"], compute_plain_loss(harness, held_out)))

    state.pre_step_hooks = (evaluate_both,)
    train(state)
    ours, plain = map(list, zip(*found, strict=True))
    return harness.losses, ours, plain


@pytest.mark.full
@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("zamba2", ("parallel.sp_size=2",)),
        ("zamba2", ("parallel.dp_shard_size=2", "parallel.zero_stage=2")),
        ("nemotron_h", ("parallel.sp_size=2",)),
        ("qwen3_5_text", ("parallel.sp_size=2", "parallel.zero_stage=1")),
    ],
)
def test_an_evaluation_between_steps_is_the_plain_models_and_changes_no_step(
    model_type: str, words: tuple[str, ...]
) -> None:
    recipe = make_recipe(*words, config=describe_hybrid(model_type, initializer_range=0.1))
    expected = run_on_ranks(2, train_alone, recipe, MemoryRows(ROWS), NUM_EVALUATED)[0]
    for losses, ours, plain in run_on_ranks(2, train_and_evaluate, recipe):
        assert losses == expected
        assert ours == pytest.approx(plain, rel=1e-5)
        assert len({round(loss, 4) for loss in ours}) == NUM_EVALUATED
