"""Compares runs with experts with plain transformers on one process: the loads that are recorded, frozen routers."""

from typing import Any

import numpy as np
import pytest
import torch
from support.families import ATTENTION_ONLY, has_experts, make_config
from support.rank_pool import run_on_ranks
from support.run_harness import RunHarness
from support.training import MemoryRows, make_plain_model, make_recipe, measure_difference, train_plainly
from transformers import AutoModelForCausalLM

from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.train.loop import train
from ulysses_cli.train.metrics import Meter, describe_load
from ulysses_cli.train.model.routers import find_routers

ROWS = [[(40, 0), (24, 3)], [(64, 0)]]  # full rows: padding would be routed too


def record(recipe: Recipe) -> list[dict[str, Any]]:
    harness, lines = RunHarness(recipe, MemoryRows(ROWS), 2), list[dict[str, Any]]()
    meter = Meter(lambda *_: 1.0, None, lines.append)
    harness.train_state.pre_step_hooks = (meter.start,)
    harness.train_state.post_step_hooks = (meter.record,)
    train(harness.train_state)
    return lines


def expect(recipe: Recipe) -> dict[str, float]:
    """Of the first step: its router's choices, counted by hand."""
    model = make_plain_model(recipe)
    config = model.config
    counts = np.zeros((config.num_hidden_layers, config.num_experts))
    for tokens, _ in [document for row in MemoryRows(ROWS).documents for document in row]:
        logits = model(torch.from_numpy(tokens)[None], use_cache=False, output_router_logits=True).router_logits
        for layer, each in enumerate(logits):
            for token in each:
                counts[layer, token.topk(config.num_experts_per_tok).indices.numpy()] += 1
    return {"expert_load": float((counts.max(1) / counts.mean(1)).max()), "idle_experts": float((counts == 0).mean())}


LAYOUTS = {
    "one": (1, ()),
    "tiles": (1, ("memory.tiled_mlp=true", "memory.gradient_checkpointing=full")),
    "sp 2": (2, ("parallel.sp_size=2", "memory.tiled_mlp=true")),
    "ring 2": (2, ("parallel.sp_size=2", "parallel.ring_size=2")),
    "dp 2": (2, ("parallel.dp_shard_size=2", "train.gradient_accumulation_steps=1", "parallel.zero_stage=2")),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in ("sp 2",) else pytest.mark.check) for name in LAYOUTS]
)
def test_loads_are_those_of_all_tokens_of_a_step(layout: str) -> None:
    num_ranks, words = LAYOUTS[layout]
    sizes = {"num_experts": 96, "num_local_experts": 96, "initializer_range": 0.5}
    config = make_config("qwen3_moe", **sizes).to_dict()
    accumulation = ("train.gradient_accumulation_steps=2",) if "dp" not in layout else ()
    recipe = make_recipe(*accumulation, *words, config=config)
    expected = expect(recipe)
    assert expected["expert_load"] > 1.5
    assert expected["idle_experts"] > 0
    for lines in run_on_ranks(num_ranks, record, recipe):
        assert {name: lines[0][name] for name in expected} == pytest.approx(expected, rel=1e-12)
        assert lines[1]["expert_load"] != lines[0]["expert_load"], "each step counts anew"


def test_an_idle_expert_and_layers_of_other_sizes_are_described() -> None:
    counts = torch.tensor([[4, 0, 2, 2], [9, 1, 0, 0]])
    assert describe_load(counts, [4, 2]) == {"expert_load": 2.0, "idle_experts": 1 / 6}


def test_a_model_without_experts_records_no_load() -> None:
    assert "expert_load" not in run_on_ranks(1, record, make_recipe())[0][0]


NUM_STEPS = 2


def run(recipe: Recipe) -> tuple[dict[str, torch.Tensor], list[float]]:
    harness = RunHarness(recipe, MemoryRows(ROWS), NUM_STEPS)
    train(harness.train_state)
    return harness.read_plain_weights(), harness.norms


ROUTED_LAYOUTS = {
    "one, zero 1": (1, ("parallel.zero_stage=1", "memory.gradient_checkpointing=false")),
    "sp 2, tiles": (2, ("parallel.sp_size=2", "memory.tiled_mlp=true", "memory.gradient_checkpointing=full")),
    "dp 2, zero 2": (2, ("parallel.dp_shard_size=2", "parallel.zero_stage=2")),
    "on the host": (1, ("memory.offload_optimizer=cpu",)),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "sp 2, tiles" else pytest.mark.check) for name in ROUTED_LAYOUTS]
)
def test_frozen_routers_stay_to_the_last_bit_and_all_else_is_trained(layout: str) -> None:
    num_ranks, words = ROUTED_LAYOUTS[layout]
    accumulation = () if layout.startswith("dp") else ("train.gradient_accumulation_steps=2",)
    config = make_config("gpt_oss" if layout.startswith("dp") else "qwen3_moe", initializer_range=0.3).to_dict()
    recipe = make_recipe("train.freeze_router=true", *accumulation, *words, config=config)
    model = make_plain_model(recipe)
    for router in find_routers(model).values():
        router.requires_grad_(False)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    assert len(frozen) >= config["num_hidden_layers"]
    rates = [recipe.train.learning_rate * share for share in (1.0, 0.5)]
    right = train_plainly(model, MemoryRows(ROWS), [[0, 1]] * NUM_STEPS, recipe, rates)
    for own, norms in run_on_ranks(num_ranks, run, recipe):
        assert own.keys() >= frozen.keys(), "exports and checkpoints hold them"
        for name, weight in frozen.items():
            assert torch.equal(own.pop(name), weight), name
        assert norms == pytest.approx(right.norms, rel=1e-5), "a frozen weight is no part of the norm that clips"
        assert measure_difference(own, right.weights) < 1e-5


@pytest.mark.parametrize("family", [name for name in ATTENTION_ONLY if has_experts(name)])
def test_each_layer_of_experts_has_a_router(family: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(family))
    experts = [name for name, module in model.named_modules() if name.endswith(".experts")]
    routers = find_routers(model)
    assert [name.rpartition(".")[0] for name in routers] == [name.rpartition(".")[0] for name in experts]
    assert all(list(router.parameters()) for router in routers.values())
