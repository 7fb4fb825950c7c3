"""Training adapters of experts on ranks equals peft's own forward, which adds them to the weights, on one process."""

import pytest
from support.families import describe_family
from support.levers import SHAPES
from support.tiers import mark_by
from test_exact_training import LEVERS, TILED, check_training

FULL = "memory.gradient_checkpointing=full"
RING = "parallel.ring_size=2"
WORDS = ("lora.r=4", "lora.target_modules=[q_proj, o_proj]", "lora.experts=[gate_up, down]", "lora.expert_r=3")
# layout, ZeRO stage, more words
CASES: list[tuple[str, str, int, tuple[str, ...]]] = [
    ("qwen3_moe", "2x1", 3, TILED),
    *(("qwen3_moe", "2x1", stage, ()) for stage in (1, 2, 3)),
    *(("qwen3_moe", "2x1", stage, (*TILED, FULL)) for stage in (1, 2)),
    *(("qwen3_moe", "2x1", 3, LEVERS[levers]) for levers in ("none", "full", "all", "host")),
    *(("qwen3_moe", layout, 3, TILED) for layout in ("1x1", "1x2", "2x2")),
    *(("qwen3_moe", "2x1", stage, (*words, RING)) for stage, words in ((1, ()), (3, TILED))),
    ("qwen3_moe", "2x1", 3, (*TILED, "lora.experts=[down]")),
    *((kind, "2x1", 3, words) for kind in ("gpt_oss", "mixtral", "gemma4_text") for words in ((), TILED)),
    ("cohere2_moe", "2x1", 3, ("lora.target_modules=[o_proj]",)),  # the first experts read a frozen input
]
CHECKED = [CASES[3], CASES[4], CASES[12], ("gpt_oss", "2x1", 3, TILED), CASES[-1]]


@pytest.mark.parametrize(
    ("kind", "layout", "stage", "words"),
    [pytest.param(*case, marks=mark_by(case == CASES[0], case in CHECKED)) for case in CASES],
)
def test_training_equals_peft_on_one_process(kind: str, layout: str, stage: int, words: tuple[str, ...]) -> None:
    sharp = kind == "gemma4_text"  # a new model's softmax: its gradients differ on one rank too
    more, tolerance = (("train.learning_rate=1e-6",), 2e-4) if sharp else ((), 1e-5)
    check_training(
        layout,
        2,
        stage,
        False,
        *WORDS,
        *words,
        *more,
        config=describe_family(kind, **SHAPES.get(kind, {})),
        tolerance=tolerance,
    )
