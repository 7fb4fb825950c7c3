"""Retrieval beside length: BM25 against its formula, chunks, budgets, recall, and what is summed up."""

import math
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from support.page_words import list_words as list_page
from support.prompters import make_prompter
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.evaluate.prompts import TaskPrompt
from ulysses_cli.evaluate.retrieval import (
    CHUNKS,
    NONE,
    ORACLE,
    Passage,
    check_retrieval,
    choose_chunks,
    compute_recall,
    cut_units,
    join_neighbours,
    join_units,
    list_words,
    make_ways,
    rank_chunks,
    summarize_retrieval,
)
from ulysses_cli.evaluate.sample import Sample
from ulysses_cli.evaluate.suites import Amount, Sources, make_prompts, plan_suites
from ulysses_cli.evaluate.summary import summarize
from ulysses_cli.report.proofs import format_quality, make_quality_page

PROMPTER = make_prompter(make_bytes_tokenizer(), with_template=False)


def compute_bm25(texts: list[str], query: str, k1: float = 1.5, b: float = 0.75) -> list[float]:
    """Lucene's BM25, term by term."""
    documents = [list_words(text) for text in texts]
    average = sum(map(len, documents)) / len(documents)
    scores = []
    for words in documents:
        total = 0.0
        for term in list_words(query):
            having = sum(term in other for other in documents)
            times = words.count(term)
            weight = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
            total += weight * times / (times + k1 * (1 - b + b * len(words) / average))
        scores.append(total)
    return scores


@pytest.mark.parametrize("seed", range(5))
def test_chunks_are_ranked_as_the_formula_ranks_them(seed: int) -> None:
    random = Random(seed)
    texts = [" ".join(random.choices("abcdefghijklm", k=random.randrange(3, 30))) for _ in range(40)]
    query = "a c zz k c"
    scores = compute_bm25(texts, query)
    order = rank_chunks(texts, query)
    assert sorted(order) == list(range(40))
    ranked = [scores[at] for at in order]
    assert all(first >= second - 1e-5 for first, second in pairwise(ranked))
    assert ranked[0] > ranked[-1]


def test_a_context_or_a_question_without_words_keeps_the_order() -> None:
    assert rank_chunks(["...", "!"], "a") == [0, 1]
    assert rank_chunks(["a b", "c"], "?") == [0, 1]
    assert list_words("Die Äpfel: 红球 x1") == ["die", "äpfel", "红", "球", "x1"]


def test_chunks_cover_the_text_and_keep_to_their_size() -> None:
    random = Random(0)
    text = "".join(random.choice("abc  .\n") for _ in range(3000)) + "x" * 400
    units = cut_units(text, PROMPTER, 64)
    assert "".join(text[slice(*unit.span)] for unit in units) == text
    for size in (64, 200):
        chunks = join_units(units, size)
        assert "".join(text[slice(*chunk.span)] for chunk in chunks) == text
        assert all(chunk.num_tokens == chunk.span[1] - chunk.span[0] <= size for chunk in chunks)
        assert all(first.num_tokens + 64 > size or second.num_tokens for first, second in pairwise(chunks))


def test_the_best_chunks_fill_the_budget_and_stand_in_the_order_of_the_text() -> None:
    chunks = [Passage((at * 10, at * 10 + 10), 10) for at in range(5)]
    assert choose_chunks(chunks, [4, 0, 1, 2, 3], 30) == [(0, 10), (10, 20), (40, 50)]
    assert join_neighbours([(0, 10), (10, 20), (40, 50)]) == [(0, 20), (40, 50)]
    assert compute_recall([(5, 15), (18, 22)], [(0, 10), (10, 20)]) == 0.5, "evidence may lie across two chunks"
    assert compute_recall([], [(0, 10)]) is None


def make_prompt(task: str, length: int = 6000) -> TaskPrompt:
    (prompt,) = make_prompts(plan_suites([task], Sources()), PROMPTER, Amount((length,), 1), lambda _: None)
    return prompt


@pytest.mark.parametrize("task", ["niah_multikey_1", "niah_multiquery", "vt", "graphs"])
def test_ways_replace_the_context_and_nothing_else(task: str) -> None:
    whole = make_prompt(task)
    sample = whole.sample
    first, last = sample.context
    assert all(first <= begin < end <= last for begin, end in sample.evidence)
    ways = {way.way: way for way in make_ways(whole, PROMPTER, (1024, 4096, 8192))}
    sizes = [(size, budget) for size in CHUNKS for budget in (1024, 4096) if size <= budget]
    assert list(ways) == [NONE, *(f"bm25-{size}-{budget}" for size, budget in sizes), ORACLE]
    assert len({way.name for way in (whole, *ways.values())}) == len(ways) + 1
    for name, way in ways.items():
        assert way.sample.content.startswith(sample.content[:first])
        assert way.sample.content.endswith(sample.content[last:])
        shown = len(way.sample.content) - first - (len(sample.content) - last)
        facts = way.sample.facts["retrieval"]
        if name == NONE:
            assert (shown, facts["recall"]) == (0, 0)
        elif name == ORACLE:
            assert facts["recall"] == 1
            assert all(sample.content[slice(*span)].strip() in way.sample.content for span in sample.evidence)
        else:
            assert shown <= facts["budget_tokens"] + 2 * len(sample.content) // facts["chunk_tokens"]
            assert shown >= facts["budget_tokens"] - facts["chunk_tokens"] - 64
    if task == "niah_multikey_1":
        assert ways["bm25-256-1024"].sample.facts["retrieval"]["recall"] == 1, "a needle flatters BM25"


def test_a_task_without_known_evidence_has_no_oracle() -> None:
    assert ORACLE not in [way.way for way in make_ways(make_prompt("cwe"), PROMPTER, (1024,))]


def make_result(way: str, index: int, score: float, recall: float | None = None) -> dict[str, Any]:
    facts = {} if way == "whole" else {"facts": {"retrieval": {"way": way.partition("-")[0], "recall": recall}}}
    if way.startswith("bm25"):
        facts["facts"]["retrieval"] |= {"way": way, "chunk_tokens": 256, "budget_tokens": 4096}
    name = f"qa/8192/{index}" + ("" if way == "whole" else f"/{way}")
    return {
        "id": name, "task": "qa", "length": 8192, "index": index, "score": score, "seconds": 2.0,
        "prompt_tokens": 8000 if way == "whole" else 500, **facts,
    }  # fmt: skip


RESULTS = [make_result("whole", at, float(at < 3)) for at in range(4)]
RESULTS += [make_result("none", at, float(at == 0), 0.0) for at in range(4)]
RESULTS += [make_result("bm25-256-4096", at, float(at < 2), 0.5 * (at < 2)) for at in range(4)]


def test_what_cannot_be_asked_is_said(monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion) -> None:
    bare = Sample("ruler", "text and question", ("7",), "all", 8)
    assert check_retrieval([], True) == []
    said = [*check_retrieval([bare], True), explain(check_retrieval, [bare], False)]
    monkeypatch.setattr("ulysses_cli.evaluate.retrieval.find_spec", lambda _: None)
    assert [*said, explain(check_retrieval, [], True)] == snapshot


def test_losses_retrieval_and_lm_evals_tasks_are_shown(snapshot: SnapshotAssertion) -> None:
    """A question costs 2 s on 4 GPUs at USD 9 an hour each."""
    results = [{**result, "depths": [], "answer": "x", "is_greedy": None} for result in RESULTS]
    bucket = {"length": 300, "from": 0, "to": 300, "n": 2, "loss": 1.5, "low": 1.25, "high": 1.75}
    parts = [{**bucket, "to": 256, "loss": 1.75}, {**bucket, "from": 256, "low": None, "high": None}]
    metric = {"task": "own", "metric": "acc", "filter": "none", "n": 5, "value": 0.5, "stderr": 0.1}
    findings = {
        **summarize([result for result in results if "facts" not in result]),
        "subject": "model", "seconds": 3.0, "num_ranks": 2, "notes": ["a note"],
        "losses": [bucket, *parts], "loss_differences": [{**bucket, "loss": -0.25}],
        "retrieval": summarize_retrieval(results, 4, 9.0), "lm_eval": [metric],
        "against": {"lm_eval": [{**metric, "value": 0.25}]},
    }  # fmt: skip
    assert format_quality(findings).splitlines() == snapshot(name="text")
    assert list_page(make_quality_page(findings)) == snapshot(name="page")
