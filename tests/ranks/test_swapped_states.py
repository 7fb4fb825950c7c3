"""Tests optimizer states and weights on a disk: they have the bits of those in memory, through checkpoints, the
rehearsal and a run."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faults import Runs
from support.rank_pool import run_on_ranks
from support.run_harness import RunHarness
from support.training import CONFIG, MemoryRows, make_recipe

from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.run.checkpoints import find_damage
from ulysses_cli.run.resume import ResumePoint
from ulysses_cli.train.loop import train
from ulysses_cli.train.optimizer.states import KINDS, SwappedFlat, list_flats
from ulysses_cli.train.tensor_file import get_tensor

pytestmark = [pytest.mark.operator("async_io"), pytest.mark.operator("cpu_adam")]
ROWS = [[(40, 0), (20, 0)], [(64, 0)], [(5, 0), (9, 9), (3, 0), (20, 15)], [(50, 40)], [(30, 0), (30, 0)]]
# DeepSpeed leaves what is below 1 MiB in memory: files must have the size of an embedding and of several weights.
SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "vocab_size": 2560}
COMMON = (
    *("parallel.sp_size=2", "train.gradient_accumulation_steps=2", "deepspeed.zero_optimization.sub_group_size=400000"),
    *("train.adam_epsilon=1e-8", "train.adam_beta1=0.85", "train.adam_beta2=0.97"),
)
NUM_STEPS = 6


def is_able() -> bool:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible(verbose=False))


@pytest.fixture(scope="module", autouse=True)
def _operator() -> None:
    if not is_able():
        pytest.skip("DeepSpeed's async_io cannot be built here: libaio and its headers are missing")


def make(*overrides: str, disk: Path | None = None) -> Recipe:
    where = (f"memory.nvme_path={disk}", "memory.offload_optimizer=nvme") if disk else ("memory.offload_optimizer=cpu",)
    return make_recipe(*COMMON, *where, *overrides, config={**CONFIG, **SIZES})


def make_large(*overrides: str) -> Recipe:
    """Makes a model of which each weight's share has a file."""
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "head_dim": 512, "vocab_size": 1024}
    return make_recipe(*COMMON, *overrides, config={**CONFIG, **sizes})


def read_states(harness: RunHarness) -> list[torch.Tensor]:
    """Returns every flat tensor's weights and moments, and whether it is on the disk."""
    flats = list_flats(harness.built.engine.wrapped.optimizer)
    return [get_tensor(flat.read(kind, 0, flat.numel)).clone() for flat in flats for kind in KINDS]


def train_and_save(recipe: Recipe, folder: str, rehearses: bool = False) -> tuple[list[float], Any, int]:
    """Returns losses, states after half the steps, and how many flat tensors were on the disk."""
    harness = RunHarness(recipe, MemoryRows(ROWS), NUM_STEPS, folder)
    if rehearses:
        harness.rehearse(Path(folder) / "rehearsal")
    harness.train_state.num_steps = 3
    train(harness.train_state)
    harness.saves.save(harness.train_state)
    states = read_states(harness)
    harness.train_state.num_steps = NUM_STEPS
    train(harness.train_state)
    flats = list_flats(harness.built.engine.wrapped.optimizer)
    return harness.losses, states, sum(isinstance(flat, SwappedFlat) for flat in flats)


def resume(recipe: Recipe, folder: str, rehearses: bool = False) -> tuple[list[float], list[torch.Tensor]]:
    harness = RunHarness(recipe, MemoryRows(ROWS), NUM_STEPS, folder)
    if rehearses:
        harness.rehearse(Path(folder) / "rehearsal")
    harness.saves.resume(harness.train_state, ResumePoint(Path(folder) / "checkpoints" / "step-3", {}, is_own=True))
    states = read_states(harness)
    train(harness.train_state)
    return harness.losses, states


def check_same(ours: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(ours) == len(right)
    for own, reference in zip(ours, right, strict=True):
        assert torch.equal(own, reference)


@pytest.mark.parametrize("more", [(), pytest.param(("model.dtype=bfloat16",), marks=pytest.mark.full)])
def test_states_on_a_disk_change_no_bit(tmp_path: Path, more: tuple[str, ...]) -> None:
    on_host, on_disk, disk = tmp_path / "host", tmp_path / "disk", tmp_path / "swap"
    disk.mkdir()
    reference = run_on_ranks(2, train_and_save, make(*more), str(on_host))
    recipe = make(*more, disk=disk)
    results = run_on_ranks(2, train_and_save, recipe, str(on_disk), True)
    for (losses, states, num_swapped), (expected, expected_states, none) in zip(results, reference, strict=True):
        assert losses == expected
        check_same(states, expected_states)
        assert num_swapped >= 2
        assert num_swapped < len(states) / len(KINDS)  # the norms' are small and stay in memory
        assert none == 0
    assert sorted(path.name for path in (disk / "zero_stage_3" / "optimizer").iterdir()) == ["rank0", "rank1"]
    assert find_damage(on_disk / "checkpoints" / "step-3") == ""
    for rehearses in (False, True):
        for rank, (losses, states) in enumerate(run_on_ranks(2, resume, recipe, str(on_disk), rehearses)):
            assert losses == reference[rank][0][3:]
            check_same(states, reference[rank][1])
    for rank, (losses, _) in enumerate(run_on_ranks(2, resume, make(*more), str(on_disk))):
        assert losses == reference[rank][0][3:]


WEIGHTS = {
    "states too": ("memory.offload_optimizer=nvme", "model.dtype=bfloat16"),
    "states on the host": ("memory.offload_optimizer=cpu", "memory.gradient_checkpointing=full"),
    "tiles": ("memory.offload_optimizer=none", "memory.tiled_mlp=true", "memory.tiled_loss=true"),
    "adapters": ("memory.offload_optimizer=none", "lora.r=16"),
}


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.full) for name in WEIGHTS])
def test_weights_on_a_disk_change_no_bit(tmp_path: Path, case: str) -> None:
    """Checks a rehearsal with its evaluation, steps, a checkpoint, and a resumed run with weights on a disk or in
    memory."""
    words, memory, disk = WEIGHTS[case], tmp_path / "memory", tmp_path / "swap"
    disk.mkdir()
    states_there = "memory.offload_optimizer=nvme" in words
    plain = make_large(*words, *([f"memory.nvme_path={disk}"] if states_there else []), "memory.offload_param=none")
    reference = run_on_ranks(2, train_and_save, plain, str(memory))
    there = make_large(*words, f"memory.nvme_path={disk}", "memory.offload_param=nvme")
    results = run_on_ranks(2, train_and_save, there, str(tmp_path / "disk"), True)
    for (losses, states, _), (expected, expected_states, _) in zip(results, reference, strict=True):
        assert losses == expected
        check_same(states, expected_states)
    files = list(disk.glob("zero_stage_3/*params/rank0/*"))
    assert len(files) >= 2 * 7  # of each layer and rank
    for recipe, folder in ((there, memory), (plain, tmp_path / "disk")):
        for rank, (losses, states) in enumerate(run_on_ranks(2, resume, recipe, str(folder), recipe is there)):
            assert losses == reference[rank][0][3:]
            check_same(states, reference[rank][1])


@pytest.mark.full
def test_states_move_between_disk_and_device_and_layouts(tmp_path: Path) -> None:
    disk = tmp_path / "swap"
    disk.mkdir()
    expected = run_on_ranks(2, train_and_save, make(disk=disk), str(tmp_path))[0][0][3:]
    one = ("parallel.sp_size=1", "train.gradient_accumulation_steps=2")
    assert run_on_ranks(1, resume, make(*one, disk=disk), str(tmp_path))[0][0] == pytest.approx(expected, rel=1e-5)
    plain = make("memory.offload_optimizer=none")
    assert run_on_ranks(2, resume, plain, str(tmp_path))[0][0] == pytest.approx(expected, rel=1e-5)


def test_a_run_uses_its_own_folder_and_removes_it(tmp_path: Path) -> None:
    runs, disk = Runs(tmp_path), tmp_path / "fast"
    disk.mkdir()
    words = ["memory.offload_optimizer=nvme", f"memory.nvme_path={disk}", "train.max_steps=3"]
    words += ["model.config.vocab_size=8192", "model.config.hidden_size=128", "memory.offload_param=nvme"]
    code, output = runs.train("swapped", *words)
    assert code == 0, output
    assert os.listdir(disk) == []
    code, expected = runs.train("whole", *words[2:], "memory.offload_optimizer=cpu", "memory.offload_param=none")
    assert code == 0, expected
    assert runs.read_losses("swapped") == runs.read_losses("whole")
