"""Tests what layers save on a disk: the bits are those of host memory, no file outlives a run, a full disk is named.
And layers that run in pieces of a row, on ranks."""

import errno
import importlib
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.faults import Runs
from support.rank_pool import run_on_ranks
from support.refusals import explain
from support.run_harness import ROWS, RunHarness
from support.tiers import mark_by
from support.training import MemoryRows, make_recipe
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.plan.recipe.recipe import Recipe
from ulysses_cli.train.loop import train
from ulysses_cli.train.memory.offload import DiskFile, OffloadDiskError

COMMON = ("parallel.sp_size=2", "train.gradient_accumulation_steps=2", "memory.activation_offloading=1")
CASES = {
    "kept results": ("memory.gradient_checkpointing=true",),
    "inputs alone": ("memory.gradient_checkpointing=full", "memory.tiled_mlp=true", "memory.tiled_loss=true"),
    "bfloat16": ("memory.gradient_checkpointing=true", "model.dtype=bfloat16"),
}


def run_steps(recipe: Recipe, folder: str) -> tuple[list[float], dict[str, torch.Tensor], int, list[str]]:
    """Returns losses, weights, the bytes written to a disk, and what stands in its folder during the run."""
    written = []
    write = DiskFile.write

    def count(self: DiskFile, buffer: memoryview, offset: int) -> None:
        written.append(len(buffer))
        write(self, buffer, offset)

    with mock.patch.object(DiskFile, "write", count):
        harness = RunHarness(recipe, MemoryRows(ROWS), 3, folder)
        harness.rehearse(Path(folder) / "rehearsal")
        train(harness.train_state)
    swap = recipe.memory.nvme_path
    return harness.losses, harness.read_weights(), sum(written), os.listdir(swap) if swap else []


@pytest.mark.parametrize("case", [pytest.param(name, marks=mark_by(False, name == "inputs alone")) for name in CASES])
def test_what_waits_on_a_disk_changes_no_bit(tmp_path: Path, case: str) -> None:
    disk = tmp_path / "swap"
    disk.mkdir()
    words = (*COMMON, *CASES[case], "memory.offload_optimizer=none")
    on_host = run_on_ranks(2, run_steps, make_recipe(*words), str(tmp_path / "host"))
    there = make_recipe(*words, f"memory.nvme_path={disk}", "memory.activation_offload_device=nvme")
    on_disk = run_on_ranks(2, run_steps, there, str(tmp_path / "disk"))
    for (losses, weights, written, names), (expected, right, none, _) in zip(on_disk, on_host, strict=True):
        assert losses == expected
        assert weights.keys() == right.keys()
        assert all(torch.equal(weights[name], right[name]) for name in right)
        assert none == 0
        assert written > 0
        assert names == [], "the files have no names"


def fill_disk(recipe: Recipe, folder: str) -> str:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    harness = RunHarness(recipe, MemoryRows(ROWS), 3, folder)
    with mock.patch.object(os, "posix_fallocate", refuse):
        return explain(train, harness.train_state, error=OffloadDiskError)


@pytest.mark.check
def test_a_full_disk_ends_a_run_with_the_setting_to_change(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    there = (f"memory.nvme_path={tmp_path}", "memory.activation_offload_device=nvme")
    assert run_on_ranks(2, fill_disk, make_recipe(*COMMON, *there), str(tmp_path / "run")) == snapshot


@pytest.mark.full
def test_no_ending_leaves_what_layers_saved(tmp_path: Path) -> None:
    """Neither a kill of all ranks nor the end of the resumed run; what the kill has left is a folder's name."""
    runs, disk = Runs(tmp_path), tmp_path / "fast"
    disk.mkdir()
    words = ["memory.activation_offloading=1", "memory.activation_offload_device=nvme", f"memory.nvme_path={disk}"]
    plan = {"phase": "micro-step 2", "step": 3, "who": "all", "signal": signal.SIGKILL}
    assert runs.start("swapped", *words, plan=plan).wait(120) == 1
    assert [path.name for path in [path for path in disk.rglob("*") if path.is_file()]] in (["run.txt"], [])
    num_steps = runs.count_steps("swapped") + 2
    runs.finish("swapped", *words, f"train.max_steps={num_steps}", "--resume", "auto")
    assert os.listdir(disk) == []


def run_in_small_pieces(recipe: Recipe, folder: str, limit_bytes: int) -> tuple[list[float], dict[str, Any], int]:
    indexing = importlib.import_module("ulysses_cli.plan.rows.indexing")
    pieces = importlib.import_module("ulysses_cli.train.memory.tiled_mlp")
    counted = []

    def count(num_rows: int, num_bytes: int, *operators: str) -> list[slice]:
        parts: list[slice] = indexing.split_rows(num_rows, num_bytes, *operators)
        counted.append(len(parts))
        return parts

    sizes = {"WRAP_BYTES": limit_bytes, "PIECE_BYTES": limit_bytes}
    with mock.patch.multiple(indexing, **sizes), mock.patch.object(pieces, "split_rows", count):
        harness = RunHarness(recipe, MemoryRows(ROWS), 3, folder)
        train(harness.train_state)
    return harness.losses, harness.read_weights(), max(counted, default=1)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), marks=pytest.mark.full),
        pytest.param(("lora.r=8",), marks=pytest.mark.full),
        pytest.param(("memory.tiled_mlp=true", "memory.gradient_checkpointing=full"), marks=pytest.mark.check),
    ],
)
def test_layers_in_pieces_train_as_whole_ones(tmp_path: Path, more: tuple[str, ...]) -> None:
    recipe = make_recipe("parallel.sp_size=2", "train.gradient_accumulation_steps=2", *more)
    whole = run_on_ranks(2, run_in_small_pieces, recipe, str(tmp_path), 1 << 32)
    parts = run_on_ranks(2, run_in_small_pieces, recipe, str(tmp_path), 1 << 10)
    for (losses, weights, most), (expected, right, one) in zip(parts, whole, strict=True):
        assert (one, most > 2) == (1, True)
        assert losses == pytest.approx(expected, rel=1e-5)
        for name, weight in right.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-6)
