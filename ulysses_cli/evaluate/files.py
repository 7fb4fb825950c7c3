"""Reads the files of published benchmarks, each in its own format, and turns rows into samples with its own rules."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ulysses_cli.evaluate.sample import Metric, Sample, Span
from ulysses_cli.plan.files import describe_special, list_row_files
from ulysses_cli.plan.problem import Problem, RecipeError, Where
from ulysses_cli.plan.units import format_count
from ulysses_cli.readers.blocks import walk_rows
from ulysses_cli.readers.files import has_lines, walk_blocks
from ulysses_cli.readers.problems import BadRow, DataError, make_where

Row = Mapping[str, Any]


class SetRule(NamedTuple):
    """How one set of a benchmark is asked and scored. No `max_new_tokens`: as many as the right answer can have."""

    metric: Metric
    max_new_tokens: int
    instruction: str = ""
    with_template: bool = True
    first_line: bool = False
    answer_prefix: str = ""


BRIEFLY = "Answer the question from the text, as briefly as you can."
SUMMARIZE = "Write a summary of the text."
CONTINUE = "Complete the next line of the code below.\n"
FROM_DOCUMENTS = "Answer the question from the documents, in a few words."
RANK = "Sort the documents by how well they answer the query, the best first. Write their IDs: ID3 > ID1 > ID2"
POPULAR = 1000
EXAMPLES = "Go on as the examples do."
LEAST_LONG = 1024  # tokens for a long answer; more where the right one is longer
EXACT = ("first_integer", "whole_word", "last_integer")  # metrics of answers that are one short text
# RULER's prepare.py writes prompts into a model's chat template: they begin with a mark of it
TEMPLATED = re.compile(r"\s*(<[^\s>]{1,40}>|\[INST\]|\[gMASK\]|User: |.{0,200}?\bUSER: )")
LONGBENCH: dict[str, SetRule] = {
    **dict.fromkeys(("narrativeqa", "qasper"), SetRule("token_f1", 128, BRIEFLY)),
    "multifieldqa_en": SetRule("token_f1", 64, BRIEFLY),
    "multifieldqa_zh": SetRule("chinese_f1", 64, BRIEFLY),
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique"), SetRule("token_f1", 32, BRIEFLY)),
    "dureader": SetRule("rouge_chinese", 128, BRIEFLY),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news"), SetRule("rouge_sets", 512, SUMMARIZE)),
    "vcsum": SetRule("rouge_chinese", 512, SUMMARIZE),
    "trec": SetRule("classes", 64, EXAMPLES, with_template=False, first_line=True),
    "triviaqa": SetRule("token_f1", 32, EXAMPLES, with_template=False, first_line=True),
    "samsum": SetRule("rouge_sets", 128, EXAMPLES, with_template=False, first_line=True),
    "lsht": SetRule("classes", 64, EXAMPLES, with_template=False, first_line=True),
    "passage_count": SetRule(
        "share_right", 32, "How many different paragraphs are there? Answer with the number alone."
    ),
    **dict.fromkeys(
        ("passage_retrieval_en", "passage_retrieval_zh"),
        SetRule("share_right", 32, "Which paragraph is the summary below of? Answer with its number."),
    ),
    **dict.fromkeys(("lcc", "repobench-p"), SetRule("code_similarity", 64, CONTINUE, with_template=False)),
}
INFINITE: dict[str, SetRule] = {
    "passkey": SetRule("first_integer", 12, answer_prefix=" The pass key is"),
    "number_string": SetRule("first_integer", 16, answer_prefix=" The sequence of digits is"),
    "kv_retrieval": SetRule("whole_word", 50),
    "longbook_qa_eng": SetRule("token_f1", 40, BRIEFLY),
    "longbook_qa_chn": SetRule("character_f1", 40, BRIEFLY),
    "longbook_sum_eng": SetRule("rouge_lines", 1200, SUMMARIZE),
    "longbook_choice_eng": SetRule("choice", 40, "Choose one of the options. Answer with its letter."),
    "longdialogue_qa_eng": SetRule("name", 40, "Which name belongs at $$MASK$$? Answer with the name."),
    "code_debug": SetRule(
        "debug", 5, "Which function has the error? Answer with the letter of an option and a full stop."
    ),
    # Room for a digit a token, and a sign: the benchmark's 5 and 3 tokens cut right answers.
    "code_run": SetRule("last_integer", 8, "Answer with the number alone."),
    "math_find": SetRule("first_number", 12, "Answer with the number alone."),
    "math_calc": SetRule(
        "first_numbers", 0, "Calculate from left to right, and list each value on the way: 1 + 3 + 4 gives [1, 4, 8]."
    ),
}


def read_rows(file: Path) -> Iterator[tuple[Where, Row]]:
    """The rows of a file of JSON, JSON lines or Parquet with their places. Reads as `prepare` reads data, within the
    same bounds of memory and time. Raises RecipeError."""
    has_row, are_lines = False, has_lines([file])
    try:
        for block in walk_blocks([file]):
            for number, row in walk_rows(block):
                place = make_where(str(file), number, has_lines=are_lines)
                if isinstance(row, BadRow):
                    raise DataError([Problem("", str(row), where=place)])
                has_row = True
                inner = row.get("data") if file.suffix == ".json" else None  # an object that holds its rows there
                yield from ((place, each) for each in inner) if isinstance(inner, list) else [(place, row)]
    except DataError as error:
        hint = "name a file in JSON, JSON lines or Parquet"
        found = ((f"{each.where}: {each.message}", each.hint or hint) for each in error.problems)
        raise RecipeError(Problem("--path", *each) for each in found) from None
    if not has_row:
        raise RecipeError([Problem("--path", f"{file} holds no row", "name another file")])


def _find_span(content: str, context: str) -> Span | None:
    """Where the context is in the content. None where there is none."""
    begin = content.find(context)
    return (begin, begin + len(context)) if context.strip() and begin >= 0 else None


def _read_ruler(row: Row, name: str) -> Sample:
    """Prompts in a template are asked as they are. The row's length counts tokens of the tokenizer that RULER was given
    and those of the answer; rows of one length stay together whatever this model's tokenizer makes of them."""
    metric: Metric = "part" if name.startswith("qa") else "all"
    budget = {"vt": 30, "cwe": 120, "fwe": 50}.get(name.partition(".")[0], 32 if metric == "part" else 128)
    content, is_needle = str(row["input"]), name.startswith("niah")
    facts = {"file_index": row.get("index"), "file_length": row.get("length")}
    return Sample(
        name, content, tuple(map(str, row["outputs"])), metric, budget, str(row.get("answer_prefix", "")), facts=facts,
        evidence=_find_values(row) if is_needle else (), with_template=TEMPLATED.match(content) is None,
        has_one_answer=is_needle and len(row["outputs"]) == 1,
    )  # fmt: skip


def _find_values(row: Row) -> tuple[Span, ...]:
    """Where each right answer stands in a haystack. () unless each stands there once: a second place could be another
    needle's. RULER's own token_position_answer counts tokens of another tokenizer."""
    content, values = str(row["input"]), list(map(str, row["outputs"]))
    if any(not value or content.count(value) != 1 for value in values):
        return ()
    return tuple((at := content.index(value), at + len(value)) for value in values)


def _read_longbench(row: Row, name: str) -> Sample:
    name = str(row.get("dataset", name))
    rule = LONGBENCH[name.removesuffix("_e")]
    content = f"{rule.instruction}\n\n{row['context']}\n\n{row['input']}".rstrip()
    facts = {"classes": row.get("all_classes") or (), "id": row.get("_id")}
    return Sample(
        name, content, tuple(map(str, row["answers"])), rule.metric, rule.max_new_tokens,
        with_template=rule.with_template, first_line=rule.first_line, facts=facts,
        context=_find_span(content, str(row["context"])),
    )  # fmt: skip


def _read_longbench_v2(row: Row, _: str) -> Sample:
    choices = "\n".join(f"({letter}) {row[f'choice_{letter}']}" for letter in "ABCD")
    content = (
        f"Read the text and answer the question about it.\n\n{row['context']}\n\n"
        f"Question: {row['question']}\n{choices}\n\n"
        'End with this sentence: "The correct answer is (X)", with a letter for X.'
    )
    facts = {"id": row["_id"], "domain": row["domain"]}
    return Sample(
        "longbench-v2", content, (str(row["answer"]),), "sentence", 128, facts=facts,
        context=_find_span(content, str(row["context"])),
        groups={"difficulty": str(row["difficulty"]), "length": str(row["length"])},
    )  # fmt: skip


def _read_infinite(row: Row, name: str) -> Sample:
    """The right answer of a choice is kept with its letter: the rules accept either."""
    rule = INFINITE[name]
    answers = [str(each) for each in (row["answer"] if isinstance(row["answer"], list) else [row["answer"]])]
    options = [str(option) for option in row.get("options") or ()]
    shown = "\n".join(f"{letter}. {option}" for letter, option in zip("ABCD", options, strict=False))
    if rule.metric in ("choice", "debug") and len(answers) == 1:
        answers.append("ABCD"[options.index(answers[0])])
    content = "\n\n".join(filter(None, (rule.instruction, str(row["context"]), str(row["input"]), shown)))
    return Sample(
        name, content, tuple(answers), rule.metric, rule.max_new_tokens or _count_room(answers), rule.answer_prefix,
        facts={"id": row.get("id")}, context=_find_span(content, str(row["context"])),
        has_one_answer=rule.metric in EXACT,
    )  # fmt: skip


def _read_mrcr(row: Row, _: str) -> Sample:
    """A conversation. Sets of two, four and eight needles are tasks of their own: they are unlike in difficulty."""
    read = json.loads(row["prompt"]) if isinstance(row["prompt"], str) else row["prompt"]
    messages = tuple((str(message["role"]), str(message["content"])) for message in read)
    shown = [f"{role.capitalize()}: {text}" for role, text in messages]
    content, before = "\n\n".join(shown), "\n\n".join(shown[:-1])
    facts = {"start": row["random_string_to_prepend"], "messages": row.get("total_messages")}
    context = (0, len(before)) if before else None
    budget = max(LEAST_LONG, len(str(row["answer"])) // 2)
    return Sample(
        f"mrcr-{row['n_needles']}", content, (str(row["answer"]),), "ordered_copy", budget, facts=facts,
        context=context, messages=messages,
    )  # fmt: skip


def _read_graphs(row: Row, _: str) -> Sample:
    kind = str(row.get("problem_type") or "").lower()
    name = f"graphwalks-{kind}" if kind else "graphwalks"
    nodes = tuple(map(str, row["answer_nodes"]))
    return Sample(name, str(row["prompt"]), nodes, "set_f1", max(LEAST_LONG, _count_room(nodes)))


def _read_helmet_rag(row: Row, name: str) -> Sample:
    """HELMET asks of popqa those below 1,000 alone; groups tell them apart."""
    passages = "\n\n".join(f"Document (Title: {each['title']}): {each['text']}" for each in row["ctxs"])
    content = f"{FROM_DOCUMENTS}\n\n{passages}\n\nQuestion: {row['question']}"
    answers = [answer for each in row["answers"] for answer in (each if isinstance(each, list) else [each])]
    groups = (
        {"popularity": "below 1,000" if float(row["s_pop"]) < POPULAR else "1,000 or more"} if "s_pop" in row else {}
    )
    return Sample(
        re.split("[-_]", name)[0], content, tuple(map(str, answers)), "plain_part", 20, " Answer:", first_line=True,
        facts={"id": row.get("id")}, context=_find_span(content, passages), groups=groups,
    )  # fmt: skip


def _read_helmet_rerank(row: Row, _: str) -> Sample:
    titles = [f" (Title: {each['title']})" if "title" in each else "" for each in row["ctxs"]]
    shown = zip(row["ctxs"], titles, strict=True)
    passages = "\n\n".join(f"[ID: {each['id']}] Document{title}: {each['text']}" for each, title in shown)
    content = f"{RANK}\n\n{passages}\n\nQuery: {row['query']}"
    labels = {str(each["id"]): int(each["label"]) for each in row["ctxs"] if int(each["label"]) > 0}
    return Sample(
        "msmarco", content, tuple(sorted(labels, key=labels.__getitem__, reverse=True)), "ndcg", 200, " Ranking:",
        first_line=True, facts={"id": row.get("qid"), "labels": labels}, context=_find_span(content, passages),
    )  # fmt: skip


def _read_helmet_json(row: Row, _: str) -> Sample:
    context, key = str(row["context"]), row["question"]
    content = f"Below is a JSON object.\n{context}\nWhich value does the JSON object give to the key {key}?"
    return Sample(
        "json_kv", content, (str(row["answer"]),), "plain_part", 100, f" The value of the key {key} is",
        facts={"depth": row.get("depth")}, context=_find_span(content, context), has_one_answer=True,
    )  # fmt: skip


def _count_room(answers: Sequence[str]) -> int:
    """Tokens that hold these in a list, after a few words, whatever the tokenizer: a token has a character or more."""
    return 64 + sum(len(answer) + len(", ") for answer in answers)


HELMET = "HELMET's data.tar.gz, unpacked"


class FileSuite(NamedTuple):
    """A benchmark that is read from files. `fields`: those that its rows have; `where`: where to get it; `left_out`:
    sets of a folder that are asked only where their own file is named."""

    read: Callable[[Row, str], Sample]
    fields: tuple[str, ...]
    where: str
    left_out: tuple[str, ...] = ()


FILE_SUITES: dict[str, FileSuite] = {
    "ruler-files": FileSuite(_read_ruler, ("input", "outputs"), "RULER's own prepare.py writes them"),
    "longbench": FileSuite(_read_longbench, ("input", "context", "answers"), "the data set THUDM/LongBench"),
    "longbench-v2": FileSuite(
        _read_longbench_v2, ("question", "choice_A", "choice_D", "answer", "context"), "the data set THUDM/LongBench-v2"
    ),
    "infinitebench": FileSuite(
        _read_infinite,
        ("context", "input", "answer"),
        "the data set xinrongzhang2022/InfiniteBench",
        left_out=("math_calc",),  # answers of tens of thousands of tokens: asked where its file is named
    ),
    "mrcr": FileSuite(
        _read_mrcr, ("prompt", "answer", "random_string_to_prepend", "n_needles"), "the data set openai/mrcr"
    ),
    "graphwalks": FileSuite(_read_graphs, ("prompt", "answer_nodes"), "the data set openai/graphwalks"),
    "helmet-rag": FileSuite(_read_helmet_rag, ("question", "answers", "ctxs"), f"kilt/*-dev-*.jsonl of {HELMET}"),
    "helmet-rerank": FileSuite(_read_helmet_rerank, ("query", "ctxs"), f"msmarco/*.jsonl of {HELMET}"),
    "helmet-json": FileSuite(_read_helmet_json, ("context", "question", "answer"), f"json_kv/*.jsonl of {HELMET}"),
}
PACKAGES: dict[Metric, str] = {"chinese_f1": "jieba", "rouge_chinese": "jieba", "code_similarity": "rapidfuzz"}


def list_file_notes(suite: str, path: Path | None, samples: Sequence[Sample]) -> list[str]:
    """Notes on the sets of a folder that are left out, and on prompts that are asked as they are."""
    names = FILE_SUITES[suite].left_out if path is not None and path.is_dir() else ()
    left_out = [name for name in names if path and any(path.rglob(f"{name}.jsonl"))]
    notes = [f"{name} is left out: its answers are as long as its texts; name its file to ask it" for name in left_out]
    if suite == "ruler-files" and (number := sum(not sample.with_template for sample in samples)):
        verb = "holds a chat template already: it is asked as it is"
        verb = verb if number == 1 else "hold a chat template already: they are asked as they are"
        notes.append(f"{format_count(number, 'prompt of the files')} {verb}")
    return notes


def list_files(suite: str, path: Path | None) -> list[Path]:
    """The files of a suite below a path. Says what is missing."""
    where = FILE_SUITES[suite].where
    if path is None:
        name = where.rpartition(" ")[2]
        hint = f"add --path FILE; {where}" + (f", or --path {name}, which downloads it" if "/" in name else "")
        raise RecipeError([Problem("--suite", f"{suite} is read from files, and no path was given", hint)])
    if path.is_file():
        return [path]
    found = list_row_files(path, [f"{name}.jsonl" for name in FILE_SUITES[suite].left_out])
    if not found:
        special = describe_special(path)
        kind = f"is {special}, not a file" if special else "does not exist"
        kind = "holds no JSON, JSON lines or Parquet" if path.is_dir() else kind
        raise RecipeError([Problem("--path", f"{path} {kind}", where)])
    return found


def read_suite(suite: str, path: Path | None) -> list[Sample]:
    """Reads all samples of a suite. Every problem of its files is said before anything starts."""
    own = FILE_SUITES[suite]
    return [sample for file in list_files(suite, path) for sample in _read_file(suite, own, file)]


def _read_file(suite: str, own: FileSuite, file: Path) -> Iterator[Sample]:
    name = file.parent.name if file.stem in ("validation", "test") else file.stem
    missing_packages: set[str] = set()
    for where, row in read_rows(file):
        lacking = [field for field in own.fields if not isinstance(row, dict) or field not in row]
        if lacking:
            message = f"{where} lacks {', '.join(lacking)}: it is not a row of {suite}"
            raise RecipeError([Problem("--path", message, own.where)])
        try:
            sample = own.read(row, name)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            message = f"{where}: {suite} has no set or value {error}, or none that can be scored"
            raise RecipeError([Problem("--path", message, own.where)]) from None
        if not sample.references and sample.metric != "set_f1":
            raise RecipeError([Problem("--path", f"{where} has no right answer")])
        needs = PACKAGES.get(sample.metric, "")
        if needs and needs not in missing_packages and find_spec(needs) is None:
            missing_packages.add(needs)
            message = f"{sample.task} is scored with {needs}, which is not installed"
            raise RecipeError([Problem("--suite", message, "pip install 'ulysses-cli[evaluate]'")])
        yield sample
