"""Tests verify, bench and doctor as commands: mistakes, failures inside them, and interruptions."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.commands import succeed
from support.paths import RECIPES, ROOT, TINY_RECIPE
from syrupy.assertion import SnapshotAssertion
from typer.testing import CliRunner

from ulysses_cli.cli import app
from ulysses_cli.prove.__main__ import FAILED, prove

RECIPE = str(TINY_RECIPE)
COMMANDS = ("verify", "bench", "doctor")
TIME_LIMIT = 180
NUM_STARTED = 5  # the command, its child, the server of ranks and its tracker, a rank


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistake_is_reported_at_once_as_text_and_json(command: str) -> None:
    """Other mistakes are in tests/unit/commands.txt."""
    runner, words = CliRunner(), [command, RECIPE, "parallel.ring_size=3"]
    result, asked = runner.invoke(app, words), runner.invoke(app, [*words, "--format", "json"])
    assert (result.exit_code, result.stdout, asked.exit_code) == (2, "", 2)
    (problem,) = json.loads(asked.stdout)["problems"]
    assert problem["key"] == "parallel.ring_size"
    assert f"{problem['message']}\n\nhint: {problem['hint']}" in result.stderr


def test_an_error_inside_is_reported_without_a_trace(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    task = {"command": "nothing", "plan": "", "config": {}, "options": {}, "device": "cuda"}
    findings, code = prove(task, lambda _: None, tmp_path / "log")
    assert code == FAILED
    assert findings["problems"][0] == snapshot
    assert "Traceback" in capfd.readouterr().err  # by then, stderr is the log


def find_marked(mark: str) -> list[int]:
    results = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                results.append(int(folder.name))
        except OSError:
            continue
    return results


@pytest.mark.full
@pytest.mark.parametrize(
    ("command", "number", "code"),
    [*((command, signal.SIGINT, 130) for command in COMMANDS), ("verify", signal.SIGTERM, 143),
     ("bench", signal.SIGKILL, -9)],
)  # fmt: skip
def test_an_interrupted_proof_leaves_no_process_and_no_file(
    command: str, number: int, code: int, tmp_path: Path
) -> None:
    mark = f"PROOF_MARK={tmp_path}"
    environ = {**os.environ, "PROOF_MARK": str(tmp_path), "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "ulysses_cli", command, RECIPE],
        env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )  # fmt: skip
    end = time.monotonic() + TIME_LIMIT
    while len(find_marked(mark)) < NUM_STARTED:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert "Traceback" not in err
    while find_marked(mark):
        assert time.monotonic() < end
        time.sleep(0.1)
    if number != signal.SIGKILL:
        assert not list(tmp_path.glob("ulysses-*"))


@pytest.mark.full
@pytest.mark.parametrize("recipe", sorted(path.name for path in (RECIPES).glob("*.yaml")))
def test_every_recipe_is_verified(recipe: str) -> None:
    result = verify_recipe(recipe)
    assert len({row["group"] for row in result["rows"]}) == (1 if "1gpu" in recipe or "24gb" in recipe else 2)
    assert result["seconds"] < TIME_LIMIT


@pytest.mark.full
@pytest.mark.parametrize(
    "model", ["google/gemma-2-9b", "google/gemma-3-4b-pt", "openai/gpt-oss-20b", "mistralai/Mixtral-8x7B-v0.1",
              "Qwen/Qwen3-30B-A3B", "mistralai/Mistral-7B-v0.1", "microsoft/Phi-3-mini-4k-instruct"],
)  # fmt: skip
def test_windows_softcaps_sinks_and_experts_are_verified(model: str) -> None:
    words = [f"model.name_or_path={model}", "data.max_length=4Ki", "parallel.sp_size=2"]
    assert {row["group"] for row in verify_recipe("llama-3.1-8b-128k-8gpu.yaml", *words)["rows"]} == {"sp 1", "sp 2"}


def verify_recipe(recipe: str, *words: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(succeed("verify", str(RECIPES / recipe), *words, "--format", "json").stdout)
    assert answer["passed"]
    assert {"loss", "gradients", "weights", "evaluation tokens"} <= {row["name"] for row in answer["rows"]}
    return answer
