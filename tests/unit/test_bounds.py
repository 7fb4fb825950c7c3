"""Tests that files of unknown origin cost no more than they may: data, benchmarks, tokenizers, results of a run."""

import gc
import json
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.run_directory import write_run
from support.tokenizers_trained import train, wrap
from test_prepare import prepare, write_rows, write_texts

from ulysses_cli.data.tokenizing.tokenizer import load_tokenizer
from ulysses_cli.evaluate.documents import read_questions
from ulysses_cli.evaluate.files import read_suite
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.plan.recipe.recipe import Model
from ulysses_cli.readers import blocks, files
from ulysses_cli.readers.problems import DataError
from ulysses_cli.report.run_summary import load_run
from ulysses_cli.run.downloads import _unpack

RULER = {"input": "q", "outputs": ["a"]}
pytestmark = pytest.mark.usefixtures("alarm")


def explain(suite: str, file: Path) -> str:
    with pytest.raises(RecipeError) as raised:
        read_suite(suite, file)
    assert all(problem.key == "--path" for problem in raised.value.problems)
    return str(raised.value)


def test_a_fifo_among_a_benchmarks_files_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "niah.jsonl")
    assert "niah.jsonl: cannot be read: it is a FIFO" in explain("ruler-files", tmp_path)
    assert "niah.jsonl is a FIFO, not a file" in explain("ruler-files", tmp_path / "niah.jsonl")


def test_json_nested_without_end_is_a_problem_with_a_place(tmp_path: Path) -> None:
    gc.collect()  # what earlier tests left would be collected, and fail, where Python allows no deeper call
    deep = "[" * 100_000 + "]" * 100_000
    for name, text in (("a.json", deep), ("a.jsonl", f'{{"input": {deep}}}'), ("b.json", f'{{"data": {deep}}}')):
        (tmp_path / name).write_text(text)
        assert "malformed JSON" in explain("ruler-files", tmp_path / name)
    (tmp_path / "c.jsonl").write_text(json.dumps(RULER) + "\n" + json.dumps([RULER]))
    assert "c.jsonl:2:1: a JSON value that is not an object" in explain("ruler-files", tmp_path / "c.jsonl")
    nested = {"prompt": deep, "answer": "a", "random_string_to_prepend": "s", "n_needles": 2}
    (tmp_path / "d.jsonl").write_text(json.dumps(nested))
    assert "d.jsonl:1:1: mrcr has no set or value" in explain("mrcr", tmp_path / "d.jsonl")
    with pytest.raises(RecipeError, match="cannot be read as JSON"):
        read_questions(tmp_path / "a.json", "--squad")


def test_a_fifth_option_and_rows_of_another_shape_are_problems(tmp_path: Path) -> None:
    row = {"context": "c", "input": "q", "answer": "e", "options": list("abcde")}
    (tmp_path / "longbook_choice_eng.jsonl").write_text(json.dumps(row))
    assert "longbook_choice_eng.jsonl:1:1: infinitebench" in explain("infinitebench", tmp_path)
    mrcr: dict[str, Any] = {"prompt": "[3]", "answer": "a", "random_string_to_prepend": "s", "n_needles": 2}
    (tmp_path / "m.jsonl").write_text(json.dumps(mrcr))
    assert "m.jsonl:1:1: mrcr" in explain("mrcr", tmp_path / "m.jsonl")
    (tmp_path / "d.json").write_text(json.dumps({"version": 1, "data": ["text"]}))
    assert "lacks input, outputs" in explain("ruler-files", tmp_path / "d.json")
    (tmp_path / "e.json").write_text("[]")
    assert "holds no row" in explain("ruler-files", tmp_path / "e.json")


def test_a_table_that_expands_far_is_refused_by_evaluate_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyarrow import Table, parquet

    monkeypatch.setattr(blocks, "FREE_BYTES", 1 << 20)
    rows = [{"input": "z" * 1000, "outputs": ["a"]}] * 20_000
    parquet.write_table(Table.from_pylist(rows), tmp_path / "niah.parquet", compression="zstd")
    assert (tmp_path / "niah.parquet").stat().st_size < 100_000
    assert "expands to more than" in explain("ruler-files", tmp_path)


def test_an_archive_that_expands_far_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "FREE_BYTES", 1 << 20)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.jsonl", b"0" * (8 << 20))
    with pytest.raises(RecipeError, match=r"a\.zip expands to more than"):
        _unpack(tmp_path / "a.zip", tmp_path / "out", tmp_path / "scratch")
    assert not (tmp_path / "out").exists()


def test_a_line_without_end_is_refused_before_it_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 1000)
    write_rows(tmp_path, {"text": "short"}, {"text": "x" * 2000})
    with pytest.raises(DataError, match=r"d\.jsonl:2:1: this line is longer than"):
        prepare(tmp_path)
    (tmp_path / "d.csv").write_text('text\nok\n"' + "x" * 2000 + '"\n')
    with pytest.raises(DataError, match=r"d\.csv:3:1: malformed CSV: field larger than field limit"):
        prepare(tmp_path, f"data.datasets.0.path={tmp_path / 'd.csv'}")


def test_a_header_of_many_columns_takes_no_longer_than_its_bytes(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(60_000)]
    (tmp_path / "d.csv").write_text(",".join(names) + "\n" + ",".join("x" * len(names)) + "\n")
    started = time.process_time()
    with pytest.raises(DataError, match="is not understood"):
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
def test_a_normalizer_that_multiplies_is_refused_by_name(tmp_path: Path, normalizer: dict[str, Any]) -> None:
    write_texts(tmp_path)
    folder = spoil(tmp_path / "t", normalizer=normalizer)
    with pytest.raises(RecipeError) as raised:
        prepare(tmp_path, f"model.tokenizer={folder}")
    (problem,) = raised.value.problems
    assert problem.key == "model.tokenizer"
    assert f"the tokenizer of {folder} makes up to" in problem.message


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


def test_a_tokenizer_that_fails_is_named_with_the_row(tmp_path: Path) -> None:
    """A pattern that goes back and forth without end on one text, which its library gives up."""
    split = {"type": "Split", "pattern": {"Regex": r"(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    folder = spoil(tmp_path / "t", pre_tokenizer=split)
    write_rows(tmp_path, {"text": "fine"}, {"text": "x" * 5000}, {"text": "fine"})
    with pytest.raises(DataError) as raised:
        prepare(tmp_path, f"model.tokenizer={folder}")
    assert f"d.jsonl:2:1: the tokenizer of {folder} fails at this row" in str(raised.value)


def test_a_fifo_among_the_evaluations_does_not_hold_a_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    folder = (run if isinstance(run, Path) else tmp_path / "run") / "evaluations"
    folder.mkdir(exist_ok=True)
    os.mkfifo(folder / "a.json")
    assert any("evaluations/a.json is damaged" in note for note in load_run(folder.parent).notes)
