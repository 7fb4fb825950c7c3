"""Tests optimizer states and weights on a disk: they have the bits of those in memory, through checkpoints, the
rehearsal and a run."""

import os
from pathlib import Path

import pytest
from support.faults import Runs
from support.rank_pool import run_on_ranks
from support.run_harness import ROWS, RunHarness, is_same, resume, train_and_save
from support.training import CONFIG, MemoryRows, make_recipe

from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.run.checkpoints import find_damage
from ulysses_cli.train.optimizer.states import SwappedFlat, list_flats

pytestmark = [pytest.mark.operator("async_io"), pytest.mark.operator("cpu_adam")]
# DeepSpeed leaves what is below 1 MiB in memory: files must have the size of an embedding and of several weights.
SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "vocab_size": 2560}
COMMON = (
    *("parallel.sp_size=2", "train.gradient_accumulation_steps=2", "deepspeed.zero_optimization.sub_group_size=400000"),
    *("train.adam_epsilon=1e-8", "train.adam_beta1=0.85", "train.adam_beta2=0.97"),
)
SAVED, NUM_STEPS = 3, 6


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


def list_given(folder: Path) -> tuple[MemoryRows, str, int, int]:
    return MemoryRows(ROWS), str(folder), SAVED, NUM_STEPS


def count_swapped(recipe: Recipe) -> tuple[int, int]:
    """Returns how many of the optimizer's flat tensors are on the disk, and how many there are."""
    flats = list_flats(RunHarness(recipe, MemoryRows(ROWS), 1).built.engine.wrapped.optimizer)
    return sum(isinstance(flat, SwappedFlat) for flat in flats), len(flats)


@pytest.mark.parametrize("more", [(), pytest.param(("model.dtype=bfloat16",), marks=pytest.mark.full)])
def test_states_on_a_disk_change_no_bit(tmp_path: Path, more: tuple[str, ...]) -> None:
    on_host, on_disk, disk = tmp_path / "host", tmp_path / "disk", tmp_path / "swap"
    disk.mkdir()
    recipe, plain = make(*more, disk=disk), make(*more)
    reference = run_on_ranks(2, train_and_save, plain, *list_given(on_host))
    assert all(map(is_same, run_on_ranks(2, train_and_save, recipe, *list_given(on_disk), True), reference))
    for num_swapped, num_flats in run_on_ranks(2, count_swapped, recipe):
        assert 2 <= num_swapped < num_flats, "the norms' are small and stay in memory"
    assert sorted(path.name for path in (disk / "zero_stage_3" / "optimizer").iterdir()) == ["rank0", "rank1"]
    assert find_damage(on_disk / "checkpoints" / "step-3") == ""
    for again, rehearses in ((recipe, False), (recipe, True), (plain, False)):
        assert all(map(is_same, run_on_ranks(2, resume, again, *list_given(on_disk), rehearses), reference))


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
    reference = run_on_ranks(2, train_and_save, plain, *list_given(memory))
    there = make_large(*words, f"memory.nvme_path={disk}", "memory.offload_param=nvme")
    results = run_on_ranks(2, train_and_save, there, *list_given(tmp_path / "disk"), True)
    assert all(map(is_same, results, reference))
    files = list(disk.glob("zero_stage_3/*params/rank0/*"))
    assert len(files) >= 2 * 7  # of each layer and rank
    for recipe, folder in ((there, memory), (plain, tmp_path / "disk")):
        assert all(map(is_same, run_on_ranks(2, resume, recipe, *list_given(folder), recipe is there), reference))


@pytest.mark.full
def test_states_move_between_disk_and_device_and_layouts(tmp_path: Path) -> None:
    disk = tmp_path / "swap"
    disk.mkdir()
    given = list_given(tmp_path)
    expected = run_on_ranks(2, train_and_save, make(disk=disk), *given)[0].losses
    one = make("parallel.sp_size=1", "train.gradient_accumulation_steps=2", disk=disk)
    for num_ranks, recipe in ((1, one), (2, make("memory.offload_optimizer=none"))):
        assert run_on_ranks(num_ranks, resume, recipe, *given)[0].losses == pytest.approx(expected, rel=1e-5)


def test_a_run_uses_its_own_folder_and_removes_it(tmp_path: Path) -> None:
    runs, disk = Runs(tmp_path), tmp_path / "fast"
    disk.mkdir()
    words = ["memory.offload_optimizer=nvme", f"memory.nvme_path={disk}", "train.max_steps=3"]
    words += ["model.config.vocab_size=8192", "model.config.hidden_size=128", "memory.offload_param=nvme"]
    runs.finish("swapped", *words)
    assert os.listdir(disk) == []
    runs.finish("whole", *words[2:], "memory.offload_optimizer=cpu", "memory.offload_param=none")
    assert runs.read_losses("swapped") == runs.read_losses("whole")
