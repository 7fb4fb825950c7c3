"""Tests that a command has the results of runs on sizes that earlier commands made, and no stale ones."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import run_process
from support.model_shapes import LLAMA, QWEN

from ulysses_cli.plan.layout import Layout
from ulysses_cli.plan.ledger import kept
from ulysses_cli.plan.ledger.job import Job
from ulysses_cli.plan.ledger.kept import KeptOnDisk, keep_on_disk
from ulysses_cli.plan.levers import Levers

JOB = Job(LLAMA, Layout(1, 1, 8), 1 << 17, Levers())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ask(job: Job = JOB, others: object = None, made: int = 1) -> int:
    """Asks as a new command does, which would make this number."""
    with keep_on_disk(Path.cwd() / "ulysses" / "sizes"):
        return KeptOnDisk[int]("numbers", 8, lambda number: [number], lambda packed: int(packed[0])).get(
            job, others, lambda: made
        )


def find_file(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "ulysses" / "sizes").glob("*.json")
    return file


def test_a_result_is_made_once() -> None:
    assert [ask(), ask(made=2), ask(others=("a", 1), made=3), ask(made=4)] == [1, 1, 3, 1]


def test_any_other_job_or_model_has_another_result() -> None:
    others = [
        replace(JOB, max_length=1 << 16), JOB.with_levers(Levers(tiled_mlp=True)), replace(JOB, shape=QWEN),
        replace(JOB, layout=Layout(1, 8, 1)), replace(JOB, model=QWEN), replace(JOB, kernel="sdpa"),
        replace(JOB, shape=replace(LLAMA, config={**LLAMA.config, "rms_norm_eps": 1.0})),
    ]  # fmt: skip
    assert ask() == 1
    assert [ask(other, made=number) for number, other in enumerate(others, 2)] == list(range(2, 9))


@pytest.mark.parametrize("damage", ["", "[", "[]", '{"values": 3}', '{"executed": [], "values": {}}'])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: str) -> None:
    ask()
    find_file(tmp_path).write_text(damage)
    assert [ask(made=2), ask(made=3)] == [2, 2]


def test_a_value_of_another_form_is_made_anew(tmp_path: Path) -> None:
    ask()
    file = find_file(tmp_path)
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "values": dict.fromkeys(content["values"], 5)}))
    assert ask(made=2) == 2


def test_changed_code_makes_all_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this package, of a version, and of a file that a run executed, also where its version stays."""
    source = tmp_path / "modeling.py"
    source.write_text("one")
    content = {"executed": {str(source): kept.list_facts(str(source))}}
    ask()
    file = find_file(tmp_path)
    file.write_text(json.dumps({**json.loads(file.read_text()), **content}))
    assert ask(made=2) == 1
    os.utime(source, ns=(0, 0))
    assert ask(made=3) == 3
    monkeypatch.setattr(kept, "hash_code", lambda: "another version's")
    assert ask(made=4) == 4


def test_a_file_knows_all_that_was_executed_for_it(tmp_path: Path) -> None:
    """What a later command adds may come from fewer files."""
    source = tmp_path / "modeling.py"
    source.write_text("one")
    ask()
    file = find_file(tmp_path)
    content = {**json.loads(file.read_text()), "executed": {str(source): kept.list_facts(str(source))}}
    file.write_text(json.dumps(content))
    assert ask(others="more", made=2) == 2
    os.utime(source, ns=(0, 0))
    assert ask(made=3) == 3


def test_nothing_is_kept_beside_the_run_where_there_is_no_home(tmp_path: Path) -> None:
    with keep_on_disk(Path("~") / "sizes"):
        assert kept.find_file(JOB) is None


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "ulysses").write_text("a file")
    assert [ask(), ask(made=2)] == [1, 2]


def test_only_the_newest_files_stay(tmp_path: Path) -> None:
    folder = tmp_path / "ulysses" / "sizes"
    folder.mkdir(parents=True)
    for number in range(kept.MOST_FILES + 3):
        (folder / f"{number}.json").write_text("{}")
        os.utime(folder / f"{number}.json", (number, number))
    ask()
    left = {file.stem for file in folder.iterdir()}
    assert len(left) == kept.MOST_FILES
    assert not left & {"0", "1", "2", "3"}


def test_a_plan_says_the_same_again(tmp_path: Path) -> None:
    """The second process runs nothing on sizes: it has all from the first."""
    words = ["plan", "--model", "Qwen/Qwen3-4B", "--max-length", "32Ki", "--gpus", "h100-80gb:8", "--format", "json"]
    first = run_process(*words, XDG_CACHE_HOME=str(tmp_path))
    file = find_file(tmp_path)
    before = file.read_text()
    second = run_process(*words, XDG_CACHE_HOME=str(tmp_path))
    assert (first.returncode, first.stdout) == (second.returncode, second.stdout) == (0, first.stdout)
    assert file.read_text() == before
    assert len(json.loads(before)["executed"]) > 5
