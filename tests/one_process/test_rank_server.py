"""Tests how processes of ranks are made."""

import os
from pathlib import Path

import pytest

from ulysses_cli.prove import ranks
from ulysses_cli.prove.ranks import start_process


def write_parent(file: str) -> None:
    Path(file).write_text(f"{os.getppid()} {os.environ.get('CUDA_VISIBLE_DEVICES')}")


def test_a_rank_on_a_gpu_is_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A context of CUDA does not survive a fork. The server, from which ranks on the CPU are forked, is not asked, and
    what hides GPUs from it hides none from the rank."""
    monkeypatch.setattr(ranks, "warm_up", lambda: pytest.fail("a server was started for a rank on a GPU"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    process = start_process(write_parent, (str(tmp_path / "seen"),), "cuda")
    process.join(60)
    assert (tmp_path / "seen").read_text() == f"{os.getpid()} 3"
