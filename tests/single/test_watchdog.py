"""Which rank is named when nothing moves, and whether a stack waits in a collective."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from ulysses_cli.train.watchdog import Sighting, Watchdog, ask_others, explain_hang

ROOT = Path(__file__).parents[2]
WAITS = Sighting(0, 7, "update", "ulysses_cli/train/engine.py:50", is_waiting=True)
HANGS = Sighting(1, 7, "micro-step 1 of 2", "ulysses_cli/data/rows.py:9", is_waiting=False)


def test_the_rank_that_others_wait_for_is_named() -> None:
    for seen, own in (([WAITS, HANGS], WAITS), ([HANGS, WAITS], HANGS)):
        told = explain_hang(seen, own, 2, 60.0)
        assert told["rank"] == 1
        assert told["phase"] == "step 7, micro-step 1 of 2"
        assert told["message"] == (
            "step 7 takes longer than run.step_timeout (60 s): rank 1 hangs in micro-step 1 of 2 "
            "at ulysses_cli/data/rows.py:9"
        )
    assert "rank 2 does not answer, the others wait for it in update" in str(
        explain_hang([WAITS, HANGS], WAITS, 3, 60.0)["message"]
    )
    assert "all ranks wait for each other in update" in str(explain_hang([WAITS], WAITS, 1, 60.0)["message"])


def test_a_process_that_stands_still_ends_itself(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    code = f"""
        import time, types
        from pathlib import Path
        from ulysses_cli.train.watchdog import Watchdog
        course = types.SimpleNamespace(step=0, phase="update")
        Watchdog(course, 1.0, 0, 1, Path({str(tmp_path)!r}))
        for step in range(8):  # longer than the limit altogether, but each step moves
            course.step = step
            time.sleep(0.3)
        time.sleep(60)
    """
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, timeout=120)
    assert done.returncode == 1
    assert time.monotonic() - started < 50
    assert "step 8 takes longer than run.step_timeout (1 s)" in (tmp_path / "logs" / "rank-0.error.json").read_text()


def test_a_rank_whose_own_time_is_not_up_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits in a save, which may take long, for a rank that hangs in a step, which may not."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    patient = Watchdog(SimpleNamespace(step=7, phase="saving"), 60.0, 0, 2, tmp_path)
    try:
        seen = ask_others(store, HANGS, 2)
    finally:
        patient.stop()
    assert [(one.rank, one.step, one.phase) for one in seen] == [(1, 7, "micro-step 1 of 2"), (0, 8, "saving")]
