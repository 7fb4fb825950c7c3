"""Tests that files of unknown origin cost no more than they may: data, benchmarks, tokenizers, results of a run."""

import gc
import json
import os
import re
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.refusals import explain
from support.run_directory import write_run
from support.tokenizers_trained import train, wrap
from syrupy.assertion import SnapshotAssertion
from test_prepare import prepare, write_rows, write_texts

from ulysses_cli.data.tokenizing.tokenizer import load_tokenizer
from ulysses_cli.evaluate.documents import read_questions
from ulysses_cli.evaluate.files import read_suite
from ulysses_cli.plan.recipe.recipe import Model
from ulysses_cli.readers import blocks, files
from ulysses_cli.readers.problems import DataError
from ulysses_cli.report.run_summary import load_run
from ulysses_cli.run.downloads import _unpack

RULER = {"input": "q", "outputs": ["a"]}
pytestmark = pytest.mark.usefixtures("alarm")


def test_a_fifo_among_a_benchmarks_files_is_named(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    os.mkfifo(tmp_path / "niah.jsonl")
    assert [explain(read_suite, "ruler-files", tmp_path / name) for name in ("", "niah.jsonl")] == snapshot


def test_json_nested_without_end_is_a_problem_with_a_place(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    gc.collect()  # what earlier tests left would be collected, and fail, where Python allows no deeper call
    deep = "[" * 100_000 + "]" * 100_000
    nested = {"prompt": deep, "answer": "a", "random_string_to_prepend": "s", "n_needles": 2}
    texts = []
    for suite, name, text in (
        ("ruler-files", "a.json", deep),
        ("ruler-files", "a.jsonl", f'{{"input": {deep}}}'),
        ("ruler-files", "b.json", f'{{"data": {deep}}}'),
        ("ruler-files", "c.jsonl", json.dumps(RULER) + "\n" + json.dumps([RULER])),
        ("mrcr", "d.jsonl", json.dumps(nested)),
    ):
        (tmp_path / name).write_text(text)
        texts.append(explain(read_suite, suite, tmp_path / name))
    texts.append(explain(read_questions, tmp_path / "a.json", "--squad"))
    own_words = [re.sub(r"(malformed JSON: |set or value |as JSON: ).*", r"\1...", text) for text in texts]
    assert own_words == snapshot  # without Python's


def test_a_fifth_option_and_rows_of_another_shape_are_problems(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    row = {"context": "c", "input": "q", "answer": "e", "options": list("abcde")}
    mrcr = {"prompt": "[3]", "answer": "a", "random_string_to_prepend": "s", "n_needles": 2}
    texts = []
    for suite, name, content in (
        ("infinitebench", "longbook_choice_eng.jsonl", row),
        ("mrcr", "m.jsonl", mrcr),
        ("ruler-files", "d.json", {"version": 1, "data": ["text"]}),
        ("ruler-files", "e.json", []),
    ):
        (tmp_path / name).write_text(json.dumps(content))
        texts.append(explain(read_suite, suite, tmp_path if suite == "infinitebench" else tmp_path / name))
    assert texts == snapshot


def test_what_expands_far_is_neither_read_nor_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    from pyarrow import Table, parquet

    monkeypatch.setattr(blocks, "FREE_BYTES", 1 << 20)
    rows = [{"input": "z" * 1000, "outputs": ["a"]}] * 20_000
    parquet.write_table(Table.from_pylist(rows), tmp_path / "niah.parquet", compression="zstd")
    assert (tmp_path / "niah.parquet").stat().st_size < 100_000
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.jsonl", b"0" * (8 << 20))
    unpacked = explain(_unpack, tmp_path / "a.zip", tmp_path / "out", tmp_path / "scratch")
    texts = [explain(read_suite, "ruler-files", tmp_path), unpacked]
    assert [re.sub(r"\d+ MiB", "... MiB", text) for text in texts] == snapshot  # as far as it was compressed
    assert not (tmp_path / "out").exists()


def test_a_line_without_end_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 1000)
    write_rows(tmp_path, {"text": "short"}, {"text": "x" * 2000})
    (tmp_path / "d.csv").write_text('text\nok\n"' + "x" * 2000 + '"\n')
    places = [f"data.datasets.0.path={tmp_path / name}" for name in ("d.jsonl", "d.csv")]
    assert [explain(prepare, tmp_path, place, error=DataError) for place in places] == snapshot


def test_a_header_of_many_columns_takes_no_longer_than_its_bytes(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(60_000)]
    (tmp_path / "d.csv").write_text(",".join(names) + "\n" + ",".join("x" * len(names)) + "\n")
    started = time.process_time()
    with pytest.raises(DataError, match="understood"):
        prepare(tmp_path, f"data.datasets.0.path={tmp_path / 'd.csv'}")
    assert time.process_time() - started < 10  # 94 s where each name was looked for among all


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}


def spoil(folder: Path, **parts: Any) -> Path:
    wrap(train("gpt2")).save_pretrained(folder)
    spec = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**spec, **parts}))
    return folder


@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "Sequence", "normalizers": [REPLACE] * 10},
        {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [REPLACE] * 5}] * 2},
        {"type": "Replace", "pattern": {"Regex": "."}, "content": "b" * 1000},
    ],
)
def test_a_normalizer_that_multiplies_is_refused_by_name(
    tmp_path: Path, normalizer: dict[str, Any], snapshot: SnapshotAssertion
) -> None:
    write_texts(tmp_path)
    folder = spoil(tmp_path / "t", normalizer=normalizer)
    assert explain(prepare, tmp_path, f"model.tokenizer={folder}") == snapshot


@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Prepend", "prepend": "\u2581" * 3}]},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
    ],
)
def test_normalizers_as_tokenizers_have_them_are_taken(tmp_path: Path, normalizer: dict[str, Any]) -> None:
    assert load_tokenizer(Model(tokenizer=str(spoil(tmp_path / "t", normalizer=normalizer))))("a a")["input_ids"]


def test_a_tokenizer_that_fails_is_named_with_the_row(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A pattern that goes back and forth without end on one text, which its library gives up."""
    split = {"type": "Split", "pattern": {"Regex": r"(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    folder = spoil(tmp_path / "t", pre_tokenizer=split)
    write_rows(tmp_path, {"text": "fine"}, {"text": "x" * 5000}, {"text": "fine"})
    text = explain(prepare, tmp_path, f"model.tokenizer={folder}", error=DataError)
    assert text.partition(": Onig")[0] == snapshot


def test_a_fifo_among_the_evaluations_does_not_hold_a_report(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    write_run(tmp_path / "run")
    folder = tmp_path / "run" / "evaluations"
    folder.mkdir(exist_ok=True)
    os.mkfifo(folder / "a.json")
    assert [note for note in load_run(folder.parent).notes if "evaluations/a.json" in note] == snapshot
