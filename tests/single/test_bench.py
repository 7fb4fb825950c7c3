"""Bench's judgement: a row that runs out of memory is told and the sweep goes on; calibration moves the estimate to
what was measured. And, on request, the whole command beside the Trainer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_run import CONFIG
from training import make_recipe

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.ledger.job import make_job
from ulysses_cli.plan.levers import Levers
from ulysses_cli.plan.model_shape import read_model_shape
from ulysses_cli.plan.speed import compute_speed
from ulysses_cli.prove import bench as subject
from ulysses_cli.prove.calibration import calibrate
from ulysses_cli.prove.ranks import RankFailureError
from ulysses_cli.prove.speed import Timed

ROOT = Path(__file__).parents[2]
BIG = {**CONFIG, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 128, "num_hidden_layers": 16}


def make_timed(parts: dict[str, float]) -> Timed:
    return Timed(1.0, 1.0, 1.0, 100.0, 1.0, None, None, 1 << 30, 2.0, parts, 0.1)


def test_an_oom_is_a_row_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(num_ranks: int, function: Any, recipe: Any, *args: Any, **more: Any) -> Any:
        if recipe.data.max_length == 64:
            raise RankFailureError(1, "OutOfMemoryError", "tried to allocate 2 GiB", "")
        if recipe.data.max_length == 96:
            raise RankFailureError(0, "ValueError", "something else", "")
        return make_timed({"mlp": 0.5})

    monkeypatch.setattr(subject, "run_on_ranks", run)
    sweep = subject.Sweep((32, 64, 96, 128), (1, 2), "auto", 3, False, 60.0)
    findings = subject.bench(make_recipe(), CONFIG, "test", load_hardware(), sweep, lambda _: None)
    assert [row.verdict for row in findings.rows] == ["", "OOM", "FAIL", ""] * 2
    assert "tried to allocate" in findings.rows[1].text
    assert {row.group for row in findings.rows} == {"sp 1 x dp 2", "sp 2 x dp 1"}


def test_calibration_makes_the_prediction_what_was_measured() -> None:
    gpu = load_hardware().get_gpu("h100-80gb")
    recipe = make_recipe("data.max_length=32Ki", "parallel.sp_size=2", "model.dtype=bfloat16", config=BIG)
    job = make_job(recipe, read_model_shape(BIG, "test"), Levers(), gpus_per_node=8)
    predicted = compute_speed(job, gpu).parts
    measured = {name: 1.6 * seconds for name, seconds in predicted.items()}
    found = calibrate([(job, make_timed(measured))], gpu)
    shares = found["gpus"]["h100-80gb"]["attention"]
    slower = replace(
        gpu,
        efficiency=replace(gpu.efficiency, **found["efficiency"]),
        attention_forward=shares[0],
        attention_backward=shares[1],
    )
    again = compute_speed(job, slower).parts
    for name in ("projections", "mlp", "head_loss", "attention", "other", "exchange"):
        assert again[name] == pytest.approx(measured[name], rel=0.02), name
    assert calibrate([], gpu) == {}


def test_a_calibration_is_read_and_the_users_own_file_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "ulysses"
    folder.mkdir()
    (folder / "calibration.yaml").write_text("efficiency: {matmul: 0.5, link: 0.3}\n")
    (folder / "hardware.yaml").write_text("efficiency: {link: 0.4}\n")
    efficiency = load_hardware().get_gpu("h100-80gb").efficiency
    assert (efficiency.matmul, efficiency.link) == (0.5, 0.4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sp-size", "3"], "3 does not divide the 4 attention heads"),
        (["--max-length", "8Kx"], "8Kx is not a whole number"),
        (["--sp-size", "4", "--max-length", "2"], "shorter than sp_size"),
    ],
)
def test_mistakes_end_before_anything_starts(words: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ulysses_cli", "bench", "recipes/tiny-cpu.yaml", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_the_command_measures_beside_the_trainer(tmp_path: Path) -> None:
    words = ["bench", "recipes/tiny-cpu.yaml", "--max-length", "256,512", "--against", "trainer", "--format", "json"]
    page = tmp_path / "bench.html"
    done = subprocess.run(
        [sys.executable, "-m", "ulysses_cli", *words, "--html", str(page)],
        cwd=ROOT, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row["values"] for row in found["rows"]}
    assert rows["512"]["exchange_share"] > 0
    assert rows["512 by the Trainer"]["loss"] == pytest.approx(rows["512"]["loss"], abs=1.0)
    assert rows["512 Trainer / ours"]["speed_ratio"] > 0
    assert "<svg " in page.read_text()
