"""Tests which rank is named when no rank moves on, whether a stack waits in a collective, and a signal to the agent."""

import json
import os
import signal
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
from support.served import ServedPopen
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.plan.problem import FAILED
from ulysses_cli.train import agent
from ulysses_cli.train.agent import LostMachine, RankSignals
from ulysses_cli.train.processes.store import open_file_store
from ulysses_cli.train.processes.watchdog import (
    RankStatus,
    SharedCount,
    Watchdog,
    ask_others,
    explain_hang,
    find_odd_rank,
    find_place,
    walk_frames,
)

WAITS = RankStatus(0, 7, "update", "ulysses_cli/train/engine.py:50", is_waiting=True)
HANGS = RankStatus(1, 7, "micro-step 1 of 2", "ulysses_cli/data/store.py:9", is_waiting=False)


def test_the_rank_outside_the_collective_is_named(snapshot: SnapshotAssertion) -> None:
    first, second = (
        explain_hang(seen, own, 2, 60.0) for seen, own in (([WAITS, HANGS], WAITS), ([HANGS, WAITS], HANGS))
    )
    assert first == second == snapshot
    assert explain_hang([WAITS, HANGS], WAITS, 3, 60.0)["message"] == snapshot(name="one is silent")
    assert explain_hang([WAITS], WAITS, 1, 60.0)["message"] == snapshot(name="all wait")


def test_a_rank_in_another_collective_is_named(snapshot: SnapshotAssertion) -> None:
    """All stacks end in a collective, one of them in one that the other ranks never enter."""
    others = [replace(WAITS, rank=rank) for rank in (0, 1, 3)]
    alone = replace(WAITS, rank=2, phase="evaluation", place="ulysses_cli/train/evaluation.py:54")
    assert explain_hang([*others, alone], others[0], 4, 60.0)["message"] == snapshot
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
    hook = tmp_path / "ulysses_cli" / "train" / "attention" / "ulysses.py"
    (busy,) = islice(inner := stop_at("go = tensor.item\ngo()\n", hook), 1)
    assert find_place(main, [busy]) == ("ulysses_cli/train/attention/ulysses.py:2", False)
    for thread in (reader, outer, inner):
        next(thread, None)
    assert find_place(None) == ("", False)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_moved_bytes_count_once_every_rank_gives_a_sign(tmp_path: Path, kind: str) -> None:
    """Rank 1 writes in every round. What rank 0 knows stands still while rank 2 is silent, and when nobody writes."""
    store = dist.HashStore() if kind == "memory" else open_file_store(str(tmp_path / "words"))
    counts = [SharedCount(3, "test/") for _ in range(3)]

    def exchange(moved: dict[int, int]) -> list[int]:
        for rank, num_bytes in moved.items():
            counts[rank].exchange(store, num_bytes)
        return [count.total for count in counts]

    looks = [exchange({0: 0, 1: num_bytes, 2: 0}) for num_bytes in (100, 200, 300, 400)]
    assert all(after > before for before, after in zip(looks[1], looks[3], strict=True)), looks
    exchange({0: 0, 1: 500})
    still = exchange({0: 0, 1: 600})
    for num_bytes in (700, 800, 900):
        assert exchange({0: 0, 1: num_bytes}) == still, "rank 2 is lost"
    for _ in range(3):
        back = exchange({2: 7, 0: 0, 1: 1000})
    assert back == [1007] * 3
    for _ in range(3):
        assert exchange({2: 7, 0: 0, 1: 1000}) == back, "all live, and nothing moves"


@pytest.mark.check
@pytest.mark.parametrize(
    ("phase", "moves"),
    [
        ("update", "train_state.step = at"),
        pytest.param("saving", "MOVED.add(1)", marks=pytest.mark.full),
        pytest.param("writing the model", "None  # a library works", marks=pytest.mark.full),
    ],
)
def test_a_process_that_hangs_ends_itself(tmp_path: Path, phase: str, moves: str) -> None:
    """It takes longer than the limit altogether, but moves on. Then it hangs in a save, which has no longer limit."""
    (tmp_path / "logs").mkdir()
    code = f"""
        import time, types
        from pathlib import Path
        from ulysses_cli.train.processes.watchdog import MOVED
        from ulysses_cli.train.processes.watchdog import Watchdog
        train_state = types.SimpleNamespace(step=0, phase={phase!r})
        Watchdog(train_state, 1.0, 0, 1, Path({str(tmp_path)!r}))
        for at in range(8):
            {moves}
            time.sleep(0.3)
        train_state.phase = "saving"
        print("all moved", flush=True)
        time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"all moved\n"
        began = time.monotonic()
        assert process.wait(60) == 1
    assert time.monotonic() - began < 9, "ten time-outs are over after 10 s"
    step = 8 if phase == "update" else 1
    record = json.loads((tmp_path / "logs" / "rank-0.error.json").read_text())
    assert record["phase"].startswith(f"step {step}, ")


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


RANK = """
    import signal, sys, time
    from pathlib import Path
    folder = Path(sys.argv[1])
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    (folder / "started").touch()
    while not stopped:
        time.sleep(0.02)
    time.sleep(float(sys.argv[2]))  # a save
    (folder / "saved").touch()
"""


@pytest.mark.check
def test_a_save_may_take_longer_than_the_agents_grace_period(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK))
    command = [sys.executable, "-m", "ulysses_cli.train.agent", "--nnodes=1", "--nproc-per-node=1", "--max-restarts=0"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost", "--rdzv-id=test"]
    command += [str(tmp_path / "rank.py"), str(tmp_path), "4"]
    environ = {**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1", "ULYSSES_FAILURE_FILE": str(tmp_path / "failure")}
    process = ServedPopen(command, env=environ)
    end = time.monotonic() + 120
    while not (tmp_path / "started").exists():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert (tmp_path / "saved").exists()
    assert not (tmp_path / "failure").exists()


@pytest.mark.check
def test_the_agents_own_messages_are_masked(tmp_path: Path) -> None:
    secret, failure = "hf_QwErTyUiOpAsDfGhJkLzXcVb", tmp_path / "failure.json"
    command = [sys.executable, "-m", "ulysses_cli.train.agent", f"--no-such-option={secret}", "-m", "nothing"]
    environ = {**os.environ, "ULYSSES_FAILURE_FILE": str(failure)}
    process = ServedPopen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "***" in error
    assert secret not in error + failure.read_text()
    assert json.loads(failure.read_text())[0]["exit_code_wanted"] == 2


def test_an_agent_asks_which_machine_is_lost_and_ends_its_ranks(tmp_path: Path) -> None:
    """A rank that has ended and was not waited for does not count as running."""
    codes: list[int] = []
    signals = RankSignals(agent.list_children())
    signals.end = codes.append  # type: ignore[method-assign, assignment]
    asked, answers, failure = list[bool](), {True: "", False: ""}, tmp_path / "failure.json"

    def find_lost(has_ranks: bool) -> str:
        asked.append(has_ranks)
        return answers[has_ranks]

    lost = LostMachine(signals, find_lost, failure)
    rank = subprocess.Popen(["sleep", "600"])
    try:
        answers[False] = "the machine with number 0 has not answered for 41 s"
        lost.check()
        assert (asked, codes) == ([True], [])
        rank.kill()
        while agent.is_running(rank.pid):
            time.sleep(0.001)
        lost.check()
        assert (asked, codes) == ([True, False], [FAILED])
        (record,) = json.loads(failure.read_text())
        assert record["message"] == answers[False]
        assert record["is_cause"]
    finally:
        rank.kill()
        rank.wait()
