"""Tests the quickstart: every command of the page runs, and every cell of the notebook, one after another."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.blocks import list_blocks
from support.generated_docs import DOCS
from support.house import ROOT
from support.served import write_program, write_python, write_script
from support.tiers import FULL, TIER

quickstart = (DOCS / "quickstart.md").read_text()


def shorten(text: str) -> str:
    """`make check` trains for 3 steps and holds less out, `make test-full` does what the page says."""
    if TIER == FULL:
        return text
    return (
        re.sub(r"(steps: |step-)10\b", r"\g<1>2", text)
        .replace("max_steps=20", "max_steps=3")
        .replace("split: 0.1", "split: 0.02")
    )


def run(command: list[str], folder: Path, environ: dict[str, str]) -> str:
    """Returns what the command prints. It must end well."""
    result = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, f"{command[-1]}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.check
def test_every_command_of_the_quickstart_runs(tmp_path: Path) -> None:
    """Runs them in the order of the page, in an empty folder: from documents to a model that transformers loads."""
    (tmp_path / "my.yaml").write_text(shorten(list_blocks(quickstart, "yaml")[0]))
    (tmp_path / "use.py").write_text(list_blocks(quickstart, "python")[0])
    ulysses = write_program(tmp_path / "bin")
    write_script(ulysses.parent / "python", f'exec {write_python()} "$@"')
    path = os.pathsep.join([str(ulysses.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    python_path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environ = {**os.environ, "PATH": path, "NO_COLOR": "1", "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
    blocks = list_blocks(quickstart, "sh")
    assert len(blocks) == 8
    for block in blocks:
        run(["bash", "-eu", "-c", shorten(block)], tmp_path, environ)
    for made in ("runs/my/model/model.safetensors", "runs/my/report.html", "model-10/model.safetensors"):
        assert (tmp_path / made).is_file(), made


@pytest.mark.full
def test_every_cell_of_the_notebook_runs(tmp_path: Path) -> None:
    """As a program: all cells in one namespace, in the order of the notebook."""
    notebook = json.loads((DOCS / "quickstart.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 4)  # cells of 4.5 have ids
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) == 6
    assert not any(cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    (tmp_path / "notebook.py").write_text("\n\n".join(cells))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    output = run([str(write_python()), "notebook.py"], tmp_path, environ)
    for shown in ("files", "train.warmup_steps", "held out", "def ", "US dollars"):
        assert shown in output, shown
