"""Compares the families whose experts' results are weighted in float32, a fact of the ledger, with transformers."""

from typing import Any

import pytest
import torch
from support.random_recipes import read_saved_configs
from support.tiers import sample_every
from transformers import AutoConfig, AutoModelForCausalLM

from ulysses_cli.plan.models.families import list_traits
from ulysses_cli.plan.models.family import Trait
from ulysses_cli.plan.models.shape import read_model_shape

NUM_TOKENS = 8


def has_experts(config: dict[str, Any]) -> bool:
    return any(layer.num_experts for layer in read_model_shape(config, "a saved model").layers)


WITH_EXPERTS = {family: configs[-1] for family, configs in read_saved_configs().items() if has_experts(configs[-1])}


@pytest.mark.parametrize("family", sample_every(4, sorted(WITH_EXPERTS)))
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
