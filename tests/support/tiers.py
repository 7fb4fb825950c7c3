"""Decides which tests run where: `make test` runs a case of each class, `make check` a wider sample, `make test-full`
all."""

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

QUICK, CHECK, FULL = 0, 1, 2
# Whole runs, the longest file first. A worker that takes one of them last works alone while the others are idle.
LONGEST_FIRST = (
    "test_preference_training.py", "test_real_model.py", "test_slurm.py", "test_resume_walk.py",
    "test_gpu_benchmark.py", "test_leaks.py", "test_quickstart.py", "test_kernels.py", "test_targets.py",
    "test_evaluate_command.py", "test_levers_on_ranks.py", "test_prepare.py", "test_estimate_command.py",
    "test_recipes.py", "test_levers.py", "test_lever_choice.py", "test_recurrent_models.py", "test_models.py",
    "test_exact_training.py", "test_search.py", "test_early_steps.py", "test_engines.py", "test_train_command.py",
    "test_verify.py", "test_merging.py", "test_generation.py",
    "test_traced_files.py", "test_sizes.py",
)  # fmt: skip
FOLDERS = ("ranks", "one_process", "unit", "gpu")
TIER = FULL if os.environ.get("ULYSSES_FULL") else CHECK if os.environ.get("ULYSSES_CHECK") else QUICK


def sample(values: Iterable[Any], quick: Collection[Any], checked: Collection[Any] | None = None) -> list[Any]:
    """Returns parameters of a test: those in `quick` for every run, those in `checked`, or all others, from
    `make check` on, and the rest for `make test-full` alone."""
    return [
        value
        if value in quick
        else _mark(value, pytest.mark.check if checked is None or value in checked else pytest.mark.full)
        for value in values
    ]


def sample_every(step: int, values: Iterable[Any]) -> list[Any]:
    """Returns parameters of a test: each `step`-th value for every run, the others from `make check` on. Beyond four,
    every second of them waits for `make test-full`."""
    others = (pytest.mark.full, pytest.mark.check) if step > 4 else (pytest.mark.check, pytest.mark.check)
    return [_mark(value, others[index % 2]) if index % step else value for index, value in enumerate(values)]


def mark_by(is_quick: bool, is_checked: bool) -> Any:
    """Returns a parameter's `marks`."""
    return () if is_quick else pytest.mark.check if is_checked else pytest.mark.full


def get_turn(path: Path) -> tuple[int, int]:
    """Returns what files of tests are sorted by: those that take longest begin first."""
    is_long = path.name in LONGEST_FIRST
    return LONGEST_FIRST.index(path.name) if is_long else len(LONGEST_FIRST), FOLDERS.index(path.parent.name)


def _mark(value: Any, mark: Any) -> Any:
    return pytest.param(*value, marks=mark) if isinstance(value, tuple) else pytest.param(value, marks=mark)


def count_examples(number: int) -> int:
    """Returns how many examples hypothesis draws: fewer in the quicker runs."""
    return max(5, number // (1, 4, 8)[FULL - TIER])


NUM_RANKS = sample([2, 4], quick=[2])
