"""Questions that a perfect reader answers right at any length: one right answer, which fits its tokens, in a haystack
that neither gives it away nor drowns it."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from support.prompters import make_prompter
from support.refusals import explain
from support.tiers import sample_every
from support.tokenizers_trained import train, wrap
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.data.tokenizing.tokenizer import make_bytes_tokenizer
from ulysses_cli.evaluate.files import read_suite
from ulysses_cli.evaluate.made_tasks import MAX_SENTENCE, BookHaystack, list_needle_tasks
from ulysses_cli.evaluate.sample import Sample
from ulysses_cli.evaluate.scoring import score
from ulysses_cli.evaluate.suites import Amount, Sources, check_lengths, make_prompts, make_source, plan_suites

PROMPTER = make_prompter(make_bytes_tokenizer())


def write_squad(folder: Path, *contexts: str) -> Path:
    pairs = [{"question": "Who?", "answers": [{"text": "Ann"}]}]
    paragraphs = [{"context": context, "qas": pairs} for context in contexts]
    (folder / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return folder / "squad.json"


@pytest.mark.parametrize(
    "task", sample_every(3, [each for each in list_needle_tasks() if each.name.startswith("niah_multikey")])
)
def test_a_haystack_of_needles_has_the_asked_key_once(task: object) -> None:
    """In 20,000 needles of 51,145 keys of two words, one of a random draw would stand there twice in every third."""
    for index in range(8):
        sample = task.make(make_source(0, task.name, 0, index), 0)(20_000)  # type: ignore[attr-defined]
        (key,) = re.findall(r"for (\S+) in the text\?", sample.content)
        assert sample.content.count(f" for {key} is:") == 1


def test_an_object_has_the_asked_key_and_its_value_once() -> None:
    (task,) = plan_suites(["json_kv"], Sources()).tasks
    for num_units in (0, 1, 2_000):
        sample = task.make(make_source(0, "json_kv", 0, num_units), 0)(num_units)
        begin, end = sample.context or (0, 0)
        read, (key,) = json.loads(sample.content[begin:end]), re.findall(r"to the key (\S+)\?$", sample.content)
        assert (len(read), (read[key],)) == (num_units + 1, sample.references)
        ((first, last),) = sample.evidence
        assert sample.content[first:last] == f'"{key}": "{read[key]}"'


def test_the_nodes_of_a_graph_fit_the_answer() -> None:
    """Also where each character is a token. The answer is that of a search by hand."""
    (task,) = plan_suites(["graphs"], Sources()).tasks
    num_found = []
    for length, num_units in ((2_600, 60), (1 << 15, 1_700), (1 << 17, 7_000)):
        for index in range(20):
            sample = task.make(make_source(0, "graphs", length, index), length)(num_units)
            answer = f"Final Answer: [{', '.join(sample.references)}]"
            assert len(answer) <= sample.max_new_tokens
            assert score(sample, answer) == 1
            start, steps = re.findall(r"edges from (\w+)\. .* exactly (\d),", sample.content)[0]
            edges = re.findall(r"^(\w+) -> (\w+)$", sample.content, re.MULTILINE)
            assert len(edges) == num_units
            at, seen = {start}, {start}
            for _ in range(int(steps)):
                at = {target for source, target in edges if source in at} - seen
                seen |= at
            assert set(sample.references) == at
            num_found.append(len(at))
    assert min(num_found) >= 1
    assert max(num_found) <= 20


def test_lines_of_code_can_be_answered(tmp_path: Path) -> None:
    """Lines with tabs, lines that no answer holds, and a file of very long lines."""
    lines = [f"#define NAME_{at}\t\t{at} // {'x' * (200 if at % 3 else 1)}" for at in range(90)]
    (tmp_path / "a.c").write_text("\n".join(lines))
    (tmp_path / "b.c").write_text("\n".join(f"int value_{at} = {at};" for at in range(90)))
    (tmp_path / "c.js").write_text("\n".join(f"var v{at} = {'1+' * 9000}1;" for at in range(90)))
    plan, amount = plan_suites(["code"], Sources(code=tmp_path)), Amount((4096,), 12)
    check_lengths(plan, PROMPTER, amount)
    asked = list(make_prompts(plan, PROMPTER, amount, lambda _: None))
    assert len(asked) == 12
    for prompt in asked:
        wanted = prompt.sample.references[0]
        assert score(prompt.sample, " ".join(wanted.split())) == 1
        assert len(wanted) < prompt.sample.max_new_tokens


def test_few_lines_of_code_come_more_than_once(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.py").write_text("\n".join(f"    {name}_{at} = add({at}, {at + 1})" for at in range(60)))
    for prompt in make_prompts(plan_suites(["code"], Sources(code=tmp_path)), PROMPTER, Amount((4000,), 1), print):
        assert len(prompt.tokens) + prompt.sample.max_new_tokens == 4000
        assert prompt.sample.references[0] in prompt.sample.content


def test_every_question_of_the_users_files_is_known_to_fit(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """One paragraph that is too long for the length is said before a model is loaded, not hours later."""
    texts = ["It is Ann."] * 30 + ["It is Ann. " * 500]
    squad = write_squad(tmp_path, *(f"{at}. {text}" for at, text in enumerate(texts)))
    plan = plan_suites(["qa_1"], Sources(squad=squad))
    assert explain(check_lengths, plan, PROMPTER, Amount((2000,), 200)) == snapshot


@pytest.mark.parametrize(("suite", "length"), [("cwe", 2048), ("cwe", 6000), ("fwe", 2048), ("qa_1", 4096)])
def test_what_fills_up_a_question_is_no_word(suite: str, length: int, tmp_path: Path) -> None:
    """Lists of words keep the ten that come most often; a fill of words would be the commonest of a short one. Other
    paragraphs of a question end within the last."""
    squad = write_squad(tmp_path, *(f"Ann {at} " + "went to town " * 60 for at in range(20)))
    sources = Sources(squad=squad) if suite == "qa_1" else Sources()
    prompter = make_prompter(wrap(train("llama3")))
    for prompt in make_prompts(plan_suites([suite], sources), prompter, Amount((length,), 5), lambda _: None):
        begin, end = prompt.sample.context or (0, 0)
        shown = prompt.sample.content[begin:end]
        if suite == "qa_1":
            assert len(shown) - len(shown.rstrip(" .")) < 60
            continue
        words = re.findall(r"\b[a-z-]{2,}\b" if suite == "cwe" else r"\b[a-z]{6}\b", shown)
        ranked = [word for word, _ in Counter(words).most_common(len(prompt.sample.references))]
        assert set(ranked) == set(prompt.sample.references)


@pytest.mark.parametrize(
    "text",
    [
        "她走进房间。天很黑！谁在那里？" * 60,
        "One line.\nStill of it: a b c! And? " * 60,
        "no end, and " * 800,
        "字" * 3000,
    ],
)
def test_a_text_of_any_script_is_a_haystack(text: str) -> None:
    """All of it is used, in pieces that leave little to fill up."""
    book = BookHaystack(text)
    assert all(0 < len(sentence) <= MAX_SENTENCE for sentence in book.sentences)
    assert "".join("".join(book.sentences).split()) == "".join(text.split())
    found = make_prompter(make_bytes_tokenizer())
    (task,) = list_needle_tasks(book)[1:2]
    plan = replace(plan_suites(["vt"], Sources()), tasks=(task,))
    (shown,) = make_prompts(plan, found, Amount((4000,), 1), lambda _: None)
    assert Counter(shown.sample.content)["."] < 400, "dots fill up a sentence at most"


def test_samples_limit_the_questions_of_files(tmp_path: Path) -> None:
    """As many of each task. More of them keep those of fewer, with their names, so that an evaluation can go on."""
    rows = [{"context": f"c{at}", "input": "q", "answer": ["7"], "options": []} for at in range(30)]
    for name in ("passkey", "number_string"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    names = {}
    for number in (5, 9, None):
        amount = Amount((), 20, 3, of_files=number)
        plan = plan_suites(["infinitebench"], Sources(path=tmp_path), amount)
        prompts = list(make_prompts(plan, PROMPTER, amount, lambda _: None))
        assert Counter(prompt.sample.task for prompt in prompts) == dict.fromkeys(
            ("passkey", "number_string"), number or 30
        )
        names[number] = {prompt.name for prompt in prompts}
    assert names[5] < names[9] < names[None]
    other = plan_suites(["infinitebench"], Sources(path=tmp_path), Amount((), 20, 4, of_files=5)).samples
    assert {f"{sample.task}/0/{sample.number}" for sample in other} != names[5]


def test_the_content_of_sources_is_part_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    file = tmp_path / "code" / "a.py"
    file.write_text("a = 1\n")
    sources = Sources(code=tmp_path / "code", path=file)
    before = sources.hash_content()
    assert before == sources.hash_content()
    assert set(before) == {"code", "path"}
    file.write_text("a = 2\n")
    after = sources.hash_content()
    assert all(before[name] != after[name] for name in before)
    (tmp_path / "code" / "weights.bin").write_text("not read")
    assert sources.hash_content() == after


def test_long_answers_of_files_have_room(tmp_path: Path) -> None:
    (tmp_path / "math_calc.jsonl").write_text(
        json.dumps({"context": "1 + 3 + 4", "input": "", "answer": list(range(5000)), "options": []})
    )
    (sample,) = read_suite("infinitebench", tmp_path / "math_calc.jsonl")
    answer = str(list(range(5000)))
    assert len(answer) <= sample.max_new_tokens
    assert (score(sample, answer), score(sample, "0, 1, 2, 9")) == (1, 3 / 5000)
    nodes = [f"{Random(at).getrandbits(40):010x}" for at in range(200)]
    (tmp_path / "graphs.jsonl").write_text(json.dumps({"prompt": "p", "answer_nodes": nodes}))
    (sample,) = read_suite("graphwalks", tmp_path / "graphs.jsonl")
    assert len(f"Final Answer: [{', '.join(nodes)}]") <= sample.max_new_tokens


def test_a_prompt_in_its_files_own_template_ends_as_it_does() -> None:
    prompt = "<|start|>user\nWho?<|end|>\n<|start|>assistant\n\n"
    sample = Sample("t", prompt, ("a",), "all", 8, with_template=False)
    assert PROMPTER.render(sample)[0] == prompt
    plain = make_prompter(make_bytes_tokenizer(), with_template=False)
    assert plain.render(replace(sample, with_template=True))[0] == prompt.rstrip()
