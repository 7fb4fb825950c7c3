"""Tests the first half hour on a GPU without one: its parts are rehearsed, results are kept part by part, a part that
fails or hangs stops no other, and a later call goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import gpu

SCRIPT = ROOT / "benchmarks" / "gpu.py"


def make_part(name: str, code: str, read: Any = gpu.read_text, seconds: float = 30.0) -> gpu.Part:
    return gpu.Part(name, lambda folder, rehearses: [[sys.executable, "-c", code]], read, seconds)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    machine: dict[str, Any] = {"gpus": ["NVIDIA H200"]}
    monkeypatch.setattr(gpu, "describe_machine", lambda: machine)

    def run(parts: list[gpu.Part], *words: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(gpu, "PARTS", parts)
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--json", str(tmp_path / "gpu.json"), *words])
        code = gpu.main()
        return code, json.loads((tmp_path / "gpu.json").read_text())["parts"]

    return run


def test_a_part_that_fails_stops_no_other_and_is_tried_again(call: Any, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    fails_once = f"import pathlib, sys; p = pathlib.Path({str(marker)!r}); e = p.exists(); p.touch(); sys.exit(not e)"
    counted = f"open({str(tmp_path / 'count')!r}, 'a').write('x'); print('fine')"
    parts = [make_part("first", fails_once), make_part("second", counted)]
    code, found = call(parts)
    assert code == 1
    assert "exit code 1" in found["first"]["error"]
    assert found["second"]["rows"] == [{"name": "fine"}]
    code, found = call(parts)
    assert code == 0
    assert "error" not in found["first"]
    assert (tmp_path / "count").read_text() == "x", "a part that is done is not run again"


def test_only_a_gpu_may_miss_a_bar(call: Any) -> None:
    """A measurement that misses its bar exits with 1 and is done. In a rehearsal, 1 is a failure."""
    missed = gpu.Part("missed", lambda *_: [[sys.executable, "-c", "exit(1)"]], gpu.read_text, 30.0, (0, 1))
    assert call([missed])[0] == 0
    code, found = call([missed], "--rehearse", "--again")
    assert code == 1
    assert "exit code 1" in found["missed"]["error"]


def test_a_part_that_hangs_is_ended(call: Any) -> None:
    code, found = call([make_part("slow", "import time; time.sleep(60)", seconds=1.0), make_part("next", "print(1)")])
    assert code == 1
    assert found["slow"]["error"] == "took longer than 1 s"
    assert found["next"]["rows"] == [{"name": "1"}]


def test_no_part_starts_when_the_minutes_are_over(call: Any, capsys: pytest.CaptureFixture[str]) -> None:
    call([make_part("first", "print(1)")])
    code, found = call([make_part("first", "print(1)"), make_part("late", "print(1)")], "--minutes", "0.1")
    assert code == 1
    assert found.keys() == {"first"}
    assert "left: ['late']" in capsys.readouterr().out


def test_every_file_of_tests_for_a_gpu_is_run(tmp_path: Path) -> None:
    commands = [command for part in gpu.PARTS for command in part.make_commands(tmp_path, False)]
    run = sorted(word for command in commands for word in command if word.startswith("tests/gpu/"))
    assert run == sorted(f"tests/gpu/{file.name}" for file in (ROOT / "tests" / "gpu").glob("test_*.py"))


def test_the_table_shows_measured_beside_predicted() -> None:
    rows = [
        {"name": "8,192", "step_seconds": 2.0, "predicted_step_seconds": 1.9, "mfu": 0.41},
        {"name": "tests", "passed": 12, "failed": 0},
    ]
    lines = list(gpu.list_compared({"parts": {"layers": {"rows": rows}, "other": {"error": "exit code 1: no"}}}))
    assert "2 s (predicted 1.9), MFU 41.0%" in lines[1]
    assert "12 passed" in lines[2]
    assert lines[3] == "other: FAILED: exit code 1: no"


def test_failed_tests_are_named() -> None:
    output = "FAILED tests/gpu/test_x.py::test_a - assert 1\n1 failed, 12 passed, 3 skipped in 4s"
    expected = {"passed": 12, "failed": 1, "skipped": 3, "failures": ["tests/gpu/test_x.py::test_a - assert 1"]}
    assert gpu.read_tests(output) == [{"name": "tests", **expected}]


def test_a_resume_that_does_not_end_is_an_error(tmp_path: Path) -> None:
    """The command prints the model's folder; the run's metrics stand beside it."""
    lines = [json.dumps({"step": step, "loss": 2.5, "step_seconds": 0.5}) for step in range(1, 7)]
    for count in (0, 3):
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines[:count]))
        with pytest.raises(ValueError, match="did not reach step 6"):
            gpu.read_training(f"{tmp_path}/model\n")
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert gpu.read_training(f"{tmp_path}/model\n")[-1] == {"name": "step 6", "loss": 2.5, "seconds": 0.5}


@pytest.mark.check
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "no GPU here" in done.stderr


@pytest.mark.check
def test_every_part_can_be_rehearsed_without_a_gpu() -> None:
    command = [sys.executable, str(SCRIPT), "--rehearse", "--minutes", "45"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(gpu.PARTS)} parts" in done.stdout
