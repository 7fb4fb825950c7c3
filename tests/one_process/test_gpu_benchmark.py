"""Tests the first 15 minutes on a GPU without one: its parts are rehearsed, and their recipes fit."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT
from support.served import write_python

from ulysses_cli.hardware_table import load_hardware
from ulysses_cli.plan.planner.lever_choice import choose_levers
from ulysses_cli.validate import validate_recipe

sys.path.append(str(ROOT / "benchmarks"))
import gpu
import gpu_run

PARTS = [part for suite in gpu.SUITES.values() for part in suite]


def test_every_file_of_tests_for_a_gpu_is_run(tmp_path: Path) -> None:
    folders = gpu_run.PartFolders(tmp_path, tmp_path, False, 60.0)
    commands = [command for part in PARTS for command in part.make_commands(folders)]
    run = sorted({word for command in commands for word in command if word.startswith("tests/gpu/")})
    assert run == sorted(f"tests/gpu/{file.name}" for file in (ROOT / "tests" / "gpu").glob("test_*.py"))


def test_the_recipe_of_every_part_is_valid_and_fits_its_gpu(tmp_path: Path) -> None:
    """At full scale, with the settings of its commands, on the GPU for which they were chosen."""
    folders, h200, tried = gpu_run.PartFolders(tmp_path, tmp_path, False, 60.0), load_hardware().get_gpu("h200"), 0
    for part in PARTS:
        for command in part.make_commands(folders):
            recipe = next((word for word in command if word.endswith(".yaml")), None)
            if recipe is None:
                continue
            words = [word for word in command if re.match(r"[a-z]+\.[a-z_]+=", word)]
            lengths = command[command.index("--max-length") + 1].split(",") if "--max-length" in command else [""]
            for length in lengths:
                valid = validate_recipe(recipe, [*words, *([f"data.max_length={length}"] if length else [])])
                assert not valid.problems, (part.name, valid.problems)
                choice = choose_levers(valid.loaded.recipe, valid.shape, h200)
                assert choice.fit is not None, part.name
                assert choice.fit.verdict == "fits", part.name
                tried += 1
    assert tried >= 14


def test_a_resume_that_does_not_end_is_an_error(tmp_path: Path) -> None:
    """The command prints the model's folder; the run's metrics stand beside it, the plain run's in the next folder."""

    def write(name: str, steps: range, loss: float, share: float = 0.5) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        line = {"loss": loss, "step_seconds": 0.5, "early_optimizer_share": share}
        lines = [json.dumps({"step": step, **line}) for step in steps]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))

    resumed = f"{tmp_path}/{gpu.AGAIN}/model\n"
    write(gpu.PLAIN, range(1, 7), 2.5)
    for steps in (range(0), range(4, 6), range(1, 7)):
        write(gpu.AGAIN, steps, 2.5)
        with pytest.raises(ValueError, match="step 4 to step 6"):
            gpu.read_training(resumed)
    for loss, status in ((2.501, "done"), (2.6, "failed"), (float("nan"), "failed")):
        write(gpu.AGAIN, range(4, 7), loss)
        rows = gpu.read_training(resumed)
        assert rows[-1]["name"] == "step 6"
        assert gpu.judge_training(rows)[0] == status
    write(gpu.AGAIN, range(4, 7), 2.5, share=0.0)
    status, reason = gpu.judge_training(gpu.read_training(resumed))
    assert (status, reason) == ("done", "no group of the optimizer stepped before the backward's end")
    write(gpu.PLAIN, range(1, 6), 2.5)
    with pytest.raises(KeyError):
        gpu.read_training(resumed)


def start(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs the script, whose processes cost no import."""
    python = str(write_python())
    code = f"import sys, gpu; gpu.PYTHON = {python!r}; gpu.ULYSSES = (gpu.PYTHON, '-m', 'ulysses_cli'); "
    command = [python, "-c", f"{code}sys.argv[0] = 'gpu.py'; sys.exit(gpu.main())", *words]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "benchmarks")))
    environ = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=3000)


@pytest.mark.full
@pytest.mark.parametrize("suite", gpu.SUITES)
def test_a_suite_can_be_rehearsed_without_a_gpu(suite: str, tmp_path: Path) -> None:
    done = start("--suite", suite, "--rehearse", "--results", str(tmp_path / "results"))
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "results" / "gpu-none.json").read_text())["parts"]
    assert parts.keys() == {part.name for part in gpu.SUITES[suite]}
    for name, part in parts.items():
        assert part["rows"], name
        assert part["status"] == ("skipped" if "outcome" in part["rows"][0] else "done"), name
    if suite == "measure":
        assert any("part_seconds" in row for part in parts.values() for row in part["rows"])
