"""Tests AdamW with 8-bit moments on ranks: bitsandbytes' own steps, any ZeRO stage, checkpoints, the rehearsal."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_pool import run_on_ranks
from support.run_harness import ROWS, RunHarness, is_same, resume, train_alone, train_and_save
from support.training import MemoryRows, make_recipe

from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.run.checkpoints import find_damage
from ulysses_cli.train.loop import train
from ulysses_cli.train.optimizer.states import MOMENTS

COMMON = ("parallel.sp_size=2", "train.learning_rate=0.01", "train.lr_scheduler_type=constant")
CODED = (*COMMON, "train.optim=adamw_8bit")
SAVED, NUM_STEPS = 3, 6


def step_beside_bitsandbytes(recipe: Recipe) -> tuple[list[float], int]:
    """Passes each step's gradients also to bitsandbytes' optimizer, on copies of the flat weights as they were at
    first."""
    from bitsandbytes.optim import AdamW8bit

    harness = RunHarness(recipe, MemoryRows(ROWS), NUM_STEPS)
    ours = harness.built.engine.wrapped.optimizer.optimizer
    reference: dict[int, tuple[Any, torch.nn.Parameter]] = {}
    real, compared = type(ours)._step, 0

    def step(optimizer: Any, weight: torch.Tensor, group: dict[str, Any]) -> None:
        nonlocal compared
        if id(weight) not in reference:
            copy = torch.nn.Parameter(weight.data.clone())
            numbers = {"lr": 0.0, "betas": group["betas"], "eps": group["eps"], "weight_decay": group["weight_decay"]}
            reference[id(weight)] = (AdamW8bit([copy], min_8bit_size=0, **numbers), copy)
        other, copy = reference[id(weight)]
        copy.grad = weight.grad.clone()
        other.param_groups[0]["lr"] = group["lr"]
        other.step()
        real(optimizer, weight, group)
        assert torch.equal(weight.data, copy.data)
        result, expected_states = optimizer.state[weight], other.state[copy]
        for moment, number in zip(MOMENTS, "12", strict=True):
            assert torch.equal(result[f"{moment}_codes"], expected_states[f"state{number}"])
            assert torch.equal(result[f"{moment}_scales"], expected_states[f"absmax{number}"])
        compared += 1

    ours._step = step.__get__(ours)
    train(harness.train_state)
    return harness.losses, compared


@pytest.mark.full
@pytest.mark.parametrize("stage", [3, 2, 1])
@pytest.mark.parametrize("lora", [(), ("lora.r=4",)])
def test_steps_equal_bitsandbytes_and_losses_follow_adamw(stage: int, lora: tuple[str, ...]) -> None:
    where = (f"parallel.zero_stage={stage}", *lora)
    losses, compared = run_on_ranks(2, step_beside_bitsandbytes, make_recipe(*CODED, *where))[0]
    expected = run_on_ranks(2, train_alone, make_recipe(*COMMON, *where), MemoryRows(ROWS), NUM_STEPS)[0]
    assert compared >= NUM_STEPS
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(expected, rel=0.005)
    assert losses != expected


@pytest.mark.check
@pytest.mark.parametrize(
    ("stage", "is_async", "lora"),
    [
        pytest.param(stage, is_async, lora, marks=() if telling else pytest.mark.full)
        for stage in (3, 2, 1)
        for is_async in (False, True)
        for lora in ((), ("lora.r=4", "lora.dropout=0.1"))
        for telling in [(stage, is_async, bool(lora)) in ((3, False, False), (2, True, True))]
    ],
)
def test_a_resumed_run_has_the_same_codes_and_losses(
    tmp_path: Path, stage: int, is_async: bool, lora: tuple[str, ...]
) -> None:
    recipe = make_recipe(*CODED, f"parallel.zero_stage={stage}", *lora)
    given = (MemoryRows(ROWS), str(tmp_path), SAVED, NUM_STEPS)
    before = run_on_ranks(2, train_and_save, recipe, *given, False, is_async)
    assert find_damage(tmp_path / "checkpoints" / f"step-{SAVED}") == ""
    assert all(map(is_same, run_on_ranks(2, resume, recipe, *given), before))


@pytest.mark.full
def test_a_checkpoint_resumes_at_another_layout_and_with_float32_moments(tmp_path: Path) -> None:
    recipe = make_recipe(*CODED, "train.gradient_accumulation_steps=2")
    given = (MemoryRows(ROWS), str(tmp_path), SAVED, NUM_STEPS)
    expected = run_on_ranks(2, train_and_save, recipe, *given)[0].losses
    others = {
        1: ("parallel.sp_size=1", "train.gradient_accumulation_steps=2", "parallel.zero_stage=1"),
        4: ("parallel.dp_shard_size=2",),
    }
    for num_ranks, overrides in others.items():
        for ours in run_on_ranks(num_ranks, resume, make_recipe(*CODED, *overrides), *given):
            assert ours.losses == pytest.approx(expected, rel=0.002), overrides
    plain = make_recipe(*COMMON, "train.gradient_accumulation_steps=2")
    for ours in run_on_ranks(2, resume, plain, *given):
        assert ours.losses == pytest.approx(expected, rel=0.002)


@pytest.mark.full
@pytest.mark.parametrize("stage", [3, 1])
def test_a_rehearsal_leaves_no_trace(tmp_path: Path, stage: int) -> None:
    recipe = make_recipe(*CODED, f"parallel.zero_stage={stage}", "lora.r=4", "lora.dropout=0.1")
    without, with_it = (
        run_on_ranks(2, train_and_save, recipe, MemoryRows(ROWS), str(tmp_path / str(each)), SAVED, NUM_STEPS, each)
        for each in (False, True)
    )
    assert all(map(is_same, with_it, without))
