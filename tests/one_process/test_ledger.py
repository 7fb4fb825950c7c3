"""Compares the ledger's activation terms with counted steps of transformers' models with our attention, levers and
loss. ranks/test_trace.py compares what DeepSpeed adds with a trace."""

from typing import Any

import pytest
import torch
from support.counted_steps import compare_step, list_cases
from support.random_recipes import read_saved_configs
from support.tiers import mark_by, sample_every
from transformers import AutoConfig, AutoModelForCausalLM

from ulysses_cli.plan.models.families import list_traits
from ulysses_cli.plan.models.family import Trait
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.rows.ring import MAX_BRANCHES

QUICK = {("tied, query norms", "no recompute", 4)}
CHECKED = {
    ("grouped keys", "full recompute", 1), ("norms behind", "tiled loss", 2), ("experts", "tiled loss", 4),
    ("fused projections", "tiles, chunks", 2),
}  # fmt: skip


def mark_cases() -> list[Any]:
    return [pytest.param(*case, marks=mark_by(case in QUICK, case in CHECKED)) for case in list_cases()]


@pytest.mark.parametrize(("model", "levers", "sp_size"), mark_cases())
def test_the_ledger_predicts_what_a_step_allocates(model: str, levers: str, sp_size: int) -> None:
    counted, predicted = compare_step(model, levers, sp_size)
    assert predicted == pytest.approx(counted, rel=0.03)


BRANCHES = [
    ("all keys", "long row, tiles", 1), ("all keys", "long row, tiles, full", 2), ("grouped keys", "no recompute", 2),
    ("all keys", "long row, tiles, chunks", 2), ("grouped keys", "long row, large tiles", 4),
    ("experts with sinks", "tiles", 1),
]  # fmt: skip


@pytest.mark.parametrize("num_branches", [1, MAX_BRANCHES])
@pytest.mark.parametrize("case", [pytest.param(case, marks=mark_by(case == BRANCHES[-1], False)) for case in BRANCHES])
def test_the_ledger_predicts_a_step_of_answers_that_share_their_prompt(
    case: tuple[str, str, int], num_branches: int
) -> None:
    counted, predicted = compare_step(*case, num_branches)
    assert predicted == pytest.approx(counted, rel=0.03)


NUM_TOKENS = 8


def has_experts(config: dict[str, Any]) -> bool:
    return any(layer.num_experts for layer in read_model_shape(config, "a saved model").layers)


WITH_EXPERTS = {family: configs[-1] for family, configs in read_saved_configs().items() if has_experts(configs[-1])}


@pytest.mark.parametrize("family", sample_every(6, sorted(WITH_EXPERTS)))
def test_results_are_weighted_in_the_dtype_that_the_ledger_counts(family: str) -> None:
    config = {**WITH_EXPERTS[family], "vocab_size": 300}
    found: set[torch.dtype] = set()

    def note(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Routing weights are the narrow ones among the inputs of all experts."""
        inputs = [each for each in (*args, *named.values()) if isinstance(each, torch.Tensor)]
        found.update(each.dtype for each in inputs if each.is_floating_point() and each.size(-1) < NUM_TOKENS)

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16).bfloat16()
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(note, with_kwargs=True)
    model(input_ids=torch.zeros((1, NUM_TOKENS), dtype=torch.long, device="meta"))
    assert found == {torch.float32 if Trait.PRECISE_RESULTS in list_traits(family) else torch.bfloat16}
