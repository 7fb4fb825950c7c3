"""Questions between the steps of a run: asked on all ranks, recorded, and without effect on training."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import Mock

import pytest
from support.commands import succeed
from support.faults import Runs
from support.rank_pool import run_on_ranks
from support.refusals import explain
from support.run_harness import RunHarness
from support.small_run import BYTES_CONFIG, make_settings
from support.training import MemoryRows, make_recipe
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.evaluate.suites import SEEDED, Amount, Sources, plan_suites
from ulysses_cli.plan.recipe.recipe import EvalTask
from ulysses_cli.plan.schedule import SCORE_MEASURE
from ulysses_cli.train import evaluation as eval_suite
from ulysses_cli.train.evaluation import EvalSuite, Measures, ModelChoice
from ulysses_cli.train.loop import StopConditions, TrainState, every, train
from ulysses_cli.train.start import finish

AMOUNT = Amount((1200,), 1)


def train_with_questions(
    names: tuple[str, ...], *overrides: str
) -> tuple[list[float], list[dict[str, Any]], list[str]]:
    recipe = make_recipe("parallel.sp_size=2", "train.max_steps=3", *overrides, config=BYTES_CONFIG)
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
def test_questions_between_steps_change_no_step(snapshot: SnapshotAssertion) -> None:
    (losses, written, _), (_, of_second, phases) = run_on_ranks(2, train_with_questions, ("vt",))
    assert [line["step"] for line in written] == [1, 2]
    assert [(row["task"], row["n"], row["score"]) for row in written[0]["scores"]] == [("vt", 1, 0.0)]
    assert of_second == []
    assert phases == snapshot, "the watchdog of every rank sees progress"
    assert losses == pytest.approx(run_on_ranks(2, train_with_questions, ())[0][0], abs=1e-6)


def train_with_answers(*overrides: str) -> tuple[list[float], list[list[str]]]:
    """Returns losses, and what the model answered after each step."""
    answers: list[list[str]] = []

    def keep(results: list[dict[str, Any]]) -> Any:
        answers.append([each["answer"] for each in results])
        return summarize(results)

    summarize = eval_suite.summarize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eval_suite, "summarize", keep)
        return train_with_questions(("vt", "niah_single_1"), *overrides)[0], answers


@pytest.mark.full
def test_a_ring_trains_and_answers_as_ranks_that_share_heads() -> None:
    losses, answers = run_on_ranks(2, train_with_answers, "parallel.ring_size=2")[0]
    same_losses, same_answers = run_on_ranks(2, train_with_answers)[0]
    assert losses == pytest.approx(same_losses, abs=1e-6)
    assert answers == same_answers
    assert [len(each) for each in answers] == [2, 2]
    assert all(len(answer) > 3 for each in answers for answer in each)


SCORES = (0.25, 0.75, 0.5, 0.75, 0.5, 1.0)


def train_by_score(patience: int) -> tuple[list[int], int, dict[int, float]]:
    """Scores are made up, on rank 0, which alone has the answers."""
    recipe = make_recipe("parallel.sp_size=2", "train.max_steps=6", config=BYTES_CONFIG)
    harness = RunHarness(recipe, MemoryRows([[(40, 0), (24, 0)]] * 12), 6)
    state, saved, scores = harness.train_state, list[int](), iter(SCORES)
    state.measure = SCORE_MEASURE
    choice = ModelChoice(lambda state: saved.append(state.step), patience, 0.0, lambda _: None)
    suite = EvalSuite(("vt",), AMOUNT, make_bytes_tokenizer(), (), lambda _: None, choice.judge)
    with pytest.MonkeyPatch.context() as patch:
        made_up = lambda _: {"scores": [], "mean": [{"length": 1200, "score": next(scores)}]}  # noqa: E731
        patch.setattr(eval_suite, "summarize", made_up)
        state.post_step_hooks = (*state.post_step_hooks, every(1, suite.run))
        train(state)
    return saved, state.step, state.evaluated[SCORE_MEASURE]


@pytest.mark.full
def test_all_ranks_choose_by_the_score_that_rank_0_has() -> None:
    first, second = run_on_ranks(2, train_by_score, 3)
    assert first == second
    saved, last, known = first
    assert saved == [1, 2], "the higher score is better, the earlier of equal ones"
    assert last == 5
    assert known == {step: -score for step, score in enumerate(SCORES[:5], 1)}


def ask_late() -> tuple[int, int]:
    """How many results are written in a run whose time is over, by its own reasons to stop and by a signal alone."""
    recipe = make_recipe("train.max_steps=3", config=BYTES_CONFIG)
    state = RunHarness(recipe, MemoryRows([[(40, 0), (24, 0)]] * 8), 3).train_state
    state.stop = StopConditions(max_hours=0.0)
    written: list[dict[str, Any]] = []
    suite = EvalSuite(("vt",), AMOUNT, make_bytes_tokenizer(), (), written.append)
    suite.run(state)
    before = len(written)
    suite.run(state, StopConditions())
    return before, len(written)


@pytest.mark.check
def test_the_last_questions_are_asked_though_the_time_is_over() -> None:
    assert run_on_ranks(1, ask_late) == [(0, 1)]


def test_a_run_that_ends_late_asks_by_a_signal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        StopConditions, "decide", lambda self, group: self.name(self.read_flags())
    )  # of this rank alone

    class Asked(Exception):
        pass

    class Suite:
        def run(self, state: Any, stop: StopConditions) -> None:
            raise Asked(stop.read_flags())

    late = SimpleNamespace(
        step=3, last_eval_step=3, stop=StopConditions(max_hours=0.0), groups=SimpleNamespace(host_group=None)
    )
    assert any(late.stop.read_flags())
    run: Any = SimpleNamespace(state=late, plan=SimpleNamespace(recipe=None))
    nothing: Any = Mock()
    measures = Measures(nothing, nothing, Suite(), nothing)  # type: ignore[arg-type]
    with pytest.raises(Asked) as asked:
        finish(nothing, nothing, run, nothing, measures, nothing, "")
    assert not any(asked.value.args[0])


class Counted:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def run(self, state: Any, stop: Any = None) -> bool:
        self.steps.append(state.step)
        return True


@pytest.mark.parametrize(("step", "known", "asked"), [(4, {}, [4]), (5, {}, []), (8, {}, []), (4, {4: 0.5}, [])])
def test_a_resumed_run_asks_what_its_end_had_interrupted(
    step: int, known: dict[int, float], asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the checkpoint's step, where the uninterrupted run had asked it and its score is unknown. The last step's is
    left to the end of the run."""
    steps = list[int]()
    suite = EvalSuite(("vt",), AMOUNT, make_bytes_tokenizer(), (), lambda _: None)
    state: Any = SimpleNamespace(
        step=step, num_steps=8, last_eval_step=step - 1, evaluated={SCORE_MEASURE: known}, stop=StopConditions(),
        engine=None, groups=SimpleNamespace(is_first=False),
    )  # fmt: skip

    def ask(*_: Any) -> bool:
        steps.append(state.step)
        return False

    monkeypatch.setattr(eval_suite, "ask_questions", ask)
    evaluation, samples, short_check = Counted(), Counted(), Counted()
    measures = Measures(evaluation, samples, suite, short_check, eval_steps=2, sample_steps=2, suite_steps=4)  # type: ignore[arg-type]
    measures.measure_again(state)
    assert steps == asked
    assert evaluation.steps == samples.steps == short_check.steps == [step] * (step == 4)


RECIPE = make_settings(
    {**BYTES_CONFIG, "max_position_embeddings": 2048},
    parallel={"sp_size": 2},
    data={"max_length": 1280},
    train={"max_steps": 6, "learning_rate": 0.01},
    run={
        **{"eval_suite": ["vt"], "eval_suite_steps": 2, "eval_suite_samples": 1, "eval_suite_lengths": [1200]},
        **{"save_steps": 1, "keep_best": "eval_suite", "rehearsal": False},
    },
)


@pytest.mark.full
@pytest.mark.parametrize("moment", [{"phase": "asking", "step": 4}, {"phase": "writing the model"}])
def test_a_killed_run_has_the_scores_of_an_uninterrupted_one(tmp_path: Path, moment: dict[str, Any]) -> None:
    runs = Runs(tmp_path, RECIPE)
    runs.finish("whole")
    assert runs.start("killed", plan={**moment, "who": "all", "signal": signal.SIGKILL}).wait(120) == 1
    runs.finish("killed", "--resume", "auto")
    whole, killed = (runs.read_lines(name, "quality") for name in ("whole", "killed"))
    assert [line["step"] for line in whole] == [2, 4, 6]
    assert [(line["step"], line["score"]) for line in killed] == [(line["step"], line["score"]) for line in whole]


TEMPLATE = """\
{%- for m in messages %}{{- '<' + m.role[0] + '>' + m.content }}
{%- for call in m.tool_calls or [] %}{{- (call.function | tojson) }}{%- endfor %}{{- eos_token }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<a>' }}{%- endif %}"""


@pytest.mark.full
def test_a_model_that_has_learned_a_chat_makes_its_calls_in_the_run_and_afterwards(tmp_path: Path) -> None:
    """Training fits the one chat, so that greedy answers are its calls."""
    made = {"name": "find", "arguments": {"path": "a/b", "n": 3}}
    chat = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": made}]},
        {"role": "tool", "content": "no"},
        {"role": "assistant", "content": "Oh."},
    ]
    (tmp_path / "d.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    recipe = make_settings(
        {**BYTES_CONFIG, "initializer_range": 0.1},
        parallel={"sp_size": 2},
        data={
            **{"datasets": [{"path": "d.jsonl"}], "eval_datasets": [{"path": "d.jsonl"}], "max_length": 400},
            **{"chat_template": TEMPLATE, "assistant_only_loss": True},
        },
        train={"max_steps": 60, "learning_rate": 0.02, "lr_scheduler_type": "constant", "adam_epsilon": 1e-8},
        run={**{"eval_suite": ["calls"], "eval_suite_lengths": [400], "rehearsal": False}},
    )
    runs = Runs(tmp_path, recipe)
    runs.finish("run")
    lines = runs.read_lines("run", "quality")
    assert [(line["step"], line["score"]) for line in lines] == [(60, 1)]
    assert (lines[0]["scores"][0]["task"], lines[0]["scores"][0]["names"]) == ("calls", 1)
    words = ["--suite", "calls", "--dtype", "float32", "--device", "cpu", "--sp-size", "2", "--format", "json"]
    done = succeed("evaluate", "run", *words, "--output", "found", cwd=tmp_path)
    (score,) = json.loads(done.stdout)["scores"]
    assert (score["task"], score["n"], score["score"], score["names"]) == ("calls", 1, 1, 1)


def test_tasks_of_a_run_are_those_that_need_no_file() -> None:
    names = [name for name in get_args(EvalTask) if name != "calls"]  # of held-out chats
    suites = {"ruler", "niah", "helmet-recall"}
    assert len(plan_suites(names, Sources()).tasks) == len([name for name in names if name not in suites])
    assert {*suites, "graphs"} == SEEDED.keys() - {"code"}


def test_a_length_that_is_too_short_is_refused_before_the_first_step(snapshot: SnapshotAssertion) -> None:
    assert explain(EvalSuite, ("vt",), Amount((300,), 1), make_bytes_tokenizer(), (), print) == snapshot
