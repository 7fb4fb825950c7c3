"""Tests what shells offer: the words themselves, and what a real bash asks the installed script for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ulysses_cli.commands.options import complete_gpus, complete_recipe_names, complete_words


def test_offers_are_the_tools_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a.yml").touch()
    assert complete_words("ru")[0] == "runs/"
    assert complete_words("runs/") == ["runs/a.yml"]
    assert complete_words("model.dtype=b") == ["model.dtype=bfloat16"]
    assert complete_words("run.rehearsal=") == ["run.rehearsal=true", "run.rehearsal=false"]
    assert complete_words("no/such/folder/x") == []
    assert "tiny-cpu" in complete_recipe_names("tiny")
    assert complete_gpus("h100-80gb,h20") == ["h100-80gb,h200"]


@pytest.mark.check
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_installed_script_completes_in_bash(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").touch()
    (tmp_path / "notes.txt").touch()
    program = tmp_path / "ulysses"
    program.write_text(f"#!{sys.executable}\nfrom ulysses_cli.cli import app\napp(prog_name='ulysses')\n")
    program.chmod(0o755)
    environ = {**os.environ, "HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}",
               "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # fmt: skip
    subprocess.run([program, "--install-completion", "bash"], env=environ, check=True, capture_output=True)
    for words, offered in (
        ("train my", "my.yaml"),
        ("validate-config my.yaml parallel.dp_", "parallel.dp_shard_size= parallel.dp_replicate_size="),
        ("plan --gpus h20", "h200"),
    ):
        script = f"source ~/.bashrc; COMP_WORDS=(ulysses {words}); COMP_CWORD={len(words.split())}; "
        script += "_ulysses_completion ulysses; echo ${COMPREPLY[@]}"
        done = subprocess.run(["bash", "-c", script], env=environ, cwd=tmp_path, capture_output=True, text=True)
        assert done.stdout.strip() == offered, done.stderr
