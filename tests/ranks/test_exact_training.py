"""Tests that training on ranks equals plain torch on one process: loss, every gradient and the weights after three
steps, or five in `make test-full`."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from support.families import OWN_VALUES, describe_family
from support.rank_pool import run_on_ranks
from support.run_harness import RunHarness
from support.small_run import CONFIG
from support.tiers import FULL, TIER, mark_by
from support.training import (
    MemoryRows,
    Trajectory,
    make_plain_model,
    make_recipe,
    measure_difference,
    train_as_planned,
)

from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.plan.resolved import choose_layout
from ulysses_cli.train.loop import train

NUM_STEPS = 5 if TIER == FULL else 3
# Each document is (length, first target). There are uneven documents, a row whose second half has no target, rows with
# few targets, and one-token documents.
ROWS = [
    [(40, 0), (1, 0), (7, 3)], [(30, 0), (31, 31)], [(64, 0)], [(5, 0), (9, 9), (3, 0), (20, 15)], [(50, 48)],
    [(16, 0), (16, 0), (16, 0), (16, 0)], [(11, 2)],
]  # fmt: skip
LAYOUTS = {"1x1": (1, 1), "2x1": (2, 1), "1x2": (1, 2), "4x1": (4, 1), "2x2": (2, 2)}


QUICK = [("2x1", 3, 3, False)]
TELLING = [("2x2", 1, 1, False)]  # four ranks of a row, and adapters: rings and levers have them


def train_on_ranks(recipe: Recipe) -> Trajectory:
    """Trains on one rank; results are gathered whole."""
    from deepspeed.utils import groups as ds_groups

    ds_groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # DeepSpeed makes replicas' groups once in a process
    harness = RunHarness(recipe, MemoryRows(ROWS), NUM_STEPS)
    grads = harness.collect_grads()
    train(harness.train_state)
    assert all(result.update.was_applied for result in harness.results)
    return Trajectory(harness.losses, grads, harness.norms, harness.read_plain_weights())


def make_reference(recipe: Recipe) -> Trajectory:
    model = make_plain_model(recipe)
    if recipe.lora is not None:
        from peft import LoraConfig, get_peft_model

        targets: Any = recipe.lora.target_modules
        targets = targets if isinstance(targets, str) else list(targets)
        torch.manual_seed(recipe.run.seed)
        settings = LoraConfig(r=recipe.lora.r, lora_alpha=recipe.lora.alpha, target_modules=targets)
        settings.target_parameters = [f"experts.{part}_proj" for part in recipe.lora.experts]
        if recipe.lora.expert_r != "auto":
            settings.rank_pattern = dict.fromkeys(settings.target_parameters, recipe.lora.expert_r)
        get_peft_model(model, settings)
    return train_as_planned(model, MemoryRows(ROWS), recipe, NUM_STEPS)


def list_cases() -> list[Any]:
    cases = []
    for name in LAYOUTS:
        for accumulation in (1, 3):
            for stage in (1, 2, 3):
                for lora in (False, True):
                    case = (name, accumulation, stage, lora)
                    cases.append(pytest.param(*case, marks=mark_by(case in QUICK, case in TELLING)))
    return cases


TILED = ("memory.tiled_mlp=true", "memory.tiled_loss=true")
LEVERS = {
    "all": (*TILED, "memory.activation_offloading=true", "memory.attention_head_chunks=2"),
    "overlap": (*TILED, "memory.attention_head_chunks=2", "memory.overlap_exchange=true"),
    "full": (*TILED, "memory.gradient_checkpointing=full", "memory.activation_offloading=true"),
    "none": ("memory.gradient_checkpointing=false",),
    "cpu adam": ("memory.offload_optimizer=cpu", "memory.tiled_loss=true"),
    "host": ("memory.offload_optimizer=cpu", "memory.offload_param=cpu"),
}
LEAF = "memory.leaf_layers=true"
LEAVES = {name: (LEAF, *LEVERS[name]) for name in ("all", "full", "none", "host")}


@pytest.mark.parametrize(
    ("levers", "name", "lora"),
    [
        pytest.param(levers, name, lora, marks=mark_by((levers, name, lora) == ("all", "2x1", False), telling))
        for levers in LEVERS
        for name in ("2x1", "2x2")
        for lora in (False, True)
        for telling in [(levers, name, lora) in (("full", "2x1", True), ("overlap", "2x2", False))]
    ],
)
def test_levers_through_the_engine_change_nothing(levers: str, name: str, lora: bool) -> None:
    check_training(name, 2, 3, lora, *LEVERS[levers])


@pytest.mark.parametrize(
    ("levers", "name", "lora"),
    [
        pytest.param(levers, name, lora, marks=mark_by(case == ("all", "2x1", True), case == ("none", "2x2", False)))
        for levers in LEAVES
        for name in ("2x1", "2x2")
        for lora in (False, True)
        for case in [(levers, name, lora)]
    ],
)
def test_layers_that_are_gathered_at_once_change_nothing(levers: str, name: str, lora: bool) -> None:
    """DeepSpeed reduces a layer's gradients when that of its input is there. Below the first adapter it has none of its
    own."""
    check_training(name, 2, 3, lora, *LEAVES[levers])


@pytest.mark.check
def test_experts_in_layers_that_are_gathered_at_once() -> None:
    check_training("2x2", 2, 3, False, LEAF, config=make_sinks_config())


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.check)])
def test_tiles_change_nothing_where_the_first_mlp_reads_a_frozen_input(stage: int) -> None:
    """Beside attention, the MLP of the first layer reads the embedding, normed. With adapters neither is trained."""
    check_training("2x1", 2, stage, True, *TILED, config={**CONFIG, "model_type": "cohere"})


@pytest.mark.parametrize(("name", "accumulation", "stage", "lora"), list_cases())
def test_training_equals_plain_torch(name: str, accumulation: int, stage: int, lora: bool) -> None:
    check_training(name, accumulation, stage, lora)


HEADS_14 = {**CONFIG, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 4}


def set_heads(num_heads: int, num_kv_heads: int, head_dim: int = 8) -> dict[str, Any]:
    return {**CONFIG, "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}


def make_sinks_config() -> dict[str, Any]:
    """A family with sinks, windows and experts."""
    return describe_family("gpt_oss", **OWN_VALUES["gpt_oss"], num_hidden_layers=2)


class RingCase(NamedTuple):
    """Training on a ring. Where no word sets it, the ring is the one that the heads need. 4 ranks share 14 heads as
    2 x 2, 7 or 9 heads as 4 x 1."""

    layout: str
    config: dict[str, Any] = CONFIG
    words: tuple[str, ...] = ()
    stage: int = 3
    lora: bool = False


TWO, ROOM_FOR_SIX = "parallel.ring_size=2", "data.max_length=72"
RINGS = {
    "4 ranks, ring 2": RingCase("4x1", words=(TWO,)),
    "14 heads": RingCase("4x1", HEADS_14),
    "9 heads on 4": RingCase("4x1", set_heads(9, 3), lora=True),
    "two rows, all levers": RingCase("2x2", words=(*LEVERS["all"], TWO)),
    "recomputed in full": RingCase("2x1", words=(*LEVERS["full"], TWO), lora=True),
    "28 heads on 8": RingCase("8x1", set_heads(28, 4, 4)),
    "windows": RingCase(
        "4x1", {**CONFIG, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, (TWO,)
    ),
    "6 heads on 3 x 2": RingCase("6x1", set_heads(6, 2), ("parallel.ring_size=3", ROOM_FOR_SIX)),
    "7 heads": RingCase("4x1", set_heads(7, 1)),
    "7 heads on 2": RingCase("2x1", set_heads(7, 7)),
    "9 heads": RingCase("4x1", set_heads(9, 3)),
    "9 heads on 6": RingCase("6x1", set_heads(9, 3), (ROOM_FOR_SIX,)),
    "ZeRO 1": RingCase("4x1", words=(TWO,), stage=1),
    "ZeRO 2": RingCase("4x1", words=(TWO,), stage=2),
    "ZeRO 2, 14 heads, adapters": RingCase("4x1", HEADS_14, stage=2, lora=True),
    "two replicas": RingCase("2x1x2", words=(TWO,)),
    "two replicas, 14 heads": RingCase("4x1x2", HEADS_14),
    "two rows at a time": RingCase("2x1", words=(TWO, "train.per_device_train_batch_size=2")),
    "two rows at a time, 14 heads": RingCase("4x1", HEADS_14, ("train.per_device_train_batch_size=2",)),
    "sinks": RingCase("2x1", make_sinks_config(), (TWO,)),
    "sinks on 2 x 2": RingCase("4x1", make_sinks_config(), (TWO,)),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark_by(False, name == "14 heads")) for name in RINGS])
def test_training_on_a_ring_equals_plain_torch(name: str) -> None:
    case = RINGS[name]
    recipe = make_recipe(f"parallel.sp_size={case.layout.split('x')[0]}", *case.words, config=case.config)
    assert choose_layout(recipe, read_model_shape(case.config, "test")).ring_size > 1
    check_training(case.layout, 2, case.stage, case.lora, *case.words, config=case.config)


def check_training(
    name: str,
    accumulation: int,
    stage: int,
    lora: bool,
    *more: str,
    config: dict[str, Any] = CONFIG,
    tolerance: float = 1e-5,
    floor: float = 1e-12,
) -> None:
    """`name` is sp_size x dp_shard_size, and x dp_replicate_size where that is more than 1."""
    sp_size, shard_size, *replicate_sizes = map(int, name.split("x"))
    replicate_size = math.prod(replicate_sizes)
    overrides = [
        *more, f"parallel.sp_size={sp_size}", f"parallel.dp_shard_size={shard_size}",
        f"parallel.dp_replicate_size={replicate_size}", f"parallel.zero_stage={stage}",
        f"train.gradient_accumulation_steps={accumulation}", "train.lr_scheduler_type=linear",
        *(["lora.r=4"] if lora else []),
    ]  # fmt: skip
    recipe = make_recipe(*overrides, config=config)
    expected = make_reference(recipe)
    for rank, ours in enumerate(run_on_ranks(sp_size * shard_size * replicate_size, train_on_ranks, recipe)):
        assert ours.losses == pytest.approx(expected.losses, rel=1e-5), rank
        assert ours.norms == pytest.approx(expected.norms, rel=tolerance), rank
        pairs = zip(ours.grads, expected.grads, strict=True)
        assert max(measure_difference(*pair, floor) for pair in pairs) < tolerance, rank
        assert measure_difference(ours.weights, expected.weights) < tolerance, rank
