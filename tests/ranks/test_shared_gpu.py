"""Tests on CPU ranks what tests/gpu/test_gpu_training.py does on a GPU, so that none of it fails there for a silly
reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.paths import ROOT

sys.path.append(str(ROOT / "tests" / "gpu"))
from test_gpu_training import CASES, compare_with_one_rank


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.check if case == "sp 2, levers" else pytest.mark.full) for case in CASES],
)
def test_ranks_train_as_one(case: str, tmp_path: Path) -> None:
    compare_with_one_rank(tmp_path, "cpu", case)
