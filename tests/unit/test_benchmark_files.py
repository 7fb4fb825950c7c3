"""How benchmarks of files are asked: templates that prompts hold already, conversations, lengths, odd characters."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.prompters import make_prompter
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.evaluate.files import list_file_notes, read_suite
from ulysses_cli.evaluate.prompts import Prompter
from ulysses_cli.evaluate.sample import Sample
from ulysses_cli.evaluate.scoring import score
from ulysses_cli.evaluate.summary import summarize
from ulysses_cli.train.generation import questions

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}" + TEMPLATE


def make_thinker(template: str | None = TEMPLATE) -> Prompter:
    tokenizer = make_bytes_tokenizer()
    tokenizer.chat_template = template
    return make_prompter(tokenizer)


def read(suite: str, file: Path, *rows: dict[str, Any]) -> list[Sample]:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return read_suite(suite, file)


def make_result(sample: Sample, index: int, tokens: int, score: float) -> dict[str, Any]:
    return {
        "id": f"{sample.task}/0/{index}", "task": sample.task, "length": 0, "index": index, "prompt_tokens": tokens,
        "depths": [], "score": score, "answer": "x", "is_greedy": None, "seconds": 0.1, "facts": dict(sample.facts),
    }  # fmt: skip


HEADS = ("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n", "<|im_start|>user\n", "[INST] ")
HEADS += ("<start_of_turn>user\n", "A chat between a curious user and an assistant. USER: ")


@pytest.mark.parametrize("head", HEADS)
def test_a_prompt_in_a_template_is_not_wrapped_again(head: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    rows = [{"index": at, "input": text, "outputs": ["7"]} for at, text in enumerate((f"{head}Find it.", "Find it."))]
    samples = read("ruler-files", tmp_path / "vt.jsonl", *rows)
    texts = [make_thinker().render(sample)[0] for sample in samples]
    assert texts == [f"{head}Find it.", "<user>Find it.</user><assistant>"]
    assert list_file_notes("ruler-files", tmp_path, samples) == snapshot(name="notes")


def test_rows_of_ruler_belong_to_the_length_that_their_file_gives(tmp_path: Path) -> None:
    """This model's tokenizer makes more of them than the one that RULER was given, and than the next power of two."""
    rows = [{"index": at, "input": "x", "outputs": ["7"], "length": 4000 + at} for at in range(2)]
    first, second = read("ruler-files", tmp_path / "niah_single_1.jsonl", *rows)
    found = summarize([make_result(first, 0, 4090, 1.0), make_result(second, 1, 5000, 0.0)])
    assert [(row["length"], row["n"], row["score"]) for row in found["scores"]] == [(4096, 2, 0.5)]
    assert found["effective_length"] == {"own": 4096}


def test_classes_of_length_have_no_effective_length(tmp_path: Path) -> None:
    """A longer class holds other questions, which may be easier or harder."""
    row = {"input": "q", "context": "c", "answers": ["a"], "dataset": "qasper"}
    (sample,) = read("longbench", tmp_path / "qasper.jsonl", row)
    results = [make_result(sample, at, tokens, score) for at, (tokens, score) in enumerate(((900, 1.0), (3000, 0.0)))]
    seeded = [
        {**make_result(sample, at, length, 1.0), "task": "niah", "length": length, "facts": {}}
        for at, length in enumerate((1024, 2048, 4096))
    ]
    assert summarize(results)["effective_length"] == {}
    assert [row["length"] for row in summarize(results)["mean"]] == [1024, 4096]
    assert summarize([*results, *seeded])["effective_length"] == {"own": 4096}


NQ = {
    "question": "who?", "answers": ["Ann", ["Bo"]], "id": "q1", "s_pop": 999,
    "ctxs": [{"title": "T", "text": "Ann did.", "id": "1"}, {"title": "U", "text": "No.", "id": "2"}],
}  # fmt: skip
MARCO = {
    "qid": "q2", "query": "why?",
    "ctxs": [{"id": name, "text": "a", "label": label} for name, label in (("31", 0), ("5", 1), ("9", 3))],
}  # fmt: skip
OBJECT = {
    "context": '{"k1": "v1", "k2": "v2"}', "question": "k2", "answer": "v2", "depth": 0.5, "num_kvs": 2, "demos": [],
}  # fmt: skip


def test_the_files_of_helmet_are_asked_with_their_documents(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Rows as HELMET's data.py reads them."""
    (nq,) = read("helmet-rag", tmp_path / "popqa_test_1000_k20_dep6.jsonl", NQ)
    assert (nq.task, nq.references, nq.groups) == ("popqa", ("Ann", "Bo"), {"popularity": "below 1,000"})
    assert nq.content.endswith("Document (Title: U): No.\n\nQuestion: who?")
    assert [score(nq, answer) for answer in ("bo, I think", "\nMr. Bo\nnot Ann", "Cy\nAnn")] == [1, 1, 0]
    (marco,) = read("helmet-rerank", tmp_path / "test_reranking_data_k10_dep3.jsonl", MARCO)
    assert (marco.task, marco.references) == ("msmarco", ("9", "5"))
    assert marco.content.endswith("[ID: 9] Document: a\n\nQuery: why?")
    assert [score(marco, answer) for answer in ("ID9 > ID5 > ID31", "31 > 7")] == [1, 0]
    (found,) = read("helmet-json", tmp_path / "test_k50_dep6.jsonl", OBJECT)
    assert (found.task, score(found, "v2."), score(found, "v1")) == ("json_kv", 1, 0)
    for sample in (nq, marco, found):
        begin, end = sample.context or (0, 0)
        assert sample.content[begin:end] in sample.content[begin:]
        assert "?" not in sample.content[begin:end], "the question is not part of the haystack"
    bad = {"question": "", "answers": []}
    assert explain(read, "helmet-rag", tmp_path / "test_k50_dep6.jsonl", bad) == snapshot


MESSAGES = [("user", "Write a poem."), ("assistant", "Roses."), ("user", "Begin with zz. Give me the first poem.")]


def make_conversation(messages: list[tuple[str, str]]) -> dict[str, Any]:
    prompt = json.dumps([{"role": role, "content": text} for role, text in messages])
    return {"prompt": prompt, "answer": "zz Roses.", "random_string_to_prepend": "zz ", "n_needles": 4}


def test_a_conversation_passes_through_the_template_by_its_messages(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    (sample,) = read("mrcr", tmp_path / "mrcr.jsonl", make_conversation(MESSAGES))
    assert sample.task == "mrcr-4"
    wrapped = "".join(f"<{role}>{text}</{role}>" for role, text in MESSAGES)
    assert make_thinker().render(sample) == (f"{wrapped}<assistant>", None)
    plain = "\n\n".join(f"{role.capitalize()}: {text}" for role, text in MESSAGES)
    assert make_thinker(None).render(sample) == (plain, 0)
    (late,) = read("mrcr", tmp_path / "mrcr.jsonl", make_conversation(MESSAGES[1:]))
    assert explain(make_thinker(STRICT).render, late) == snapshot


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85"])
def test_a_line_of_json_ends_at_a_line_feed_alone(mark: str, tmp_path: Path) -> None:
    """str.splitlines would end it at these, too, which JSON allows in a string."""
    row = {"prompt": f"a{mark}b", "answer_nodes": ["n"], "problem_type": "BFS"}
    first, second = read("graphwalks", tmp_path / "g.jsonl", row, {**row, "problem_type": "Parents"})
    assert first.content == f"a{mark}b"
    assert (first.task, second.task) == ("graphwalks-bfs", "graphwalks-parents")


@pytest.mark.parametrize(
    ("suite", "name", "row", "has_one"),
    [
        ("ruler-files", "niah_single_1", {"input": "x", "outputs": ["7"]}, True),
        ("ruler-files", "niah_multivalue", {"input": "x", "outputs": ["7", "8"]}, False),
        ("ruler-files", "qa_1", {"input": "x", "outputs": ["7"]}, False),
        ("infinitebench", "passkey", {"context": "c", "input": "q", "answer": ["7"]}, True),
        ("infinitebench", "kv_retrieval", {"context": "c", "input": "q", "answer": ["k"]}, True),
        ("infinitebench", "longbook_qa_eng", {"context": "c", "input": "q", "answer": ["a man"]}, False),
        ("longbench", "qasper", {"context": "c", "input": "q", "answers": ["a"]}, False),
    ],
)
def test_an_answer_is_teacher_forced_where_one_text_is_right(
    suite: str, name: str, row: dict[str, Any], has_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sample,) = read(suite, tmp_path / f"{name}.jsonl", row)
    asked: list[Any] = []
    monkeypatch.setattr(questions, "answer_questions", lambda _, walk, *__, **___: asked.extend(walk))
    prompter = make_thinker()
    questions.ask_questions(None, questions.Quiz([prompter.make(sample)], prompter, (), asked.append), ())
    assert [each.answer for each in asked] == [tuple(f" {sample.references[0]}".encode()) if has_one else ()]
