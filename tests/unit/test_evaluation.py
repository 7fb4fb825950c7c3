"""Tasks from a seed at exact lengths, scorers by the rule of each benchmark, files, statistics."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from string import ascii_letters
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.prompters import make_prompter
from support.refusals import explain
from support.tiers import sample as sample_cases
from support.tokenizers_trained import train, wrap
from syrupy.assertion import SnapshotAssertion
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ulysses_cli.commands.children.evaluating import find_place
from ulysses_cli.commands.children.training import Machine
from ulysses_cli.data.tokenizing.pieces import list_parting_letters
from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.evaluate.files import read_suite
from ulysses_cli.evaluate.results import FROM_FILES, TimeLeft
from ulysses_cli.evaluate.sample import Sample
from ulysses_cli.evaluate.scoring import score
from ulysses_cli.evaluate.suites import Amount, Sources, check_lengths, make_prompts, order_alike, plan_suites
from ulysses_cli.evaluate.summary import (
    compare_all,
    compare_pairs,
    compare_results,
    estimate_mean,
    find_effective_lengths,
    summarize,
    weigh_mean,
)
from ulysses_cli.report.proofs import format_quality, make_quality_page
from ulysses_cli.train.generation.questions import Question, _collect


def ask(metric: Any, answer: str, *references: str, **facts: Any) -> float:
    return score(Sample("task", "", references, metric, 8, facts=facts), answer)


@pytest.mark.parametrize(
    ("metric", "answer", "references", "expected"),
    [
        ("all", "They are 12 and\x00 ABC", ("12", "abc", "7"), 2 / 3),
        ("part", "It was Paris.", ("paris", "London"), 1), ("part", "It was Rome.", ("paris", "London"), 0),
        ("line", "It is:\n#define  A 3", ("#define A\t\t3",), 1), ("line", "#define B 3", ("#define A\t\t3",), 0),
        ("first_numbers", "1, 4, 9", ("1", "4", "8", "2"), 0.5),
        ("none", "None of them.", ("none",), 1), ("none", "None, or 1234567", ("none",), 0),
        ("set_f1", "Thoughts\nFinal Answer: [a, b]", ("b", "c"), 0.5), ("set_f1", "Final Answer: []", (), 1),
        ("set_f1", "Final Answer: [a]", (), 0), ("set_f1", "a, b", ("a", "b"), 0),
        ("plain_part", "It is the “Times Square”.\n", ("a times square", "x"), 1),
        ("plain_part", "It is The Times-Square!", ("times square",), 0),
        ("share_right", "Paragraph 3, or 4", ("Paragraph 3",), 0.5),
        ("sentence", "*The correct answer is (B)*", ("B",), 1), ("sentence", "The correct answer is B", ("B",), 1),
        ("sentence", "B", ("B",), 0),
    ],
)  # fmt: skip
def test_an_answer_is_scored_by_its_rule(
    metric: str, answer: str, references: tuple[str, ...], expected: float
) -> None:
    assert ask(metric, answer, *references) == pytest.approx(expected)


def test_rules_that_depend_on_more_than_the_answer() -> None:
    assert ask("classes", "a dog and a cat", "cat", classes=("cat", "dog", "cow")) == 0.5
    assert ask("classes", "hot dog", "hot dog", classes=("dog", "hot dog")) == 1
    assert ask("ordered_copy", "k3j poem", "k3j poem", start="k3j ") == 1
    assert ask("ordered_copy", "poem", "k3j poem", start="k3j ") == 0
    assert 0 < ask("ordered_copy", "k3j poet", "k3j poem", start="k3j ") < 1
    labels = {"7": 3, "12": 1}  # of eleven, the others have 0
    ideal = 3 / 1 + 1 / math.log2(3)
    for answer, gain in (
        ("Ranking: 7 > 12 > 5", ideal), ("[ID: 12] > [ID: 7]", 1 + 3 / math.log2(3)), ("7, then 12", 1),
        ("2 > 3 > 4 > 5 > 6 > 8 > 9 > 10 > 11 > 13 > 7", 0), ("5 > 5 > 7", 3 / math.log2(3)), ("none", 0),
    ):  # fmt: skip
        assert ask("ndcg", answer, "7", "12", labels=labels) == pytest.approx(gain / ideal)
    first = Sample("t", "", ("cat",), "part", 8, first_line=True)
    assert score(first, "\ncat\ndog") == 1
    assert score(first, "dog\ncat") == 0


RIGHT = {"graphs": lambda references: f"Final Answer: [{', '.join(references)}]"}
PLAN = ["ruler", "niah_none", "graphs", "json_kv"]


@pytest.mark.parametrize("kind", sample_cases(["bytes", "llama3", "qwen", "gpt2", "o200k", "llama2"], quick=["llama3"]))
def test_samples_are_exactly_as_long_as_asked(kind: str) -> None:
    """With the answer's tokens, in one whole tokenization of the prompt. The same seed makes the same samples, and the
    right answer gets the full score."""
    tokenizer = make_bytes_tokenizer() if kind == "bytes" else wrap(train(kind))
    prompter = make_prompter(tokenizer, letters=list_parting_letters(tokenizer))
    plan, amount = plan_suites(PLAN, Sources()), Amount((2600,), 1)
    prompts = list(make_prompts(plan, prompter, amount, lambda _: None))
    assert len(prompts) == 14
    for prompt in prompts:
        sample = prompt.sample
        assert len(prompt.tokens) + sample.max_new_tokens == prompt.length
        assert prompt.tokens == tuple(prompter.encode(sample, in_one=True))
        assert score(sample, RIGHT.get(sample.task, " ".join)(sample.references)) == 1
        assert score(sample, "I do not know.") == 0
        if sample.metric == "all":
            assert all(reference in sample.content for reference in sample.references)
    again = make_prompts(plan, make_prompter(tokenizer), amount, lambda _: None, {prompts[0].name})
    assert [prompt.digest for prompt in again] == [prompt.digest for prompt in prompts[1:]]


TEXTS = ["ruler", "niah_none", "graphs", "json_kv", "code_recall", "qa_1"]


@pytest.mark.parametrize(
    "kind", sample_cases(["bytes", "llama3", "qwen", "gpt2", "o200k", "llama2"], quick=["qwen"], checked=["llama2"])
)
def test_words_have_the_tokens_of_the_whole_text(kind: str, tmp_path: Path) -> None:
    """Later samples are not tokenized as a whole. Words of the user's files may hold anything."""
    for name in "abc":
        lines = (f"def {name}{at}(x):\n\treturn  x + {at}  # été {name}\t\n" for at in range(150))
        (tmp_path / f"{name}.py").write_text("".join(lines))
    odd = "Don't e\u0301 \u200b\u4f60 \u597d 3 000  apples \n\n\t  tabs <|endoftext|> end"
    pairs = [{"question": "Who?", "answers": [{"text": "Ann"}]}]
    paragraphs = [{"context": f"{odd} {at} Ann {odd}", "qas": pairs} for at in range(60)]
    (tmp_path / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    tokenizer = make_bytes_tokenizer() if kind == "bytes" else wrap(train(kind))
    prompter = make_prompter(tokenizer, letters=list_parting_letters(tokenizer))
    assert prompter.tokens.is_exact == (kind != "llama2"), "else this tests nothing"
    plan = plan_suites(TEXTS, Sources(squad=tmp_path / "squad.json", code=tmp_path))
    for prompt in make_prompts(plan, prompter, Amount((2600, 4000), 3), lambda _: None):
        assert prompt.tokens == tuple(prompter.encode(prompt.sample, in_one=True))
        assert len(prompt.tokens) + prompt.sample.max_new_tokens == prompt.length
        assert score(prompt.sample, RIGHT.get(prompt.sample.task, " ".join)(prompt.sample.references)) == 1
        for mark, depth in zip(prompt.sample.evidence, prompt.depths, strict=True):
            before = prompter.tokens.tokenize([prompt.sample.content[: mark[0]]], False)[0]
            # an estimate where words are not exact, and this text has few words
            assert not prompter.tokens.is_exact or depth == pytest.approx(len(before) / len(prompt.tokens), abs=0.02)


def test_a_tokenizer_whose_words_join_is_found_out() -> None:
    """Tokens that cross spaces, and letters that are said to part: the proof of the first sample shows it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|\."), "isolated")
    (task,) = plan_suites(["niah_single_2"], Sources()).tasks
    text = task.make(Random(0), 0)(300).content
    trainer = trainers.BpeTrainer(vocab_size=800, initial_alphabet=[*map(chr, range(32, 127)), "\n"])
    made.train_from_iterator(text.split("\n"), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    assert list_parting_letters(tokenizer) == ""
    prompter = make_prompter(tokenizer, letters=ascii_letters)
    plan = plan_suites(["niah_single_2"], Sources())
    for prompt in make_prompts(plan, prompter, Amount((20_000,), 3), lambda _: None):
        assert prompt.tokens == tuple(prompter.encode(prompt.sample, in_one=True))
        assert len(prompt.tokens) + prompt.sample.max_new_tokens == prompt.length
    assert not prompter.tokens.is_exact


def test_what_is_missing_is_said(snapshot: SnapshotAssertion) -> None:
    assert [
        *plan_suites(["ruler"], Sources()).notes,
        explain(check_lengths, plan_suites(["vt"], Sources()), make_prompter(make_bytes_tokenizer()), Amount((300,))),
        explain(make_prompter, wrap(train("gpt2")), with_template=True),
    ] == snapshot


FILES: dict[str, tuple[str, dict[str, Any], str]] = {
    "ruler-files": ("niah_single_1.jsonl", {"index": 0, "input": "x", "outputs": ["7"], "length": 9}, "It is 7"),
    "longbench": (
        "trec.jsonl",
        {"input": "q", "context": "c", "answers": ["Cat"], "all_classes": ["Cat", "Dog"], "dataset": "trec"},
        "Cat\nDog",
    ),
    "longbench-v2": (
        "data.json",
        {
            "_id": "1", "domain": "d", "difficulty": "easy", "length": "short", "question": "q", "choice_A": "1",
            "choice_B": "2", "choice_C": "3", "choice_D": "4", "answer": "C", "context": "c",
        },
        "The correct answer is (C)",
    ),
    "infinitebench": (
        "longbook_choice_eng.jsonl",
        {"id": 1, "context": "c", "input": "q", "answer": ["two"], "options": ["one", "two", "three", "four"]},
        "B. two",
    ),
    "mrcr": (
        "mrcr.parquet",
        {"prompt": '[{"role": "user", "content": "q"}]', "answer": "zz poem", "random_string_to_prepend": "zz ",
         "n_needles": 2},
        "zz poem",
    ),
    "graphwalks": ("g.jsonl", {"prompt": "p", "answer_nodes": ["a", "b"]}, "Final Answer: [b, a]"),
}  # fmt: skip


@pytest.mark.parametrize("suite", FILES)
def test_a_benchmark_is_read_and_scored(suite: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    name, row, right = FILES[suite]
    file = tmp_path / name
    if file.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    else:
        file.write_text(json.dumps([row]) if file.suffix == ".json" else json.dumps(row) + "\n")
    (read,) = read_suite(suite, tmp_path)
    assert score(read, right) == 1
    assert score(read, "no idea") == 0
    (tmp_path / "broken.jsonl").write_text(json.dumps({"text": "x"}))
    assert explain(read_suite, suite, tmp_path / "broken.jsonl") == snapshot


def list_results(num_right: int, count: int, task: str = "niah") -> list[dict[str, Any]]:
    """Of `count` answers at each of two lengths; the first `num_right` of all are right. Half of them are hard."""
    return [
        {
            "id": f"{task}/{length}/{at}", "task": task, "length": length, "index": at, "prompt_tokens": length,
            "depths": [at / count], "score": float(at + (length // 4096 - 1) * count < num_right),
            "answer": "x" if at else "", "is_greedy": None, "seconds": 0.5,
            "groups": {"difficulty": "easy" if at < count / 2 else "hard"},
        }
        for length in (4096, 8192) for at in range(count)
    ]  # fmt: skip


def test_depths_of_rulers_files_are_those_of_values_that_stand_there_once(tmp_path: Path) -> None:
    text = "Some hay. The number is 1234567. " + "More hay. " * 30 + "The other is 7654321. What are they?"
    rows = [{"input": text, "outputs": ["1234567", "7654321"]}, {"input": text + " 7654321", "outputs": ["7654321"]}]
    rows.append({"input": text, "outputs": ["1111111"]})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "niah_multivalue.jsonl").write_text(lines)
    (tmp_path / "vt.jsonl").write_text(lines)
    prompter = make_prompter(make_bytes_tokenizer())
    first, *others = (prompter.make(sample).depths for sample in read_suite("ruler-files", tmp_path))
    whole = len(text) + 1
    assert first == pytest.approx((text.index("1234567") / whole, text.index("7654321") / whole), abs=0.03)
    assert set(others) == {()}


def test_statistics_equal_worked_examples() -> None:
    interval = estimate_mean([1.0] * 17 + [0.0] * 3)
    assert interval == pytest.approx((0.85, 0.6396, 0.9476), abs=1e-3)  # Wilson's for 17 of 20
    assert estimate_mean([1.0] * 20)[1:] == pytest.approx((0.8389, 1.0), abs=1e-3)
    assert compare_pairs([0, 0, 1, 1], [1, 0, 1, 1]) == pytest.approx((0.25, -0.2756, 0.6090), abs=1e-3)
    assert compare_pairs([1.0], [1.0]) == pytest.approx((0.0, -0.6533, 0.6533), abs=1e-3)  # one proves nothing
    assert weigh_mean({4: 1.0, 8: 0.4}) == pytest.approx(0.6)
    names = plan_suites(["ruler"], Sources()).tasks
    means = {task.name: {4096: 0.9, 8192: 0.88, 16384: 0.7} for task in names}
    assert find_effective_lengths(means) == {"own": 8192}  # not all thirteen
    means |= {"qa_1": means["vt"], "qa_2": means["vt"]}
    assert find_effective_lengths(means) == {"ruler": 8192, "own": 8192}
    shorter = {**means, "niah_none": {4096: 1.0}}
    assert find_effective_lengths(shorter) == {"ruler": 8192, "own": 4096}, "another suite does not matter for RULER's"


def test_a_summary_has_intervals_depths_and_what_was_too_long() -> None:
    results = list_results(30, 20)
    summary = summarize(results, [{"id": "mrcr/0/3", "task": "mrcr", "tokens": 9000}])
    first, second = summary["scores"]
    assert (first["score"], first["n"], first["empty"]) == (1.0, 20, 1)
    assert second["low"] < second["score"] == 0.5 < second["high"]
    assert {cell["score"] for cell in summary["heat_map"] if cell["length"] == 8192 and cell["depth"] >= 0.5} == {0.0}
    assert summary["effective_length"] == {"own": 4096}
    assert [entry["id"] for entry in summary["too_long"]] == ["mrcr/0/3"]
    assert [row["difference"] for row in compare_results(results, list_results(40, 20))] == [0.0, 0.5]


def test_groups_intervals_and_the_other_model_are_shown() -> None:
    """Of each length and difficulty two questions; the second model answers three more of all eight."""
    old, new = list_results(2, 4, "v2"), list_results(5, 4, "v2")
    whole = compare_all(old, new)
    assert (whole["n"], whole["difference"]) == (8, 3 / 8)
    assert compare_all(old, []) is None
    alone = {**summarize(new), "subject": "tuned", "seconds": 3.0, "num_ranks": 2}
    compared = {"differences": compare_results(old, new), "difference": whole}
    findings = {**alone, **compared, "against": {**summarize(old), "subject": "me/base"}}
    by_group = {row["group"]: (row["by"], row["n"], row["score"]) for row in findings["groups"]}
    assert by_group == {"easy": ("difficulty", 4, 0.75), "hard": ("difficulty", 4, 0.5)}
    shown = [" ".join(line.split()) for line in format_quality(findings).splitlines()]
    # Wilson's interval of 3 of 4, of 2 of 4 and of 1 of 4 right answers
    assert {"v2 difficulty easy 4 75.0 % 30-95", "v2 difficulty hard 4 50.0 % 15-85"} < {*shown}
    assert "mean of 1 task at 8Ki: 25.0 % (5-70)" in shown
    assert any(line.startswith("all all 8 25.0 % 62.5 % +37.5 ") for line in shown)
    plain, page = make_quality_page(alone), make_quality_page(findings)
    assert page.count("<svg ") == plain.count("<svg ") + 2, "both means as lines, and the other's map"
    assert all(words in page for words in ("difficulty", "hard", "(5-70)"))
    assert [(words in page, words in plain) for words in ("+37.5", "me/base", "this model")] == [(True, False)] * 3


def test_questions_over_one_text_stand_beside_each_other_and_are_read_together() -> None:
    """Texts keep their order, and questions their numbers. No batch has more than 32, or a tail of more than 512."""

    def make(text: str, question: str) -> Sample:
        return Sample("t", f"{text} {question}", ("x",), "all", 8, context=(0, len(text)))

    samples = [make("b", "1"), make("a", "2"), make("b", "3"), Sample("t", "b", ("x",), "all", 8), make("a", "4")]
    numbered = [replace(sample, number=at) for at, sample in enumerate(samples)]
    assert [sample.number for sample in order_alike(numbered)] == [0, 2, 3, 1, 4]
    book = tuple(range(1000))
    asked = [Question((*book, 2000 + number), 8) for number in range(40)]
    asked += [Question((*book[:400], *range(5000, 5600)), 8), Question((*book, 1), 9)]
    assert [len(batch) for batch in _collect(iter(asked))] == [32, 8, 1, 1]
    assert [each for batch in _collect(iter(asked)) for each in batch] == asked


def take(length: int) -> float:
    """Seconds of a question: a part for each token and a part for each pair of tokens."""
    return 1e-3 * length + 1e-8 * length * length


@given(st.lists(st.sampled_from([4096, 32768, 131072]), min_size=2, max_size=40), st.data())
def test_long_questions_are_foreseen(lengths: list[int], data: st.DataObject) -> None:
    """From any number of answers, in rising order."""
    lengths.sort()
    number = data.draw(st.integers(1, len(lengths) - 1))
    left = TimeLeft(Counter(lengths), take)
    for length in lengths[:number]:
        left.note(length, take(length))
    assert left.estimate() == pytest.approx(sum(map(take, lengths[number:])))


def test_questions_of_files_take_what_those_before_them_took() -> None:
    left = TimeLeft({FROM_FILES: 4}, take)
    left.note(FROM_FILES, 1.0)
    left.note(FROM_FILES, 3.0)
    assert left.estimate() == 4.0
    left.drop(FROM_FILES)  # it is too long
    assert left.estimate() == 2.0
    assert TimeLeft({4096: 2}, take).estimate() == 0.0, "nothing is known yet"


SECOND = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}


@pytest.mark.parametrize(
    ("sp_size", "slots", "environ", "num_ranks"),
    [
        (1, 0, {}, 1), (4, 8, {}, 8), (3, 8, {}, 6), (1, 8, {"NPROC_PER_NODE": "4"}, 8),
        (16, 8, {}, 16),  # more ranks than GPUs: refused where ranks start
        (1, 0, SECOND, 2), (3, 0, SECOND, 6), (16, 8, SECOND, 16), (6, 8, SECOND, 12),
    ],
)  # fmt: skip
def test_ranks_are_dealt_to_machines(sp_size: int, slots: int, environ: dict[str, str], num_ranks: int) -> None:
    nodes, found = find_place(sp_size, slots, environ, Machine())
    assert (found, nodes.processes_here) == (num_ranks, num_ranks // nodes.count)
    assert (nodes.count, nodes.rank) == ((2, 1) if environ is SECOND else (1, 0))


def test_what_cannot_be_read_is_refused(snapshot: SnapshotAssertion) -> None:
    others = ({"TORCHELASTIC_RUN_ID": "x"}, {"SLURM_JOB_NUM_NODES": "2"}, {"NODE_RANK": "1"})
    assert [explain(find_place, 5, 8, environ, Machine()) for environ in (SECOND, *others)] == snapshot
