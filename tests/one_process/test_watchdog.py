"""Tests which rank is named when no rank moves on, and whether a stack waits in a collective."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ulysses_cli.train.guard.watchdog import (
    WRITING,
    RankStatus,
    Watchdog,
    ask_others,
    compute_timeout_factor,
    explain_hang,
    find_odd_rank,
    find_place,
    walk_frames,
)

WAITS = RankStatus(0, 7, "update", "ulysses_cli/train/engine.py:50", is_waiting=True)
HANGS = RankStatus(1, 7, "micro-step 1 of 2", "ulysses_cli/data/rows.py:9", is_waiting=False)


def test_the_rank_outside_the_collective_is_named() -> None:
    for seen, own in (([WAITS, HANGS], WAITS), ([HANGS, WAITS], HANGS)):
        messages = explain_hang(seen, own, 2, 60.0)
        assert messages["rank"] == 1
        assert messages["phase"] == "step 7, micro-step 1 of 2"
        assert messages["message"] == (
            "step 7 takes longer than run.step_timeout (60 s): rank 1 hangs in micro-step 1 of 2 "
            "at ulysses_cli/data/rows.py:9"
        )
    assert "rank 2 does not answer, the others wait for it in update" in str(
        explain_hang([WAITS, HANGS], WAITS, 3, 60.0)["message"]
    )
    assert "all ranks wait for each other in update" in str(explain_hang([WAITS], WAITS, 1, 60.0)["message"])


def test_a_rank_in_another_collective_is_named() -> None:
    """All stacks end in a collective, one of them in one that the other ranks never enter."""
    others = [replace(WAITS, rank=rank) for rank in (0, 1, 3)]
    alone = replace(WAITS, rank=2, phase="evaluation", place="ulysses_cli/train/evaluation.py:54")
    message = str(explain_hang([*others, alone], others[0], 4, 60.0)["message"])
    assert message.endswith("rank 2 waits alone in evaluation at ulysses_cli/train/evaluation.py:54")
    assert find_odd_rank([WAITS, alone]) is None, "of two, neither is the odd one"
    assert find_odd_rank([*others, alone, replace(alone, rank=4, step=9)]) is None


def stop_at(code: str, file: Path) -> Iterator[FrameType]:
    """Returns the innermost frame of a thread that runs `code` as if it stood in `file`, and waits there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code)
    reached, done = threading.Event(), threading.Event()

    class Tensor:
        def item(self) -> None:
            reached.set()
            done.wait()

    names: dict[str, Any] = {"tensor": Tensor()}
    thread = threading.Thread(target=exec, args=(compile(code, str(file), "exec"), names))
    thread.start()
    reached.wait()
    frame = next(f for f in walk_frames(sys._current_frames()[thread.ident or 0]) if f.f_code.co_filename == str(file))
    yield frame
    done.set()
    thread.join()


def test_a_stack_that_reads_a_number_from_the_device_waits(tmp_path: Path) -> None:
    """On a GPU, ranks stand in such a line when their device is in a collective with a rank that hangs."""
    file = tmp_path / "ulysses_cli" / "train" / "loop.py"
    (reading,) = islice(reader := stop_at("x = 1\nvalue = tensor.item()\n", file), 1)
    assert find_place(reading) == ("ulysses_cli/train/loop.py:2", True)
    # In a backward the main thread waits in torch for the device's thread, whose hooks count.
    graph = tmp_path / "torch" / "autograd" / "graph.py"
    (main,) = islice(outer := stop_at("go = tensor.item\ngo()\n", graph), 1)
    assert find_place(main) == ("", True)
    assert find_place(main, [reading]) == ("ulysses_cli/train/loop.py:2", True)
    hook = tmp_path / "ulysses_cli" / "train" / "attention" / "exchange.py"
    (busy,) = islice(inner := stop_at("go = tensor.item\ngo()\n", hook), 1)
    assert find_place(main, [busy]) == ("ulysses_cli/train/attention/exchange.py:2", False)
    for thread in (reader, outer, inner):
        next(thread, None)
    assert find_place(None) == ("", False)


def test_only_the_rank_that_writes_the_model_is_watched_meanwhile() -> None:
    assert compute_timeout_factor(WRITING, 0) == compute_timeout_factor("saving", 3) == 10
    assert compute_timeout_factor(WRITING, 1) == float("inf")
    assert compute_timeout_factor("update", 0) == 1


@pytest.mark.check
def test_a_process_that_hangs_ends_itself(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    code = f"""
        import time, types
        from pathlib import Path
        from ulysses_cli.train.guard.watchdog import Watchdog
        train_state = types.SimpleNamespace(step=0, phase="update")
        Watchdog(train_state, 1.0, 0, 1, Path({str(tmp_path)!r}))
        for step in range(8):  # longer than the limit altogether, but each step moves
            train_state.step = step
            time.sleep(0.3)
        time.sleep(60)
    """
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, timeout=120)
    assert done.returncode == 1
    assert time.monotonic() - started < 50
    assert "step 8 takes longer than run.step_timeout (1 s)" in (tmp_path / "logs" / "rank-0.error.json").read_text()


def test_a_rank_within_its_own_time_limit_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
