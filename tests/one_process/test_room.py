"""Tests the disk space that a run needs at most, counted before it starts."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from ulysses_cli.train.checkpoint.saves import compute_needed_bytes, find_shortage

GIB = 2**30


def count(keep: int | None, num_saves: int, num_existing: int = 0) -> int:
    return compute_needed_bytes(10**9, 2 * 10**9, keep, num_saves, num_existing)


def test_the_largest_need_is_counted() -> None:
    one, model = int(12e9 * 1.01), 2 * 10**9
    assert count(2, 10) == 3 * one  # a third checkpoint is written before the oldest is deleted
    assert count(2, 1) == one + model  # the model is written beside the last checkpoint
    assert count(None, 5) == 5 * one + model
    assert count(2, 10, num_existing=2) == one  # a resumed run's checkpoints are there already
    assert count(1, 10) == 2 * one


@pytest.mark.parametrize(("free", "is_short"), [(40 * GIB, False), (30 * GIB, True)])
def test_a_disk_that_will_be_full_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, is_short: bool
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    output = find_shortage(tmp_path / "run", 10**9, 2 * 10**9, 2, 10)
    assert bool(output) is is_short
    if is_short:
        assert "has 30.0 GiB free, checkpoints of 11.2 GiB each and the model will take 33.9 GiB" in output
        assert "lower run.save_total_limit" in output
