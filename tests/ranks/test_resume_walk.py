"""Kills a run in each of its phases, by SIGKILL and by SIGTERM, and resumes it.

The run ends in time and leaves no process. All ranks enter the same collectives. The results are those of an
uninterrupted run.
"""

import os
import random
import signal
import time

import pytest
from support.faults import Runs, damage_newest, list_processes, wait_for_end, wait_until
from support.forked import Command
from support.kill_points import list_phases, read_collectives
from support.small_run import make_settings
from support.tiers import FULL, TIER

RECIPE = make_settings(
    parallel={"sp_size": 2},
    data={"eval_split": 0.001, "max_length": 256},
    train={"max_steps": 4, "gradient_accumulation_steps": 2},
    run={"save_steps": 2, "eval_steps": 2, "sample_steps": 2, "sample_prompts": ["a"], "sample_max_new_tokens": 8},
)
PHASES = list_phases(num_steps=4, evaluated=2, saved=2)
BEFORE_STEPS = ("start", "loading", "rehearsal", "first evaluation")
AFTER_STEPS = ("export", "check of the export")
END_SECONDS = 15.0  # from the death of an agent to that of all ranks
STOP_SECONDS = 60.0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Returns runs of which `whole` is an uninterrupted one."""
    made = Runs(tmp_path_factory.mktemp("walk"), RECIPE)
    made.finish("whole")
    return made


def check_resumed_run(runs: Runs, run: str, *words: str) -> str:
    """Checks that the resumed run equals the uninterrupted one. Returns its output."""
    command = runs.start(run, "--resume", "auto", *words)
    _, output = command.communicate(timeout=240)
    assert command.returncode == 0, output
    first, second = read_collectives(command.pids)
    assert first == second, "ranks entered different collectives"
    assert first
    assert runs.read_losses(run) == runs.read_losses("whole")
    assert runs.read_model(run) == runs.read_model("whole")
    for name, steps in (("eval", [0, 2, 4]), ("samples", [2, 4])):
        assert [line["step"] for line in runs.read_lines(run, name)] == steps, name
    check_finished_run(runs, run)
    return output


def check_finished_run(runs: Runs, run: str) -> None:
    """Checks that another resume has nothing to do."""
    again = runs.start(run, "--resume", "auto")
    out, output = again.communicate(timeout=240)
    assert (again.returncode, out) == (0, f"{run}/model\n"), output
    assert "already finished" in output
    assert "Traceback" not in output


def kill_at(runs: Runs, run: str, event: str, who: str, number: int, *words: str) -> tuple[Command, set[int], float]:
    """Kills a run. Returns the command, its processes at that moment, and the time."""
    command = runs.start(run, *words, plan={**PHASES[event], "who": who, "signal": number})
    assert wait_until(command, lambda: command.has_fired, 0.005), command.read_stderr()
    return command, list_processes(command), time.monotonic()


@pytest.mark.full
@pytest.mark.parametrize("event", PHASES)
def test_a_signal_ends_a_run_in_every_phase(runs: Runs, event: str) -> None:
    run = f"signal-{event}".replace(" ", "-")
    command, processes, at = kill_at(runs, run, event, "command", signal.SIGTERM)
    _, output = command.communicate(timeout=STOP_SECONDS)
    wait_for_end(processes, 5)
    assert time.monotonic() - at < STOP_SECONDS
    assert "Traceback" not in output
    if event in BEFORE_STEPS:
        assert command.returncode == 143, output
        assert "before a checkpoint" in output
        assert runs.list_checkpoints(run) == []
    elif event in AFTER_STEPS:
        assert command.returncode == 143, output
        assert f"{run}/checkpoints/step-4: continue" in output
    else:
        assert command.returncode == 0, output
        assert "warning: stopping" in output
        assert "stopped: by a signal after step " in output
        newest = max(int(name[5:]) for name in runs.list_checkpoints(run))
        assert f"{run}/checkpoints/step-{newest}: continue" in output
    check_resumed_run(runs, run)


@pytest.mark.full
@pytest.mark.parametrize("who", ["all", "this"])
def test_a_signal_before_the_first_step_leaves_no_checkpoint(runs: Runs, who: str) -> None:
    """All ranks are about to make it, and one or all of them know that they were asked to stop."""
    run, plan = f"first-{who}", {"phase": "comparing plans", "step": 0, "seconds": 1.0}
    command = runs.start(run, "run.rehearsal=false", plan={**plan, "who": who, "signal": signal.SIGTERM})
    _, output = command.communicate(timeout=240)
    assert command.has_fired
    assert command.returncode == 143, output
    assert "before a checkpoint" in output
    assert runs.list_checkpoints(run) == []


@pytest.mark.parametrize("event", [pytest.param(event, marks=pytest.mark.full) for event in PHASES])
@pytest.mark.parametrize("who", ["all", "one"])
def test_a_killed_rank_in_every_phase(runs: Runs, event: str, who: str) -> None:
    run = f"killed-{who}-{event}".replace(" ", "-")
    command, processes, _ = kill_at(runs, run, event, who, signal.SIGKILL)
    _, output = command.communicate(timeout=STOP_SECONDS)
    assert command.returncode == 1, output
    wait_for_end(processes, 5)
    check_resumed_run(runs, run)


@pytest.mark.parametrize(
    ("who", "event"),
    [pytest.param(who, event, marks=pytest.mark.full) for who in ("agent", "command") for event in PHASES],
)
def test_no_process_outlives_a_killed_agent(runs: Runs, who: str, event: str) -> None:
    """As long as one of its processes lives, another run cannot lock the folder."""
    run = f"orphans-{who}-{event}".replace(" ", "-")
    command, processes, _ = kill_at(runs, run, event, who, signal.SIGKILL)
    # at the start rank 1 may not have begun
    assert len(processes) >= 3 - (who == "agent") - (event == "start")
    wait_for_end(processes, END_SECONDS)
    command.communicate(timeout=20)
    check_resumed_run(runs, run)


@pytest.mark.check
def test_a_run_goes_on_after_a_signal_a_killed_launcher_and_a_damaged_checkpoint(runs: Runs) -> None:
    """One fault of each kind that the others of these tests meet in every phase."""
    words = ("run.rehearsal=false",)
    event = "mid-step", "command", signal.SIGTERM
    command, processes, _ = kill_at(runs, "three", *event, "run.stop_exit_code=75", *words)
    _, output = command.communicate(timeout=STOP_SECONDS)
    assert command.returncode == 75, output
    assert "three/checkpoints/step-2: continue" in output
    wait_for_end(processes, 5)
    words = ("--resume", "auto", *words)
    command, processes, _ = kill_at(runs, "three", "last evaluation", "command", signal.SIGKILL, *words)
    assert len(processes) == 3
    wait_for_end(processes, END_SECONDS)
    command.communicate(timeout=20)
    assert runs.list_checkpoints("three") == ["step-2", "step-4"]
    damage_newest(runs.folder / "three", "flipped byte", random.Random(1))
    output = check_resumed_run(runs, "three", "run.rehearsal=false")
    assert "three/checkpoints/step-4 is skipped: " in output
    assert "three/checkpoints/step-2 after" in output


@pytest.mark.check
def test_a_second_signal_ends_at_once(runs: Runs) -> None:
    command = runs.start("twice", "run.step_timeout=600")
    assert wait_until(command, lambda: runs.count_steps("twice") >= 1, 0.005), command.read_stderr()
    processes = list_processes(command)
    os.kill(int((command.pids / "1").read_text()), signal.SIGSTOP)  # so that the run reaches no end of a micro-step
    command.send_signal(signal.SIGTERM)
    time.sleep(1.0)  # what comes sooner counts as the same signal
    command.send_signal(signal.SIGTERM)
    at = time.monotonic()
    _, output = command.communicate(timeout=20)
    assert command.returncode == 143, output
    wait_for_end(processes, 5)
    assert time.monotonic() - at < 10
    if TIER == FULL:
        check_resumed_run(runs, "twice")
