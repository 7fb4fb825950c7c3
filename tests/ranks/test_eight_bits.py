"""Tests AdamW with 8-bit moments on ranks: bitsandbytes' own steps, any ZeRO stage, checkpoints, the rehearsal."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_pool import run_on_ranks
from support.run_harness import RunHarness
from support.training import MemoryRows, make_recipe

from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.run.checkpoints import find_damage
from ulysses_cli.run.resume import ResumePoint
from ulysses_cli.train.checkpoint.saves import SavePolicy
from ulysses_cli.train.loop import train
from ulysses_cli.train.optimizer.states import MOMENTS, list_flats
from ulysses_cli.train.tensor_file import get_tensor

ROWS = [[(40, 0), (20, 0)], [(64, 0)], [(5, 0), (9, 9), (3, 0), (20, 15)], [(50, 40)], [(30, 0), (30, 0)]]
COMMON = ("parallel.sp_size=2", "train.learning_rate=0.01", "train.lr_scheduler_type=constant")
CODED = (*COMMON, "train.optim=adamw_8bit")
NUM_STEPS = 6


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


def train_without_reference(recipe: Recipe) -> list[float]:
    harness = RunHarness(recipe, MemoryRows(ROWS), NUM_STEPS)
    train(harness.train_state)
    return harness.losses


@pytest.mark.full
@pytest.mark.parametrize("stage", [3, 2, 1])
@pytest.mark.parametrize("lora", [(), ("lora.r=4",)])
def test_steps_equal_bitsandbytes_and_losses_follow_adamw(stage: int, lora: tuple[str, ...]) -> None:
    where = (f"parallel.zero_stage={stage}", *lora)
    losses, compared = run_on_ranks(2, step_beside_bitsandbytes, make_recipe(*CODED, *where))[0]
    expected = run_on_ranks(2, train_without_reference, make_recipe(*COMMON, *where))[0]
    assert compared >= NUM_STEPS
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(expected, rel=0.005)
    assert losses != expected


def read_states(harness: RunHarness) -> list[torch.Tensor]:
    """Returns all that the optimizer holds: weights, codes, scales and step counts."""
    optimizer = harness.built.engine.wrapped.optimizer
    results = []
    for flat in list_flats(optimizer):
        state = optimizer.optimizer.state[flat.master]  # type: ignore[attr-defined]
        results += [flat.master.data.clone(), torch.tensor(state["step"])]  # type: ignore[attr-defined]
        results += [state[f"{moment}_{part}"].clone() for moment in MOMENTS for part in ("codes", "scales")]
    return results


def save_and_train(recipe: Recipe, folder: str, policy: SavePolicy) -> tuple[list[float], list[torch.Tensor]]:
    harness = RunHarness(recipe, MemoryRows(ROWS), NUM_STEPS, folder, policy=policy)
    harness.train_state.num_steps = 3
    train(harness.train_state)
    states = read_states(harness)
    harness.saves.save(harness.train_state)
    harness.train_state.num_steps = NUM_STEPS
    train(harness.train_state)
    harness.saves.wait_for_pending()
    return harness.losses[3:], states


def resume(recipe: Recipe, folder: str, is_coded: bool = True) -> tuple[list[float], list[torch.Tensor]]:
    harness = RunHarness(recipe, MemoryRows(ROWS), NUM_STEPS, folder)
    harness.saves.resume(harness.train_state, ResumePoint(Path(folder) / "checkpoints" / "step-3", {}, is_own=True))
    states = read_states(harness) if is_coded else []
    train(harness.train_state)
    return harness.losses, states


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
    before = run_on_ranks(2, save_and_train, recipe, str(tmp_path), SavePolicy(is_async=is_async))
    assert find_damage(tmp_path / "checkpoints" / "step-3") == ""
    after = run_on_ranks(2, resume, recipe, str(tmp_path))
    for (losses, states), (expected, expected_states) in zip(after, before, strict=True):
        assert losses == expected
        assert len(states) == len(expected_states)
        assert all(torch.equal(ours, reference) for ours, reference in zip(states, expected_states, strict=True))


@pytest.mark.full
def test_a_checkpoint_resumes_at_another_layout_and_with_float32_moments(tmp_path: Path) -> None:
    recipe = make_recipe(*CODED, "train.gradient_accumulation_steps=2")
    expected = run_on_ranks(2, save_and_train, recipe, str(tmp_path), SavePolicy())[0][0]
    others = {
        1: ("parallel.sp_size=1", "train.gradient_accumulation_steps=2", "parallel.zero_stage=1"),
        4: ("parallel.dp_shard_size=2",),
    }
    for num_ranks, overrides in others.items():
        for losses, _ in run_on_ranks(num_ranks, resume, make_recipe(*CODED, *overrides), str(tmp_path)):
            assert losses == pytest.approx(expected, rel=0.002), overrides
    plain = make_recipe(*COMMON, "train.gradient_accumulation_steps=2")
    for losses, _ in run_on_ranks(2, resume, plain, str(tmp_path), False):
        assert losses == pytest.approx(expected, rel=0.002)


def rehearse_and_train(recipe: Recipe, folder: str, rehearses: bool) -> tuple[list[float], bool]:
    """Returns the losses, and whether all moments were zero before the first step."""
    harness = RunHarness(recipe, MemoryRows(ROWS), NUM_STEPS, folder)
    is_clean = True
    if rehearses:
        harness.rehearse(Path(folder) / "rehearsal")
        flats = list_flats(harness.built.engine.wrapped.optimizer)
        moments = [get_tensor(flat.read(moment, 0, flat.numel)) for flat in flats for moment in MOMENTS]
        is_clean = not any(bool(moment.any()) for moment in moments)
    train(harness.train_state)
    return harness.losses, is_clean


@pytest.mark.full
@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.full)])
def test_a_rehearsal_leaves_no_trace(tmp_path: Path, stage: int) -> None:
    recipe = make_recipe(*CODED, f"parallel.zero_stage={stage}", "lora.r=4", "lora.dropout=0.1")
    without = run_on_ranks(2, rehearse_and_train, recipe, str(tmp_path), False)
    with_it = run_on_ranks(2, rehearse_and_train, recipe, str(tmp_path), True)
    assert with_it == without
    assert all(is_clean for _, is_clean in with_it)
