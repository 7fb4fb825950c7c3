"""Tests that the speed model counts the matrix products of a step that torch runs."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.families import make_config
from support.rank_pool import run_on_ranks
from support.run_harness import RunHarness
from support.tiers import sample
from support.training import MemoryRows, make_recipe
from torch.utils.flop_counter import FlopCounterMode

from ulysses_cli.plan.ledger.job import make_job
from ulysses_cli.plan.speed import compute_product_flops
from ulysses_cli.train.loop import train

TOKENS = 64
ONCE, AGAIN = "memory.gradient_checkpointing=false", "memory.gradient_checkpointing=true"
FULL, TILED = "memory.gradient_checkpointing=full", "memory.tiled_mlp=true"
LAYERS = "memory.leaf_layers=true"


def count_added(total: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    return int(2 * a[0] * a[1] * b[1])


def count_products(config: dict[str, Any], words: Sequence[str]) -> tuple[float, float]:
    """Of one step of one document: as torch counts them, and as they are predicted."""
    recipe = make_recipe(*words, "model.experts_implementation=eager", config=config)
    if recipe.zero_stage < 3:  # DeepSpeed leaves its own in place where an earlier run had stage 3
        torch.nn.functional.linear = torch._C._nn.linear
    harness = RunHarness(recipe, MemoryRows([[(TOKENS, 0)]]), 1)
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: count_added}) as counter:
        train(harness.train_state)
    counted = counter.get_flop_counts()["Global"]
    predicted = compute_product_flops(make_job(harness.plan.recipe, harness.plan.shape, harness.plan.levers))
    predicted["head_loss"] *= (TOKENS - 1) / TOKENS  # of targets alone
    return sum(flops for name, flops in counted.items() if "attend" not in str(name)), sum(predicted.values())


CASES = [
    ("llama", (ONCE,)),
    ("llama", (ONCE, TILED)),
    ("llama", (AGAIN, "parallel.zero_stage=1")),
    ("llama", (AGAIN, "parallel.zero_stage=2")),
    ("llama", (AGAIN,)),
    ("llama", (AGAIN, LAYERS)),
    ("llama", (AGAIN, TILED)),
    ("llama", (AGAIN, TILED, "parallel.zero_stage=1")),
    ("llama", (FULL,)),
    ("llama", (FULL, TILED, LAYERS)),
    *((family, (AGAIN, *more)) for family in ("gemma2", "olmo2", "cohere", "granite") for more in ((), (TILED,))),
]
QUICK = [CASES[1], CASES[2], CASES[5], CASES[10]]


@pytest.mark.parametrize(("family", "words"), sample(CASES, QUICK))
def test_products_are_counted_as_they_run(family: str, words: tuple[str, ...]) -> None:
    """Norms behind Gemma 2's MLPs read their result, which is computed again."""
    config = make_config(family).to_dict()
    ((counted, predicted),) = run_on_ranks(1, count_products, config, words)
    assert counted == predicted


EXPERTS = [(family, (AGAIN, *more)) for family in ("qwen3_moe", "mixtral") for more in ((), (TILED,))]


@pytest.mark.parametrize(("family", "words"), sample(EXPERTS, [EXPERTS[0]]))
def test_experts_are_counted_as_they_run(family: str, words: tuple[str, ...]) -> None:
    ((counted, predicted),) = run_on_ranks(1, count_products, make_config(family).to_dict(), words)
    assert counted == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.check)])
@pytest.mark.parametrize("target", ["q_proj", "down_proj"])
@pytest.mark.parametrize("more", [(), pytest.param((TILED,), marks=pytest.mark.check)])
def test_a_product_under_an_adapter_is_computed_again(target: str, stage: int, more: tuple[str, ...]) -> None:
    """Of wide layers, beside whose products those of adapters hardly count. Differences, since nothing before the first
    adapter has a backward."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 64}
    config = make_config("llama", head_dim=32, **sizes).to_dict()
    words = (f"lora={{r: 1, target_modules: [{target}]}}", f"parallel.zero_stage={stage}", *more)
    once, again = (run_on_ranks(1, count_products, config, (*words, each))[0] for each in (ONCE, AGAIN))
    assert again[0] - once[0] == pytest.approx(again[1] - once[1], rel=0.02)
