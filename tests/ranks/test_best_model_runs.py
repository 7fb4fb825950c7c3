"""Tests that a run keeps, ends at and exports its best model, and does the same when it is killed and resumed."""

import json
import signal
from pathlib import Path

import pytest
import yaml
from support.faults import Runs, list_processes, wait_for_end, wait_until
from support.small_run import BYTES_CONFIG, make_settings

# the large learning rate makes losses that rise and fall
RECIPE = make_settings(
    parallel={"sp_size": 2},
    data={"eval_split": 0.005, "max_length": 256},
    train={"max_steps": 40, "learning_rate": 0.5, "lr_scheduler_type": "constant", "adam_epsilon": 1e-8},
    run={
        **{"eval_steps": 2, "save_steps": 5, "save_total_limit": 1, "rehearsal": False},
        **{"keep_best": "eval_loss", "export_best": True, "early_stopping_patience": 2},
    },
)


@pytest.mark.full
def test_a_killed_run_ends_with_the_best_model_of_an_uninterrupted_one(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(RECIPE))
    code, output = runs.train("whole")
    assert code == 0, output
    losses = read_evaluations(tmp_path / "whole")
    base = losses.pop(0)  # no checkpoint is its, though it may be the lowest
    last, best = max(losses), min(losses, key=lambda step: losses[step])
    assert 0 < best == last - 4
    assert f"early stop after step {last}: evaluation loss has not improved for 2 evaluations" in output
    assert runs.list_checkpoints("whole") == sorted((f"step-{best}", f"step-{last}"))
    assert json.loads((tmp_path / "whole" / "model" / "ulysses.json").read_text())["step"] == best

    kill_after(runs, "killed", best)
    code, output = runs.train("killed", "--resume", "auto")
    assert code == 0, output
    assert read_evaluations(tmp_path / "killed") == {0: base, **losses}
    assert runs.list_checkpoints("killed") == runs.list_checkpoints("whole")
    assert runs.read_model("killed") == runs.read_model("whole")
    code, output = runs.train("killed", "--resume", "auto")
    assert code == 0, output
    assert "already finished" in output


def kill_after(runs: Runs, run: str, step: int) -> None:
    """Starts a run and kills its command without a warning when it has done more than `step` steps. Returns when its
    ranks have ended too."""
    command = runs.start(run)
    assert wait_until(command, lambda: runs.count_steps(run) > step)
    processes = list_processes(command)
    command.send_signal(signal.SIGKILL)
    command.wait(60)
    wait_for_end(processes, 60)


def read_evaluations(run_dir: Path) -> dict[int, float]:
    lines = map(json.loads, (run_dir / "eval.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


# no question is answered right, so that the first score stays the best, and patience ends the run
SCORED = make_settings(
    {**BYTES_CONFIG, "max_position_embeddings": 2048},
    parallel={"sp_size": 2},
    train={"max_steps": 60},
    run={
        **{"eval_suite": ["vt"], "eval_suite_steps": 4, "eval_suite_lengths": [1200], "eval_suite_samples": 1},
        **{"save_steps": 3, "save_total_limit": 1, "rehearsal": False},
        **{"keep_best": "eval_suite", "export_best": True, "early_stopping_patience": 3},
    },
)


@pytest.mark.full
def test_a_killed_run_keeps_the_model_of_the_best_score(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(SCORED))
    code, output = runs.train("whole")
    assert code == 0, output
    scores = read_scores(tmp_path / "whole")
    best, last = min(scores), max(scores)
    assert list(scores) == [4, 8, 12, 16]
    assert set(scores.values()) == {0.0}
    assert runs.list_checkpoints("whole") == sorted((f"step-{best}", f"step-{last}"))
    assert json.loads((tmp_path / "whole" / "model" / "ulysses.json").read_text())["step"] == best

    kill_after(runs, "killed", best + 4)
    code, output = runs.train("killed", "--resume", "auto")
    assert code == 0, output
    assert "resumed from killed/checkpoints/step-" in output
    assert read_scores(tmp_path / "killed") == scores
    assert runs.list_checkpoints("killed") == runs.list_checkpoints("whole")
    assert runs.read_model("killed") == runs.read_model("whole")


def read_scores(run_dir: Path) -> dict[int, float]:
    lines = map(json.loads, (run_dir / "quality.jsonl").read_text().splitlines())
    return {line["step"]: line["score"] for line in lines}
