"""Tests that a run keeps, ends at and exports its best model, and does the same when it is killed and resumed."""

import json
import signal
from pathlib import Path

import pytest
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


FILES = {"loss": "eval", "score": "quality"}
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
@pytest.mark.parametrize("measure", ["loss", "score"])
def test_a_killed_run_ends_with_the_best_model_of_an_uninterrupted_one(tmp_path: Path, measure: str) -> None:
    """The command is killed without a warning when the best model is known and not the last."""
    runs = Runs(tmp_path, RECIPE if measure == "loss" else SCORED)

    def read_measured(run: str) -> dict[int, float]:
        return {line["step"]: line[measure] for line in runs.read_lines(run, FILES[measure])}

    output, measured = runs.finish("whole"), read_measured("whole")
    steps = sorted(step for step in measured if step)  # no checkpoint is the base's, though it may be the best
    best, last = min(steps, key=lambda step: measured[step] if measure == "loss" else -measured[step]), steps[-1]
    assert 0 < best < last
    if measure == "loss":
        assert best == last - 4
        assert f"early stop after step {last}: " in output
    else:
        assert (steps, set(measured.values())) == ([4, 8, 12, 16], {0.0})
    assert runs.list_checkpoints("whole") == sorted((f"step-{best}", f"step-{last}"))
    assert json.loads((tmp_path / "whole" / "model" / "ulysses.json").read_text())["step"] == best

    command = runs.start("killed")
    assert wait_until(command, lambda: runs.count_steps("killed") > steps[steps.index(best) + (measure == "score")])
    processes = list_processes(command)
    command.send_signal(signal.SIGKILL)
    command.wait(60)
    wait_for_end(processes, 60)
    runs.finish("killed", "--resume", "auto")
    assert read_measured("killed") == measured
    assert runs.list_checkpoints("killed") == runs.list_checkpoints("whole")
    assert runs.read_model("killed") == runs.read_model("whole")
    assert "already finished" in runs.finish("killed", "--resume", "auto")
