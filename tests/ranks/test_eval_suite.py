"""Questions between the steps of a run: asked on all ranks, recorded, and without effect on training."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from support.rank_pool import run_on_ranks
from support.run_harness import RunHarness
from support.small_run import BYTES_CONFIG
from support.training import MemoryRows, make_recipe

from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.evaluate.suites import SEEDED, Amount, Sources, plan_suites
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.plan.recipe.recipe import EvalTask
from ulysses_cli.train.hooks.eval_suite import EvalSuite
from ulysses_cli.train.loop import every, train
from ulysses_cli.train.train_state import TrainState

AMOUNT = Amount((1200,), 1)


def train_with_questions(names: tuple[str, ...]) -> tuple[list[float], list[dict[str, Any]], list[str]]:
    recipe = make_recipe("parallel.sp_size=2", "train.max_steps=3", config=BYTES_CONFIG)
    harness = RunHarness(recipe, MemoryRows([[(40, 0), (24, 0)]] * 8), 3)
    written: list[dict[str, Any]] = []
    suite = EvalSuite(names, AMOUNT, make_bytes_tokenizer(), (), written.append)
    state = harness.train_state
    phases: list[str] = []

    def ask(state: TrainState) -> None:
        suite.run(state)
        phases.append(state.phase)

    state.post_step_hooks = (*state.post_step_hooks, every(1, ask))
    train(state)
    return harness.losses, written, phases


@pytest.mark.check
def test_questions_between_steps_change_no_step() -> None:
    (losses, written, _), (_, of_second, phases) = run_on_ranks(2, train_with_questions, ("vt",))
    assert [line["step"] for line in written] == [1, 2]
    assert [(row["task"], row["n"], row["score"]) for row in written[0]["scores"]] == [("vt", 1, 0.0)]
    assert of_second == []
    assert phases == ["asking question 1 of run.eval_suite"] * 2, "the watchdog of every rank sees progress"
    assert losses == pytest.approx(run_on_ranks(2, train_with_questions, ())[0][0], abs=1e-6)


def test_tasks_of_a_run_are_those_that_need_no_file() -> None:
    names = get_args(EvalTask)
    assert len(plan_suites(names, Sources()).tasks) == len([name for name in names if name not in ("ruler", "niah")])
    assert {"ruler", "niah", "graphs"} == SEEDED.keys() - {"code"}


def test_a_length_that_is_too_short_is_refused_before_the_first_step() -> None:
    with pytest.raises(RecipeError, match="300 is too short: vt needs at least"):
        EvalSuite(("vt",), Amount((300,), 1), make_bytes_tokenizer(), (), print)
