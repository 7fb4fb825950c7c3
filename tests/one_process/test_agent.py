"""Tests a signal to the agent: its ranks save and end by themselves, however long that takes."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from support.served import ServedPopen

from ulysses_cli.plan.problem import FAILED
from ulysses_cli.train import agent
from ulysses_cli.train.agent import LostMachine, RankSignals

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


def test_an_agent_asks_which_machine_is_lost_and_ends_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that has ended and was not waited for does not count as running."""
    codes: list[int] = []
    signals = RankSignals(agent.list_children())
    monkeypatch.setattr(signals, "end", codes.append)
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
