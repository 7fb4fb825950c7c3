"""Tests `ulysses report` as a user meets it."""

import json
import subprocess
from pathlib import Path

import pytest
from support import commands
from support.json_page import find_undocumented
from support.run_directory import SECRET, write_run


def run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return commands.run("report", *words, cwd=cwd)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "qwen")


def test_a_page_and_a_summary(folder: Path) -> None:
    done = run(str(folder))
    page = folder / "report.html"
    assert (done.returncode, done.stderr) == (0, f"wrote {page}\n")
    assert page.read_text().startswith("<!doctype html>")
    assert "most time goes to  attention" in done.stdout
    assert [file.name for file in folder.iterdir() if file.name.startswith(".")] == []


def test_the_summary_as_json_writes_a_page_only_on_request(folder: Path, tmp_path: Path) -> None:
    (folder / "report.html").unlink(missing_ok=True)
    done = run(str(folder), "--format", "json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["last_step"] == 1000
    assert not find_undocumented("ulysses report", json.loads(done.stdout))
    assert not (folder / "report.html").exists()
    target = tmp_path / "new" / "page.html"
    done = run(str(folder), "--format", "json", "--output", str(target))
    assert json.loads(done.stdout)["model"] == "Qwen/Qwen3-8B"
    assert SECRET not in target.read_text() + done.stdout


def test_a_wrong_directory_ends_with_2_and_a_hint(tmp_path: Path) -> None:
    for words in (("nowhere",), (".",)):
        done = run(*words, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert "hint: name the directory that run.output_dir of the recipe names" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_place_that_cannot_be_written_ends_with_2(folder: Path) -> None:
    done = run(str(folder), "--output", "/dev/null/report.html")
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
