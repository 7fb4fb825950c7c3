"""A run struck in every phase of its life, by SIGKILL and by SIGTERM, and resumed: it ends in time, nothing outlives
it, all ranks go on to the same collectives, and what comes out is the run that was never touched.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from support.faults import Workshop
from support.forked import Command, is_alive
from support.kill_points import list_phases, read_collectives
from support.small_run import make_settings

RECIPE = make_settings(
    parallel={"sp_size": 2},
    data={"eval_split": 0.02, "max_length": 256},
    train={"max_steps": 4, "gradient_accumulation_steps": 2},
    run={"save_steps": 2, "eval_steps": 2},
)
PHASES = list_phases(num_steps=4, evaluated=2, saved=2)
BEFORE_STEPS = ("start", "loading", "rehearsal")
AFTER_STEPS = ("export", "check of the export")
END_SECONDS = 15.0  # from the death of a launcher to that of all ranks
STOP_SECONDS = 60.0


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """With a run that was never touched in `whole`."""
    made = Workshop(tmp_path_factory.mktemp("walk"))
    (made.folder / "r.yaml").write_text(yaml.safe_dump(RECIPE))
    code, said = made.train("whole")
    assert code == 0, said
    return made


def list_processes(command: Command) -> set[int]:
    """Ranks and their launcher."""
    ranks = {int(file.read_text()) for file in command.pids.glob("[0-9]")}
    return ranks | {parent for rank in ranks if (parent := read_parent(rank)) not in (0, 1)}


def read_parent(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def wait_for_end(processes: set[int], seconds: float) -> float:
    """-> seconds until none is left."""
    begun = time.monotonic()
    while left := [process for process in processes if is_alive(process)]:
        assert time.monotonic() - begun < seconds, f"{left} live on"
        time.sleep(0.05)
    return time.monotonic() - begun


def go_on_to_the_end(shop: Workshop, run: str) -> None:
    """Resumed, it is the run that was never touched; resumed again, it has nothing to do."""
    command = shop.start(run, "--resume", "auto")
    _, said = command.communicate(timeout=240)
    assert command.returncode == 0, said
    first, second = read_collectives(command.pids)
    assert first == second, "ranks were about to do different things"
    assert first
    assert shop.read_losses(run) == shop.read_losses("whole")
    assert shop.read_model(run) == shop.read_model("whole")
    evaluated = [json.loads(line)["step"] for line in (shop.folder / run / "eval.jsonl").read_text().splitlines()]
    assert evaluated == [2, 4]
    again = shop.start(run, "--resume", "auto")
    out, said = again.communicate(timeout=240)
    assert (again.returncode, out) == (0, f"{run}/model\n"), said
    assert "already finished: all 4 steps are done" in said
    assert "Traceback" not in said


def strike(shop: Workshop, run: str, event: str, who: str, number: int) -> tuple[Command, set[int], float]:
    """-> the command, its processes at that moment, and when."""
    command = shop.start(run, plan={**PHASES[event], "who": who, "signal": number})
    end = time.monotonic() + 240
    while not command.has_struck:
        assert command.poll() is None, command.read_said()
        assert time.monotonic() < end
        time.sleep(0.005)
    return command, list_processes(command), time.monotonic()


WALK = [
    pytest.param(event, marks=() if event == "last evaluation" else pytest.mark.check if at % 2 else pytest.mark.full)
    for at, event in enumerate(PHASES)
]


@pytest.mark.parametrize("event", WALK)
def test_a_signal_ends_a_run_in_every_phase(shop: Workshop, event: str) -> None:
    run = f"signal-{event}".replace(" ", "-")
    command, processes, at = strike(shop, run, event, "command", signal.SIGTERM)
    _, said = command.communicate(timeout=STOP_SECONDS)
    wait_for_end(processes, 5)
    assert time.monotonic() - at < STOP_SECONDS
    assert "Traceback" not in said
    if event in BEFORE_STEPS:
        assert command.returncode == 143, said
        assert "before a checkpoint was written: the same command starts from the beginning" in said
        assert shop.list_checkpoints(run) == []
    elif event in AFTER_STEPS:
        assert command.returncode == 143, said
        assert f"the newest checkpoint is {run}/checkpoints/step-4: continue from it with" in said
    else:
        assert command.returncode == 0, said
        assert "warning: stopping after this step; Ctrl-C again, or a second signal, stops now" in said
        assert "stopped: by a signal after step " in said
    go_on_to_the_end(shop, run)


@pytest.mark.parametrize("event", [pytest.param(event, marks=pytest.mark.full) for event in PHASES])
@pytest.mark.parametrize("who", ["all", "one"])
def test_a_killed_rank_in_every_phase(shop: Workshop, event: str, who: str) -> None:
    run = f"killed-{who}-{event}".replace(" ", "-")
    command, processes, _ = strike(shop, run, event, who, signal.SIGKILL)
    _, said = command.communicate(timeout=STOP_SECONDS)
    assert command.returncode == 1, said
    wait_for_end(processes, 5)
    go_on_to_the_end(shop, run)


@pytest.mark.parametrize(
    ("who", "event"),
    [
        pytest.param("agent", "mid-step", marks=pytest.mark.check),
        *(pytest.param("agent", event, marks=pytest.mark.full) for event in PHASES if event != "mid-step"),
        *(pytest.param("command", event, marks=pytest.mark.full) for event in PHASES if event != "evaluation"),
        pytest.param("command", "evaluation", marks=pytest.mark.check),
    ],
)
def test_nothing_outlives_a_killed_launcher(shop: Workshop, who: str, event: str) -> None:
    """And as long as something lives, the folder is not another run's."""
    run = f"orphans-{who}-{event}".replace(" ", "-")
    command, processes, _ = strike(shop, run, event, who, signal.SIGKILL)
    assert len(processes) >= 3 - (who == "agent")
    wait_for_end(processes, END_SECONDS)
    command.communicate(timeout=20)
    go_on_to_the_end(shop, run)


def test_a_run_that_is_struck_twice_is_the_run_that_was_not(shop: Workshop) -> None:
    """A rank is killed in the middle of a save; resumed, another one is lost, which is mended without a person."""
    command, _, _ = strike(shop, "struck", "save", "one", signal.SIGKILL)
    _, said = command.communicate(timeout=STOP_SECONDS)
    assert command.returncode == 1, said
    assert "rank 1 was killed by SIGKILL" in said
    plan = {"phase": "micro-step 2", "step": 3, "who": "all", "signal": signal.SIGKILL}
    command = shop.start("struck", "--resume", "auto", "run.max_restarts=1", plan=plan)
    _, said = command.communicate(timeout=240)
    assert command.returncode == 0, said
    assert command.has_struck
    assert "restart 1 of 1 (run.max_restarts): a rank was lost" in said
    assert shop.read_losses("struck") == shop.read_losses("whole")
    assert shop.read_model("struck") == shop.read_model("whole")


@pytest.mark.check
def test_a_second_signal_ends_at_once(shop: Workshop) -> None:
    command = shop.start("twice", "run.step_timeout=600")
    end = time.monotonic() + 240
    while shop.count_steps("twice") < 1:
        assert command.poll() is None, command.read_said()
        assert time.monotonic() < end
        time.sleep(0.005)
    processes = list_processes(command)
    os.kill(int((command.pids / "1").read_text()), signal.SIGSTOP)  # so that no boundary is reached
    command.send_signal(signal.SIGTERM)
    time.sleep(1.0)  # what comes sooner is the same signal
    command.send_signal(signal.SIGTERM)
    at = time.monotonic()
    _, said = command.communicate(timeout=20)
    assert command.returncode == 143, said
    wait_for_end(processes, 5)
    assert time.monotonic() - at < 10
    go_on_to_the_end(shop, "twice")
