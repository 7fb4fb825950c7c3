"""Loss by position on the user's documents, on every layout, against the plain model."""

import json
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.commands import run, succeed
from support.rank_pool import run_on_ranks
from support.refusals import explain
from support.tiers import mark_by
from support.training import save_bytes_model
from syrupy.assertion import SnapshotAssertion
from torch.nn import functional
from transformers import AutoModelForCausalLM

from ulysses_cli.commands.children.evaluating import FoundModel, ModelQuestion, prepare_model
from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.evaluate.summary import (
    compare_losses,
    describe_document,
    estimate_normal_mean,
    find_student_quantile,
    list_bounds,
    summarize_losses,
)
from ulysses_cli.plan.recipe.loader import parse_recipe
from ulysses_cli.plan.resolved import choose_layout
from ulysses_cli.prove.quality.documents import load_for_evaluation, read_documents
from ulysses_cli.train.document_losses import DocumentRows, measure_documents
from ulysses_cli.train.model.loading import load_model_config, read_shape

LENGTHS, NUMBER = (301, 600), 3
WORDS = ("--tokenizer", "bytes", "--dtype", "float32", "--device", "cpu", "--format", "json", "--suite", "loss")
# Three heads go on two ranks on a ring alone.
MODELS: dict[str, dict[str, int]] = {
    "model": {},
    "other": {},
    "three heads": {"num_attention_heads": 3, "num_key_value_heads": 3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("losses")
    for seed, (name, heads) in enumerate(MODELS.items()):
        save_bytes_model(folder / name, seed, initializer_range=0.3, max_position_embeddings=2048, **heads)
    random = Random(0)
    texts = ["".join(random.choices("abcdef ", k=size)) for size in (100, 400, 700, 350, 800, 900)]
    rows = [{"text": text} for text in texts[:-1]]
    rows.append({"messages": [{"role": "user", "content": texts[-1]}, {"role": "assistant", "content": "yes"}]})
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    return folder


def read(folder: Path) -> Any:
    return read_documents([{"path": str(folder / "documents.jsonl")}], make_bytes_tokenizer(), LENGTHS, NUMBER)


def test_documents_are_cut_to_exact_lengths_and_the_rest_is_said(folder: Path, snapshot: SnapshotAssertion) -> None:
    found = read(folder)
    assert [(each.length, each.index, each.source[-2:]) for each in found.documents] == [
        (301, 0, ":2"), (301, 1, ":3"), (301, 2, ":4"), (600, 0, ":3"), (600, 1, ":5")
    ]  # fmt: skip
    assert {len(each.tokens) for each in found.documents} == {301, 600}
    assert found.notes == snapshot(name="notes")
    tail = DocumentRows(found.documents).read(0, 290, 310)
    assert tail.labels.tolist() == [*found.documents[0].tokens[291:].tolist(), *[-100] * 10]
    assert tail.positions.tolist() == [*range(290, 301), *range(9)]
    too_long = [{"path": str(folder / "documents.jsonl")}], make_bytes_tokenizer(), [5000], 1
    assert explain(read_documents, *too_long) == snapshot(name="too long")


def measure(text: str, folder: str, done: list[str]) -> list[dict[str, Any]]:
    model = load_for_evaluation(text, torch.device("cpu"), lambda _: None)
    lines: list[dict[str, Any]] = []
    measure_documents(model.engine, model.batching, read(Path(folder)).documents, done, lines.append)
    return lines


def make_text(name: str, sp_size: int, num_ranks: int) -> str:
    question = ModelQuestion(sp_size, num_ranks, max(LENGTHS), "float32", "bytes", "cpu", False)
    return prepare_model(FoundModel(name), None, question, online=False)[0]


def count_ring(text: str) -> int:
    recipe = parse_recipe(text, "test", []).recipe
    return choose_layout(recipe, read_shape(recipe, load_model_config(recipe), make_bytes_tokenizer())).ring_size


@torch.no_grad()
def compute_plain(folder: Path, name: str = "model") -> dict[str, list[float]]:
    """The mean loss of all positions and of each bucket, by the model of transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    means = {}
    for document in read(folder).documents:
        tokens = torch.from_numpy(document.tokens)[None]
        losses = functional.cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:], reduction="none")
        bounds = [0, *list_bounds(document.length)]
        parts = [losses[low:high].mean().item() for low, high in pairwise(bounds)]
        means[document.name] = [losses.mean().item(), *parts]
    return means


@pytest.mark.parametrize(
    ("name", "sp_size", "num_ranks"),
    [
        pytest.param(*case, marks=mark_by(False, case != ("model", 1, 2)))
        for case in (("model", 2, 2), ("model", 1, 2), ("three heads", 2, 2))
    ],
)
def test_losses_are_those_of_the_plain_model(folder: Path, name: str, sp_size: int, num_ranks: int) -> None:
    expected = compute_plain(folder, name)
    text = make_text(str(folder / name), sp_size, num_ranks)
    assert count_ring(text) == (2 if name == "three heads" else 1)
    for lines in run_on_ranks(num_ranks, measure, text, str(folder), ["loss/301/1"]):
        found = {line["id"]: [line["loss"], *(part["loss"] for part in line["by_position"])] for line in lines}
        assert found.keys() == expected.keys() - {"loss/301/1"}
        for document, means in found.items():
            assert means == pytest.approx(expected[document], abs=2e-6)
        assert {line["tokens"] for line in lines} == {300, 599}


def make_line(index: int, first: float, second: float) -> dict[str, Any]:
    parts = [
        {"from": 0, "to": 256, "loss": first, "tokens": 256},
        {"from": 256, "to": 300, "loss": second, "tokens": 43},
    ]
    return {"id": f"loss/300/{index}", "length": 300, "loss": (first + second) / 2, "by_position": parts}


def test_intervals_are_students_over_documents() -> None:
    assert [round(find_student_quantile(each), 3) for each in (1, 2, 3, 9, 30, 120)] == [
        12.706, 4.303, 3.182, 2.262, 2.042, 1.98
    ]  # fmt: skip
    assert estimate_normal_mean([1.0, 2.0, 3.0]) == pytest.approx(
        (2, 2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), abs=1e-4
    )
    lines = [make_line(0, 1.0, 2.0), make_line(1, 3.0, 2.0)]
    whole, first, second = summarize_losses(lines)
    assert (whole["from"], whole["to"], whole["loss"], whole["n"]) == (0, 300, 2.0, 2)
    assert (first["loss"], second["loss"]) == (2, 2)
    assert second["low"] == second["high"] == 2, "documents that agree"
    better = [make_line(0, 0.5, 1.5), make_line(1, 2.5, 1.5)]
    changes = compare_losses(lines, better)
    assert [(row["loss"], row["low"], row["high"]) for row in changes] == [pytest.approx((-0.5, -0.5, -0.5))] * 3
    (alone, *_) = summarize_losses(lines[:1])
    assert (alone["loss"], alone["low"], alone["high"]) == (1.5, None, None)


def test_a_document_with_targets_in_one_bucket_counts_there() -> None:
    """As those of a chat or of a completion often lie."""
    alone = ({"sum": 0.0, "tokens": 0}, {"sum": 0.0, "tokens": 0}, {"sum": 20.0, "tokens": 10})
    both = ({"sum": 0.0, "tokens": 0}, {"sum": 10.0, "tokens": 10}, {"sum": 90.0, "tokens": 10})
    lines = [
        describe_document(f"loss/1024/{index}", "chats", "", 1024, index, sums)
        for index, sums in enumerate([alone] * 10 + [both])
    ]
    expected = [(0, 1024, 11, (10 * 2.0 + 5.0) / 11), (256, 512, 1, 1.0), (512, 1024, 11, (10 * 2.0 + 9.0) / 11)]
    found = [(row["from"], row["to"], row["n"], row["loss"]) for row in summarize_losses(lines)]
    assert found == [(*bucket, pytest.approx(mean)) for *bucket, mean in expected]
    assert [row["n"] for row in compare_losses(lines, lines)] == [11, 1, 11]
    short = describe_document("loss/200/0", "chats", "", 200, 0, [{"sum": 30.0, "tokens": 10}])
    assert [(row["from"], row["to"], row["n"]) for row in summarize_losses([short])] == [(0, 200, 1)]


@pytest.mark.full
def test_two_models_are_compared_document_by_document(folder: Path, tmp_path: Path) -> None:
    words = (
        "--path", "documents.jsonl", "--max-length", "301,600", "--samples", "3", "--sp-size", "2", "--against",
        "other",
    )  # fmt: skip
    output = ("--output", str(tmp_path / "out"), "--html", str(tmp_path / "page.html"))
    result = succeed("evaluate", "model", *WORDS, *words, *output, cwd=folder)
    findings = json.loads(result.stdout)
    assert [(row["length"], row["to"], row["n"]) for row in findings["losses"]] == [
        (301, 301, 3), (301, 256, 3), (301, 301, 3), (600, 600, 2), (600, 256, 2), (600, 512, 2), (600, 600, 2)
    ]  # fmt: skip
    pairs = zip(findings["losses"], findings["against"]["losses"], findings["loss_differences"], strict=True)
    for own, other, change in pairs:
        assert change["loss"] == pytest.approx(own["loss"] - other["loss"])
        assert change["low"] < change["loss"] < change["high"]
    expected = compute_plain(folder)
    assert findings["losses"][3]["loss"] == pytest.approx(
        sum(expected[f"loss/600/{at}"][0] for at in (0, 1)) / 2, abs=2e-6
    )
    assert "Loss by position" in (tmp_path / "page.html").read_text()
    written = (tmp_path / "out" / "results.jsonl").read_text()
    again = run("evaluate", "model", *WORDS, *words, *output, cwd=folder)
    assert (tmp_path / "out" / "results.jsonl").read_text() == written, "nothing is measured again"
    assert json.loads(again.stdout)["losses"] == findings["losses"]
