"""Tests on CPU ranks what tests/gpu/test_gpu_training.py does on a GPU, so that none of it fails there for a silly
reason."""

import sys
import time
from pathlib import Path

import pytest
from support import shared_gpu
from support.paths import ROOT
from support.served import write_python
from support.shared_gpu import run_sharing_ranks

sys.path.append(str(ROOT / "tests" / "gpu"))
from test_gpu_training import CASES, compare_with_one_rank


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_ranks_train_as_one(case: str, tmp_path: Path) -> None:
    compare_with_one_rank(tmp_path, "cpu", case, str(write_python()))


def test_a_rank_that_fails_is_shown_and_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that prints more than a pipe holds, while another waits for it."""
    monkeypatch.setattr(shared_gpu, "AFTER_FAILURE", 0.5)
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, time\nprint('x' * 200_000)\n"
        "if os.environ['RANK'] == '1': raise SystemExit('no kernel here')\ntime.sleep(600)\n"
    )
    begun = time.monotonic()
    with pytest.raises(AssertionError, match=r"exit codes \[-9, 1\]") as caught:
        run_sharing_ranks(script, 2)
    assert "no kernel here" in str(caught.value)
    assert time.monotonic() - begun < 60
