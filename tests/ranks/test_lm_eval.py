"""lm-eval's tasks on the sharded model: the same numbers as lm-eval's own model class gives on one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_pool import run_on_ranks
from support.training import save_bytes_model
from transformers import AutoModelForCausalLM

from ulysses_cli.commands.children.evaluating import FoundModel, ModelQuestion, prepare_model
from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.plan.problem import RecipeError

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install ulysses-cli[lm-eval]")
pytestmark = pytest.mark.check
MAX_LENGTH = 300
TASKS = {
    "choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}", "metric_list": [{"metric": "acc"}],
    },
    "words": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
    "spoken": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "b",
        "generation_kwargs": {"until": ["c"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip
REQUESTS: dict[str, list[tuple[Any, ...]]] = {
    "loglikelihood": [
        ("The lake is", " still"), ("The lake is", " green and deep"), ("", "A bird"), ("Soon it ", "flies away"),
        ("x" * 200, " y"), ("The lake is", " s"),
    ],
    "loglikelihood_rolling": [("A bird sits on the fence.",), ("word " * 130,), ("z",)],
    "generate_until": [
        ("The meadow", {"until": ["e"], "max_gen_toks": 16, "do_sample": False}),
        ("The meadow is", {"until": [], "max_gen_toks": 9}),
        ("Soon it flies away", {"until": ["a", "th"], "max_gen_toks": 16, "temperature": 0.0}),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and lm-eval's task files with their data beside them. No hub is asked."""
    folder = tmp_path_factory.mktemp("lm-eval")
    save_bytes_model(folder / "model", initializer_range=0.3, max_position_embeddings=2048)
    rows = [
        {"question": f"Number {at} comes after", "choices": [f" {at - 1}", f" {at * 7}", " none"], "label": 0}
        for at in range(1, 6)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tasks").mkdir()
    for name, settings in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
        task = {"task": f"own_{name}", **data, "test_split": "test", **settings}
        (folder / "tasks" / f"{name}.yaml").write_text(json.dumps(task))
    return folder


def make_instances(kind: str) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [
        Instance(kind, {}, args, at, (f"own_{kind}", at, 1))  # type: ignore[arg-type]
        for at, args in enumerate(REQUESTS[kind])
    ]


def make_reference(folder: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    return HFLM(
        pretrained=model, tokenizer=make_bytes_tokenizer(), max_length=MAX_LENGTH, batch_size=1, device="cpu"
    )  # fmt: skip


def ask_on_ranks(text: str, folder: str) -> dict[str, Any] | None:
    """Rank 0's answers to every request, and what lm-eval makes of its own tasks."""
    from ulysses_cli.prove.quality.documents import load_for_evaluation
    from ulysses_cli.prove.quality.harness import ShardedLM, load_tasks, run_harness, serve

    model = load_for_evaluation(text, torch.device("cpu"), lambda _: None)
    if not model.groups.is_first:
        serve(model)  # until the requests end
        serve(model)  # until the tasks end
        return None
    lm = ShardedLM(model)
    answers: dict[str, Any] = {kind: getattr(lm, kind)(make_instances(kind)) for kind in REQUESTS}
    lm.close()
    tasks = load_tasks([f"own_{name}" for name in TASKS], Path(folder) / "tasks", {})
    cache = Path(folder) / f"cache-{model.groups.layout.world_size}"
    answers["rows"] = run_harness(model, tasks, cache, None, False, lambda _: None)
    return answers


@pytest.mark.parametrize(("sp_size", "num_ranks"), [(1, 1), (2, 2), pytest.param(1, 2, marks=pytest.mark.full)])
def test_answers_are_those_of_lm_evals_own_model(folder: Path, sp_size: int, num_ranks: int) -> None:
    from lm_eval import simple_evaluate

    from ulysses_cli.prove.quality.harness import describe_harness, load_tasks

    question = ModelQuestion(sp_size, num_ranks, MAX_LENGTH, "float32", "bytes", "cpu", False)
    text = prepare_model(FoundModel(str(folder / "model")), None, question, online=False)[0]
    answers, *others = run_on_ranks(num_ranks, ask_on_ranks, text, str(folder))
    assert others == [None] * (num_ranks - 1)
    reference = make_reference(folder)
    expected = {kind: getattr(reference, kind)(make_instances(kind)) for kind in REQUESTS}
    for own, other in zip(answers["loglikelihood"], expected["loglikelihood"], strict=True):
        assert own == pytest.approx(other, abs=2e-4)
    assert answers["loglikelihood_rolling"] == pytest.approx(expected["loglikelihood_rolling"], rel=1e-5)
    assert answers["generate_until"] == expected["generate_until"]
    tasks = load_tasks([f"own_{name}" for name in TASKS], folder / "tasks", {})
    found = simple_evaluate(model=reference, **tasks, log_samples=False, bootstrap_iters=1000)
    assert answers["rows"] == [
        {**row, "value": pytest.approx(row["value"], rel=1e-4), "stderr": pytest.approx(row["stderr"], rel=1e-3)}
        if row["stderr"] is not None
        else {**row, "value": pytest.approx(row["value"], rel=1e-4)}
        for row in describe_harness(found)
    ]
    assert {row["task"] for row in answers["rows"]} == {f"own_{name}" for name in TASKS}
    assert {row["n"] for row in answers["rows"]} == {5}


class FewRequests:
    """A model that is never asked: what is wrong is said first."""

    tokenizer, max_length, stop_tokens = make_bytes_tokenizer(), 20, ()


def test_requests_that_cannot_be_answered_are_refused(folder: Path) -> None:
    from lm_eval.api.instance import Instance

    from ulysses_cli.prove.quality.harness import ShardedLM, load_tasks

    lm = ShardedLM(FewRequests())  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="2 of 6") as caught:
        lm.loglikelihood(make_instances("loglikelihood"))
    assert caught.value.problems[0].hint == "use 202 or more"
    drawn = Instance("generate_until", {}, ("a", {"do_sample": True, "temperature": 0.7}), 0, ("drawn", 0, 1))
    with pytest.raises(RecipeError, match="drawn "):
        lm.generate_until([drawn])
    with pytest.raises(RecipeError, match="own_nothing"):
        load_tasks(["own_nothing"], folder / "tasks", {})


class Killed(Exception):
    pass


class CountedModel:
    """A model whose answers are made up, and which is killed after some of them."""

    tokenizer, max_length, stop_tokens, engine = make_bytes_tokenizer(), 300, (), None

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ulysses_cli.prove.quality import harness

        self.num_asked, self.limit = 0, 10**6
        monkeypatch.setattr(harness, "_tell", lambda *_: None)
        monkeypatch.setattr(harness, "answer_questions", self.answer)
        monkeypatch.setattr(harness, "measure_documents", self.measure)

    def count(self) -> None:
        if self.num_asked == self.limit:
            raise Killed
        self.num_asked += 1

    def answer(self, _: Any, questions: Any, __: Any, keep: Any, *more: Any) -> None:
        from ulysses_cli.train.generation.questions import Answer

        for question in questions:
            self.count()
            keep(Answer(list(question.tokens[:3]), -float(sum(question.tokens + question.answer)), False, 0.1))

    def measure(self, _: Any, __: Any, documents: Any, ___: Any, keep: Any) -> None:
        for document in reversed(documents):
            self.count()
            keep({"index": document.index, "loss": float(document.tokens.sum()), "tokens": document.length})


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_killed_evaluation_asks_no_answered_request_again(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.api.model import CachingLM

    from ulysses_cli.prove.quality.harness import ShardedLM

    model: Any = CountedModel(monkeypatch)
    expected = getattr(ShardedLM(model), kind)(make_instances(kind))
    total, model.num_asked, model.limit = model.num_asked, 0, 2
    with pytest.raises(Killed):
        getattr(CachingLM(ShardedLM(model), str(tmp_path / "cache.db")), kind)(make_instances(kind))
    model.num_asked, model.limit = 0, 10**6
    assert getattr(CachingLM(ShardedLM(model), str(tmp_path / "cache.db")), kind)(make_instances(kind)) == expected
    kept = 1 if kind == "loglikelihood_rolling" else 2  # of the two windows that were read, one was a whole document
    assert model.num_asked == total - kept


def test_results_of_another_length_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The windows of a long document depend on the length, and lm-eval's key does not."""
    import lm_eval

    from ulysses_cli.prove.quality.harness import run_harness

    model: Any = CountedModel(monkeypatch)
    used = list[str]()
    monkeypatch.setattr(lm_eval, "simple_evaluate", lambda use_cache, **_: used.append(use_cache))
    for model.max_length in (300, 400, 300):
        run_harness(model, {}, tmp_path / "lm-eval", None, False, lambda _: None)
    assert used[0] == used[2] != used[1]
