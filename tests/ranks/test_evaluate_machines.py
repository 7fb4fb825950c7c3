"""`ulysses evaluate` on two machines, as network namespaces with disks of their own: the same answers as on one, a
mistake, a machine that is lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.commands import COLOURLESS
from support.paths import ROOT
from support.training import save_bytes_model

MEETING = ("--nnodes", "2", "--master-addr", "10.231.7.1", "--master-port", "29431")
WORDS = ("--tokenizer", "bytes", "--dtype", "float32", "--device", "cpu", "--sp-size", "2", "--output", "found")
QUESTIONS = ("--suite", "niah_single_1,vt,loss", "--samples", "2", "--max-length", "2Ki", "--path", "papers.txt")
TIME_LIMIT = 240


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    """Both machines have the model; the documents are on number 0 alone."""
    folders = [tmp_path / f"disk-{number}" for number in range(2)]
    save_bytes_model(folders[0] / "model", max_position_embeddings=4096)
    shutil.copytree(folders[0] / "model", folders[1] / "model")
    (folders[0] / "papers.txt").write_text("A paper says what it found, and how. " * 80)
    return folders


def start(disk: Path, *words: str, network: str = "") -> subprocess.Popen[str]:
    """Starts the command in a session of its own, on a machine of the network or on this one."""
    inside = ["ip", "netns", "exec", network] if network else []
    command = [*inside, sys.executable, "-m", "ulysses_cli", "evaluate", "model", *WORDS, *words]
    environ = {**os.environ, **COLOURLESS, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ULYSSES_RUN_KEY": "k" * 40}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=disk, env=environ, text=True, start_new_session=True, **pipes)


def start_both(disks: list[Path], lan: list[str], *words: str) -> list[subprocess.Popen[str]]:
    return [
        start(disk, *QUESTIONS, *MEETING, "--node-rank", str(number), *words, network=name)
        for number, (disk, name) in enumerate(zip(disks, lan, strict=True))
    ]


def wait_for(commands: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    ended = [(command, *command.communicate(timeout=TIME_LIMIT)) for command in commands]
    return [(command.returncode, out, err) for command, out, err in ended]


def read_answers(disk: Path) -> list[dict[str, Any]]:
    results = json.loads((disk / "found" / "quality.json").read_text())["results"]
    return [{key: value for key, value in each.items() if key not in ("seconds", "spent")} for each in results]


@pytest.mark.full
def test_two_machines_answer_as_one_does(tmp_path: Path, disks: list[Path], lan: list[str]) -> None:
    """Started again, they have nothing left to ask."""
    whole = tmp_path / "whole"
    shutil.copytree(disks[0], whole)
    ((code, _, err),) = wait_for([start(whole, *QUESTIONS)])
    assert code == 0, err
    first, second = wait_for(start_both(disks, lan))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert read_answers(disks[0]) == read_answers(whole)
    assert len(read_answers(whole)) == 5, "a document, and two questions of each task"
    assert "machine number 1 is done" in second[2]
    assert not (disks[1] / "found" / "quality.json").exists()
    assert "2; this is number 1, by options; they meet at 10.231.7.1:29431" in second[2]
    before = (disks[0] / "found" / "results.jsonl").read_bytes()
    first, second = wait_for(start_both(disks, lan))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "going on: 5 questions answered already" in first[2]
    assert (disks[0] / "found" / "results.jsonl").read_bytes() == before


@pytest.mark.full
def test_machines_with_other_models_are_refused(disks: list[Path], lan: list[str]) -> None:
    config = json.loads((disks[1] / "model" / "config.json").read_text())
    (disks[1] / "model" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    for code, _, err in wait_for(start_both(disks, lan)):
        assert code == 2, err
        assert "differ in the model's config.json" in err
        assert "Traceback" not in err


@pytest.mark.full
@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_that_is_lost_ends_the_other(disks: list[Path], lan: list[str], lost: int) -> None:
    """It is killed with all of its ranks while questions are asked; what was answered stays."""
    words = ("--samples", "500")
    commands = start_both(disks, lan, *words)
    results, end = disks[0] / "found" / "results.jsonl", time.monotonic() + TIME_LIMIT
    while not (results.exists() and len(results.read_text().splitlines()) > 2):
        assert time.monotonic() < end, "no question was answered"
        assert not any(command.poll() for command in commands), wait_for(commands)
        time.sleep(0.1)
    os.killpg(commands[lost].pid, signal.SIGKILL)
    began = time.monotonic()
    _, err = commands[1 - lost].communicate(timeout=TIME_LIMIT)
    assert commands[1 - lost].returncode == 1, err
    assert time.monotonic() - began < 120
    assert "Traceback" not in err
    commands[lost].communicate(timeout=TIME_LIMIT)


@pytest.mark.full
def test_a_dry_run_says_which_machine_this_is(disks: list[Path]) -> None:
    """Machines do not meet for it."""
    ((code, out, err),) = wait_for([start(disks[1], "--suite", "vt", *MEETING, "--node-rank", "1", "--dry-run")])
    assert code == 0, err
    assert "2; this is number 1, by options" in err
    assert json.loads(out) if out.startswith("{") else out
