"""`ulysses evaluate` from end to end on CPU ranks: mistakes, a prediction, answers on one rank and on two."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.checkpoints import RECIPE, make_checkpoint
from support.commands import run, succeed
from support.faults import wait_for_end
from support.json_page import find_undocumented
from support.prompters import make_prompter
from support.rank_pool import run_on_ranks
from support.refusals import explain
from support.small_run import BYTES_CONFIG
from support.training import save_bytes_model
from syrupy.assertion import SnapshotAssertion
from test_generation import PlainForward, make, make_axes, make_axis, make_prompts

from ulysses_cli.commands.children import evaluating
from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.evaluate.suites import Sources, check_samples, plan_suites
from ulysses_cli.plan.models.shape import read_model_shape
from ulysses_cli.plan.planner.generation import count_cache_bytes, count_read_weights
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.train.generation.decoding import Generator

KEPT = {"manifest.json", "state.json", "rank-00000.safetensors", "rank-00001.safetensors"}
LONG = {**BYTES_CONFIG, "max_position_embeddings": 4096}
WORDS = ("--tokenizer", "bytes", "--dtype", "float32", "--device", "cpu", "--format", "json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_bytes_model(folder, **LONG)
    return str(folder)


def test_a_model_that_cannot_be_asked_so_is_refused(model: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Other mistakes are in tests/unit/commands.txt."""
    config = {**json.loads((Path(model) / "config.json").read_text()), "quantization_config": {"quant_method": "gptq"}}
    shutil.copytree(model, tmp_path / "quantized")
    (tmp_path / "quantized" / "config.json").write_text(json.dumps(config))
    plain = make_bytes_tokenizer()
    plain.chat_template = None
    plain.save_pretrained(tmp_path / "plain")
    problems = []
    for words in (
        ("quantized", *WORDS), (model, *WORDS, "--thinking", "64"),
        (model, *WORDS, "--tokenizer", "plain", "--chat-template"),
    ):  # fmt: skip
        result = run("evaluate", *words, "--suite", "vt", cwd=tmp_path)
        assert result.returncode == 2, result.stderr
        problems += json.loads(result.stdout)["problems"]
    assert problems == snapshot


def test_results_of_two_runs_have_folders_of_their_own() -> None:
    name_results = evaluating.name_results
    assert name_results("runs/mine/checkpoints/step-400", ["ruler"]) == "mine-step-400-ruler"
    assert name_results("runs/mine/model/", ["niah", "loss"]) == "mine-model-niah-loss"
    assert name_results("Qwen/Qwen3-0.6B", ["lm-eval:gsm8k"]) == "Qwen3-0.6B-lm-eval-gsm8k"
    long = [name_results("m", [f"lm-eval:{'x' * 120}{end}"]) for end in "ab"]
    assert len({*long}) == 2
    assert all(len(name) <= 100 for name in long)


def test_a_dry_run_predicts_the_cache(model: str) -> None:
    """2 layers x (keys and values) x 1 of 2 heads x 8 numbers x 4 bytes, of the prompt and 128 tokens."""
    result = run("evaluate", model, *WORDS, "--dry-run", "--max-length", "4Ki", "--sp-size", "2")
    (prediction,) = json.loads(result.stdout)["predictions"]
    assert prediction["cache_bytes"] == 2 * 2 * 8 * 4 * (4096 + 128)
    assert not find_undocumented("ulysses evaluate", json.loads(result.stdout))
    assert prediction["prefill_seconds"] is None, "the GPU is not known"


@pytest.mark.check
def test_a_dry_run_of_a_checkpoint_exports_nothing(tmp_path: Path) -> None:
    """Seconds are the operations over the GPU's rates, and the bytes of weights and cache over its memory's."""
    checkpoint = make_checkpoint(tmp_path / "run", 4, recipe={**RECIPE, "model": {"config": LONG}})
    result = succeed("evaluate", str(checkpoint), *WORDS, "--dry-run", "--max-length", "4Ki", "--gpu", "h100")
    (prediction,) = json.loads(result.stdout)["predictions"]
    slowest, fastest = (prediction["prefill_flops"] / (989e12 * share) for share in (0.63, 0.72))
    assert fastest < prediction["prefill_seconds"] < slowest
    shape = read_model_shape(LONG, "test")
    read = 4 * count_read_weights(shape) + count_cache_bytes(shape, 4096, 1, 4, 0)
    assert prediction["token_seconds"] == pytest.approx(read / (3350e9 * 0.8))
    each = prediction["prefill_seconds"] + 127 * prediction["token_seconds"]
    assert prediction["questions"] > 100
    assert prediction["questions_seconds"] == pytest.approx(prediction["questions"] * each)
    assert (prediction["room"], prediction["usd"]) == ("with all weights", None)
    words = ("--max-length", "4Ki,1Gi", "--gpu", "h100", "--price", "3", "--against", str(checkpoint))
    result = run("evaluate", str(checkpoint), *WORDS, "--dry-run", *words)
    twice, huge = json.loads(result.stdout)["predictions"]
    assert twice["questions_seconds"] == pytest.approx(2 * prediction["questions_seconds"])
    assert twice["usd"] == pytest.approx(twice["questions_seconds"] / 3600 * 3)
    assert huge["room"] == "no"
    result = run("evaluate", str(checkpoint), *WORDS, "--dry-run", "--gpu", "abacus")
    assert (result.returncode, json.loads(result.stdout)["problems"][0]["key"]) == (2, "--gpu")
    assert {file.name for file in (tmp_path / "run").rglob("*")} == {"checkpoints", "step-4", *KEPT}


def make_question(name: str, context: str) -> dict[str, str]:
    """Returns a row as LongBench v2 has it."""
    choices = {f"choice_{letter}": letter.lower() for letter in "ABCD"}
    facts = {"_id": name, "domain": "d", "difficulty": "easy", "length": "short", "question": "q", "answer": "C"}
    return {**facts, **choices, "context": context}


@pytest.fixture
def questions(tmp_path: Path) -> str:
    """One question of some hundred bytes, and one that the model's 4,096 positions do not hold."""
    file = tmp_path / "longbench_v2.json"
    file.write_text(json.dumps([make_question("long", "x" * 4000), make_question("short", "x")]))
    return str(file)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the command gives to its child, which is not started."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(evaluating, "run", lambda options, *_: found.append(options))
    return found


@pytest.mark.parametrize(
    ("words", "lengths", "limit", "most"),
    [
        (("--suite", "longbench-v2"), [4096], 4096, 4096),
        (("--suite", "longbench-v2", "--max-length", "1Ki,2Ki"), [1024, 2048], 2048, 2048),
        (("--suite", "niah,longbench-v2"), [4096], 4096, 4096),
        (("--suite", "niah"), [4096], 0, 4096),
        (("--suite", "niah", "--max-length", "8Ki"), [8192], 0, 8192),
    ],
)
def test_files_are_asked_up_to_the_models_own_length(
    model: str,
    questions: str,
    planned: list[dict[str, Any]],
    tmp_path: Path,
    words: tuple[str, ...],
    lengths: list[int],
    limit: int,
    most: int,
    snapshot: SnapshotAssertion,
) -> None:
    """`most`: what the model is loaded for."""
    path = ("--path", questions) if "longbench-v2" in words[1] else ()
    succeed("evaluate", model, *WORDS, *words, *path, "--output", str(tmp_path / "found"))
    (options,) = planned
    assert (options["lengths"], options["max_prompt_tokens"]) == (lengths, limit)
    assert parse_recipe(options["model"], "test", []).recipe.data.max_length == most
    assert [note.replace(model, "MODEL") for note in options["notes"]] == (snapshot if lengths == [8192] else [])


def test_a_longer_model_is_compared_on_the_same_questions(
    model: str, questions: str, planned: list[dict[str, Any]], tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    shutil.copytree(model, tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text(json.dumps({**LONG, "max_position_embeddings": 1024}))
    words = ("--suite", "longbench-v2", "--path", questions, "--against", str(tmp_path / "other"))
    succeed("evaluate", model, *WORDS, *words, "--output", str(tmp_path / "found"))
    (options,) = planned
    assert options["max_prompt_tokens"] == 4096
    loaded = [parse_recipe(options[name], "test", []).recipe for name in ("model", "against")]
    assert [each.data.max_length for each in loaded] == [4096] * 2
    assert options["notes"] == snapshot


def test_a_dry_run_counts_the_questions_of_files(model: str, questions: str, snapshot: SnapshotAssertion) -> None:
    words = ("--dry-run", "--path", questions, "--suite")
    result = run("evaluate", model, *WORDS, *words, "longbench-v2")
    (prediction,) = json.loads(result.stdout)["predictions"]
    assert (prediction["length"], prediction["questions"]) == (4096, 2)
    result = run("evaluate", model, *WORDS, *words, "vt,longbench-v2", "--max-length", "2Ki,8Ki")
    found = json.loads(result.stdout)
    assert [(each["length"], each["questions"]) for each in found["predictions"]] == [(2048, 20), (8192, 22)]
    assert [note.replace(model, "MODEL") for note in found["notes"]] == snapshot


@pytest.mark.parametrize(("kind", "length"), [("yarn", 16384), ("dynamic", 4096)])
def test_a_checkpoints_positions_are_those_that_it_was_stretched_to(
    questions: str, tmp_path: Path, kind: str, length: int
) -> None:
    """A dynamic stretch leaves the model's own number in its config."""
    recipe = {**RECIPE, "model": {"config": LONG, "rope_scaling": {"type": kind}}, "data": {"max_length": 16384}}
    checkpoint = make_checkpoint(tmp_path / "run", 4, recipe=recipe)
    result = succeed("evaluate", str(checkpoint), *WORDS, "--dry-run", "--suite", "longbench-v2", "--path", questions)
    found = json.loads(result.stdout)
    assert [each["length"] for each in found["predictions"]] == [length]
    assert not found["notes"]


def test_a_length_that_holds_no_question_is_refused(questions: str, snapshot: SnapshotAssertion) -> None:
    """Before a model is loaded."""
    plan = plan_suites(["longbench-v2"], Sources(path=Path(questions)))
    prompter = make_prompter(make_bytes_tokenizer(), with_template=False)
    needed = sorted(len(sample.content) + sample.max_new_tokens for sample in plan.samples)
    check_samples(plan, prompter, needed[0])
    assert explain(check_samples, plan, prompter, needed[0] - 1) == snapshot


@pytest.mark.full
def test_what_is_too_long_is_listed_and_the_rest_answered(model: str, questions: str, tmp_path: Path) -> None:
    words = ("--suite", "longbench-v2", "--path", questions, "--output", str(tmp_path / "found"))
    result = succeed("evaluate", model, *WORDS, *words, "--html", str(tmp_path / "page.html"))
    findings = json.loads(result.stdout)
    assert not find_undocumented("ulysses evaluate", findings)
    assert [(row["task"], row["n"]) for row in findings["scores"]] == [("longbench-v2", 1)]
    (each,) = findings["too_long"]
    assert (each["id"], each["file_id"]) == ("longbench-v2/0/0", "long")
    assert each["tokens"] > 4096
    assert "longbench-v2/0/0, long" in (tmp_path / "page.html").read_text()
    refused = run("evaluate", model, *WORDS, *words, "--max-length", "10")
    assert refused.returncode == 2
    assert "10 tokens " in json.loads(refused.stdout)["problems"][0]["message"]


def count_cached(model_type: str, ring_size: int = 1) -> int:
    """Returns the bytes of this rank's cache after a prompt and six tokens."""
    heads, ring = make_axes(ring_size)
    forward = PlainForward(model_type, make_axis(), 1, heads, ring)
    generator = Generator(forward, make_axis(), heads=heads, ring=ring)
    generator.read(make_prompts("one"))
    generator.generate(6)
    return generator.cache.count_bytes()


@pytest.mark.parametrize(
    ("model_type", "ring_size"),
    [
        ("gemma2", 1),
        *(pytest.param(each, 1, marks=pytest.mark.full) for each in ("llama", "qwen3_next", "bamba", "lfm2", "zamba2")),
        pytest.param("llama", 3, marks=pytest.mark.check),
    ],
)
def test_the_predicted_cache_is_the_counted_one(model_type: str, ring_size: int) -> None:
    """Each of three ranks of a ring has all heads and a third of the prompt."""
    num_ranks, shape = max(2, ring_size), read_model_shape(make(model_type, "eager").config.to_dict(), "test")
    predicted = count_cache_bytes(shape, len(make_prompts("one")[0]), num_ranks, 4, 6)
    assert max(run_on_ranks(num_ranks, count_cached, model_type, ring_size)) == pytest.approx(predicted, rel=0.05)


def test_layers_that_need_tokens_in_order_have_no_ring(snapshot: SnapshotAssertion) -> None:
    question = evaluating.ModelQuestion(3, 3, 64, "float32", "bytes", "cpu", trust_remote_code=False)
    config = make("lfm2", "eager").config.to_dict()
    assert explain(evaluating.prepare_model, evaluating.FoundModel("m"), config, question, online=False) == snapshot


@pytest.mark.parametrize(
    "weights", [pytest.param((), marks=pytest.mark.check), pytest.param(("--offload-weights",), marks=pytest.mark.full)]
)
def test_one_rank_answers_and_an_untrained_model_finds_nothing(
    model: str, weights: tuple[str, ...], tmp_path: Path
) -> None:
    words = ("--suite", "niah_single_1", "--max-length", "1200", "--samples", "1", "--output", str(tmp_path))
    result = succeed("evaluate", model, *WORDS, *words, *weights)
    (row,) = json.loads(result.stdout)["scores"]
    assert (row["task"], row["length"], row["n"], row["score"]) == ("niah_single_1", 1200, 1, 0.0)


@pytest.mark.full
def test_any_number_of_ranks_answers_alike(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An untrained model finds nothing. A second start answers nothing again."""
    found: list[dict[str, Any]] = []
    words = ("--suite", "niah_single_1,vt", "--max-length", "1200", "--samples", "2")
    for sp_size in ("1", "2", "3", "4"):  # three ranks are a ring; of four, two share a kv head
        page, folder = tmp_path / f"{sp_size}.html", tmp_path / sp_size
        options = ("--sp-size", sp_size, "--html", str(page), "--output", str(folder))
        result = succeed("evaluate", model, *WORDS, *words, *options)
        scores = json.loads(result.stdout)["scores"]
        assert [(row["task"], row["n"], row["score"]) for row in scores] == [("niah_single_1", 2, 0.0), ("vt", 2, 0.0)]
        found.append(json.loads((folder / "quality.json").read_text()))
        assert "<svg" in page.read_text()
    first, second, *others = ([(each["prompt_hash"], each["answer"]) for each in one["results"]] for one in found)
    assert all(each == first for each in (second, *others))
    lines = (tmp_path / "2" / "results.jsonl").read_text().splitlines()
    (tmp_path / "2" / "results.jsonl").write_text("\n".join(lines[:3]) + '\n{"id": "unfin')
    run("evaluate", model, *WORDS, *words, "--sp-size", "2", "--output", str(tmp_path / "2"))
    assert "going on: 2 questions answered already" in capfd.readouterr().err
    again = json.loads((tmp_path / "2" / "quality.json").read_text())["results"]
    assert sorted(each["answer"] for each in again) == sorted(answer for _, answer in second)
    few = ("--suite", "vt", "--max-length", "1300", "--samples", "1", "--sp-size", "2", "--output", str(tmp_path / "2"))
    assert run("evaluate", model, *WORDS, *few).returncode == 0
    assert "question 1 of 1, vt" in capfd.readouterr().err, "other lengths of this folder do not count"
    alone = json.loads((tmp_path / "2" / "quality.json").read_text())
    assert (len(alone["results"]), alone["earlier_seconds"]) == (1, 0)
    other = run("evaluate", model, *WORDS, *words, "--seed", "1", "--output", str(tmp_path / "2"))
    assert other.returncode == 2
    assert "seed differ" in other.stdout


@pytest.mark.full
def test_a_killed_evaluation_goes_on_where_it_was(model: str, tmp_path: Path) -> None:
    """The command is killed, and its ranks end. The next start asks what is left, and both starts are paid for."""
    tasks = ("--suite", "niah_single_1", "--max-length", "600,1200", "--samples", "6", "--price", "3")
    words = ("evaluate", model, *WORDS, *tasks, "--sp-size", "2", "--output")
    succeed(*words, str(tmp_path / "whole"))
    lines = tmp_path / "killed" / "results.jsonl"
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = subprocess.Popen([sys.executable, "-m", "ulysses_cli", *words, str(tmp_path / "killed")], env=environ)
    while not lines.exists() or lines.read_bytes().count(b"\n") < 4:
        assert command.poll() is None
        time.sleep(0.01)
    processes = {command.pid, *(each.pid for each in psutil.Process(command.pid).children(recursive=True))}
    command.kill()
    command.wait()
    wait_for_end(processes, 15)
    kept = lines.read_bytes()
    num_kept = kept.count(b"\n") - 1
    assert 3 <= num_kept < 12
    succeed(*words, str(tmp_path / "killed"))
    assert lines.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    first, second = (json.loads((tmp_path / name / "quality.json").read_text()) for name in ("whole", "killed"))
    answers = [
        [(each["id"], each["prompt_hash"], each["answer"]) for each in one["results"]] for one in (first, second)
    ]
    assert answers[0] == answers[1]
    spent = [json.loads(line)["spent"] for line in lines.read_text().splitlines()[1:]]
    assert second["earlier_seconds"] == pytest.approx(sum(spent[:num_kept]), abs=0.02)
    assert first["earlier_seconds"] == 0 < second["earlier_seconds"]
    seconds = second["earlier_seconds"] + second["seconds"]
    assert second["usd"] == pytest.approx(seconds / 3600 * 2 * 3)


@pytest.mark.full
def test_retrieval_is_asked_beside_the_whole_context(model: str, tmp_path: Path) -> None:
    """An untrained model knows nothing; what BM25 finds is known all the same."""
    words = ("--suite", "niah_multikey_1", "--max-length", "2400", "--samples", "1", "--sp-size", "2", "--price", "3")
    options = ("--against-retrieval", "--budget", "512,4Ki", "--output", str(tmp_path), "--html", "page.html")
    result = succeed("evaluate", model, *WORDS, *words, *options, cwd=tmp_path)
    findings = json.loads(result.stdout)
    rows = findings["retrieval"]["rows"]
    assert [row["way"] for row in rows] == ["none", "bm25-256-512", "bm25-512-512", "whole", "oracle"]
    assert {(row["n"], row["score"]) for row in rows} == {(1, 0.0)}
    by_way = {row["way"]: row for row in rows}
    assert by_way["none"]["recall"] == 0
    assert by_way["bm25-256-512"]["recall"] == by_way["oracle"]["recall"] == 1
    tokens = [by_way[way]["prompt_tokens"] for way in ("none", "oracle", "bm25-256-512", "whole")]
    assert tokens == sorted(tokens)
    assert all(row["usd"] == pytest.approx(row["seconds"] * 2 * 3 / 3600) for row in rows)
    assert [row["n"] for row in findings["scores"]] == [1], "scores are those of the whole context"
    assert "BM25, 256 of 512" in (tmp_path / "page.html").read_text()
