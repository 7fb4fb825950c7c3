"""Tests what a program imports from the package: it is light, typed, and reports mistakes as values or exceptions."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.paths import ROOT, TINY_RECIPE
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli import api
from ulysses_cli.api import RecipeError, estimate, plan, train, validate
from ulysses_cli.run.launcher import StepListener, open_listener
from ulysses_cli.run.records import name_asker

MEASURE = """
import sys, time
started = time.process_time()
from ulysses_cli.api import estimate, plan, train, validate
print(time.process_time() - started, *sys.modules)
"""


def test_an_import_takes_under_a_tenth_of_a_second_and_no_torch() -> None:
    times = []
    for _ in range(3):
        words = subprocess.check_output([sys.executable, "-c", MEASURE], text=True).split()
        assert not {"torch", "transformers", "numpy", "pydantic", "typer"} & set(words[1:])
        times.append(float(words[0]))
    assert min(times) < 0.1


def test_a_recipe_is_a_file_or_a_mapping() -> None:
    assert validate(TINY_RECIPE, {"parallel.sp_size": 1}).resolved.layout.sp_size == 1
    recipe: dict[str, Any] = {
        "model": {"name_or_path": "Qwen/Qwen3-8B"},
        "data": {"datasets": [{"path": "owner/texts"}], "max_length": "32Ki"},
        "parallel": {"dp_shard_size": 8},
    }
    result = estimate(recipe, "h200")
    assert result.gpu.key == "h200"
    assert result.job.layout.world_size == 8
    assert [problem.key for problem in validate({**recipe, "trian": {}}).problems] == ["trian"]
    with pytest.raises(RecipeError, match="learning_rat"):
        estimate(recipe, overrides=["train.learning_rat=1"])


@pytest.mark.check
def test_a_plan_is_what_the_command_finds() -> None:
    assert plan("Qwen/Qwen3-8B", 65536, tokens=10**8, gpus={"h100-80gb": 8}).by_cost[0].job.max_length == 65536
    assert plan("Qwen/Qwen3-8B", "1M", gpus="l40s:1").walls
    with pytest.raises(RecipeError, match="no-such-gpu"):
        plan("Qwen/Qwen3-8B", "64Ki", gpus={"no-such-gpu": 8})


def test_ranks_must_be_able_to_import_a_loss() -> None:
    assert api.name_function(open_listener) == "ulysses_cli.run.launcher:open_listener"
    assert api.name_function(test_ranks_must_be_able_to_import_a_loss).startswith(os.path.abspath(__file__) + ":test_")
    for name, function in {"lambda": lambda losses: losses, "follow": StepListener.follow, "print": print}.items():
        assert name in explain(api.name_function, function, error=ValueError)


def test_training_refuses_other_threads(snapshot: SnapshotAssertion) -> None:
    with ThreadPoolExecutor() as threads:
        assert threads.submit(explain, train, TINY_RECIPE, error=RuntimeError).result() == snapshot


def follow(script: str, call: Callable[[str, dict[str, Any]], object], *words: str) -> tuple[StepListener, list[str]]:
    """Runs a script in place of an agent. Returns who asked it to stop, too."""
    asked: list[str] = []
    with open_listener(call) as listener:
        environ = {**os.environ, **listener.environ}
        agent = subprocess.Popen([sys.executable, "-c", script, *words], env=environ)
        assert listener.follow(agent, lambda: asked.append(name_asker("a signal", listener.environ))) == 0
    return listener, asked


@pytest.mark.parametrize(("answer", "stops"), [(None, 0), (True, 1), (1, 0)])
def test_a_callback_that_returns_true_stops_the_run_once(answer: object, stops: int) -> None:
    calls: list[Any] = []
    script = "import json, os; f = open(os.environ['ULYSSES_LINES'], 'w')\nfor i in range(3): print(json.dumps({'split': 'train', 'step': i}), file=f)"  # noqa: E501
    _, asked = follow(script, lambda split, line: calls.append((split, line["step"])) or answer)
    assert set(asked) <= {"the program's on_step"}, "the run's end says who asked"
    assert calls == [("train", 0), ("train", 1), ("train", 2)]
    assert len(asked) <= stops  # an agent that has ended is not asked


def test_the_end_of_a_run_names_the_function_that_stopped_it() -> None:
    script = "import os, time; f = open(os.environ['ULYSSES_LINES'], 'w')\nprint('{\"split\": \"eval\"}', file=f, flush=True); print('{\"split\": \"train\"}', file=f, flush=True); time.sleep(60)"  # noqa: E501
    with open_listener(lambda split, _: split == "eval") as listener:
        agent = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, **listener.environ})
        assert name_asker("a signal", listener.environ) == "a signal"
        listener.follow(agent, agent.kill)
        assert name_asker("a signal", listener.environ) == "the program's on_eval"
    assert name_asker("a signal", {}) == "a signal"


def test_what_a_run_on_preferences_measures_has_trls_names() -> None:
    line = {"step": 3, "loss": 0.5, "tokens": 7, "rewards/margins": 0.2, "kl": 0.0}
    for kind in (api.Step, api.EvalResult):
        read = api._read_line(kind, line)
        assert (read.step, read.loss, read.tokens) == (3, 0.5, 7)
        assert read.measures == {"rewards/margins": 0.2, "kl": 0.0}


def test_a_callback_that_raises_is_not_called_again() -> None:
    calls: list[int] = []

    def fail(split: str, line: dict[str, Any]) -> None:
        calls.append(line["step"])
        raise ZeroDivisionError

    script = "import os; open(os.environ['ULYSSES_LINES'], 'w').write('{\"split\": \"eval\", \"step\": 7}\\n' * 2)"
    listener, _ = follow(script, fail)
    assert calls == [7]
    assert isinstance(listener.error, ZeroDivisionError)


def test_a_line_that_a_killed_rank_left_unfinished_is_passed_over() -> None:
    calls: list[int] = []
    script = "import os, sys; open(os.environ['ULYSSES_LINES'], 'w').write(sys.argv[1])"
    lines = '{"split": "tr\n{"split": "train", "step": 7}\n'
    listener, _ = follow(script, lambda _, line: calls.append(line["step"]), lines)
    assert (calls, listener.error) == ([7], None)


def test_the_page_names_what_the_package_offers() -> None:
    page = (ROOT / "docs/python.md").read_text()
    assert [name for name in api.__all__ if name not in page] == ["EvalResult", "Problem"]
