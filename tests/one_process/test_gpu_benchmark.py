"""Tests the first 15 minutes on a GPU without one: its parts are rehearsed, each row is kept when it comes, a part that
fails or hangs stops no other and leaves no process, and a later call goes on."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
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
SHOW = "import json; show = lambda **row: print(json.dumps(row), flush=True); "


def make_part(name: str, code: str, seconds: float = 30.0, **options: Any) -> gpu_run.Part:
    command = [sys.executable, "-c", SHOW + code]
    return gpu_run.Part(name, lambda _: [command], seconds, gpu_run.read_json_line, **options)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    machine: dict[str, Any] = {"gpus": ["NVIDIA H200"]}
    monkeypatch.setattr(gpu, "describe_machine", lambda **_: machine)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "of-the-checkout")
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)

    def run(parts: list[gpu_run.Part], *words: str) -> tuple[int, dict[str, Any]]:
        suites = {"proof": tuple(parts), "more": tuple(parts)}
        monkeypatch.setattr(gpu, "SUITES", suites)
        timed = [] if "--minutes" in words else ["--minutes", "20"]
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--results", str(tmp_path / "results"), *timed, *words])
        return gpu.main(), json.loads((tmp_path / "results" / "gpu-nvidia-h200.json").read_text())["parts"]

    return run


@pytest.mark.check
def test_a_part_that_fails_stops_no_other_and_is_tried_again_last(call: Any, tmp_path: Path) -> None:
    order = f"open({str(tmp_path / 'order')!r}, 'a').write"
    marker = f"import pathlib, sys; p = pathlib.Path({str(tmp_path / 'marker')!r}); e = p.exists(); p.touch(); "
    parts = [
        make_part("first", f"{marker}{order}('1'); show(name='a', seconds=1.5); sys.exit(not e)"),
        make_part("second", f"{order}('2'); show(name='fine')"),
    ]
    code, found = call(parts)
    assert (code, found["first"]["status"]) == (1, "failed")
    assert "exit code 1" in found["first"]["reason"]
    assert found["first"]["rows"] == [{"name": "a", "seconds": 1.5}], "what was measured before is kept"
    assert (found["second"]["status"], found["second"]["rows"]) == ("done", [{"name": "fine"}])
    code, found = call([*parts, make_part("third", f"{order}('3')")])
    assert (code, found["first"]["status"]) == (0, "done")
    assert "earlier_rows" not in found["first"]
    assert (tmp_path / "order").read_text() == "1231", "what is done is not run again, what failed comes last"


def runs(pid: int) -> bool:
    """A process that has ended may wait for its new parent to notice."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.full
def test_a_part_past_its_time_keeps_its_rows_and_leaves_no_process(call: Any, tmp_path: Path) -> None:
    """A grandchild in a session of its own, which no signal to a group reaches, holds the pipe and would hold the
    GPU."""
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    start = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True); "
    )
    begun = time.monotonic()
    slow = make_part("slow", f"{start}show(name='a'); time.sleep(60)", seconds=4.0)
    code, found = call([slow, make_part("next", "show(name='b')")])
    assert (code, found["slow"]["status"]) == (1, "out of time")
    assert "took longer than 4 s" in found["slow"]["reason"]
    assert (found["slow"]["rows"], found["next"]["rows"]) == ([{"name": "a"}], [{"name": "b"}])
    assert not runs(int((tmp_path / "pid").read_text()))
    (tmp_path / "pid").unlink()
    assert call([make_part("ended", f"{start}time.sleep(2)")])[1]["ended"]["status"] == "done"
    assert not runs(int((tmp_path / "pid").read_text())), "what an ended part leaves is ended, too"
    assert time.monotonic() - begun < 50


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


def test_parts_begin_only_with_enough_time(call: Any) -> None:
    """A part that is cut off begins anew; one that goes on may begin with less. A shorter part takes what is left."""
    parts = [
        make_part("long", "show(name='a')", 300.0), make_part("peers", "show(name='b')", 300.0, goes_on=True),
        make_part("short", "show(name='c')", 60.0),
    ]  # fmt: skip
    code, found = call(parts, "--minutes", "2")
    assert (code, [*found]) == (1, ["peers", "short"])


def test_lanes_run_at_once_and_keep_logs_of_their_own(call: Any, tmp_path: Path) -> None:
    """Each waits for the other's file."""
    paths = [tmp_path / "a", tmp_path / "b"]
    parts = [
        make_part(f"lane {lane}", f"import pathlib, time\npathlib.Path({str(mine)!r}).touch()\n"
                  f"while not pathlib.Path({str(other)!r}).exists(): time.sleep(0.05)\nshow(name='met')", lane=lane)
        for lane, (mine, other) in enumerate((paths, paths[::-1]))
    ]  # fmt: skip
    code, found = call(parts)
    assert (code, [part["rows"] for part in found.values()]) == (0, [[{"name": "met"}]] * 2)
    assert all((tmp_path / "results" / f"gpu-nvidia-h200.{lane}.log").exists() for lane in (0, 1))


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
        with pytest.raises(ValueError, match="did not go from step 4 to step 6"):
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
