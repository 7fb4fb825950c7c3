"""Tests where operators are built: a folder that cannot be written is reported with a remedy, before a rank starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ulysses_cli.host.operator_builds import find_write_problem, get_builds_folder


def test_the_folder_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/me")
    assert str(get_builds_folder({})) == "/me/.cache/torch_extensions"
    assert str(get_builds_folder({"XDG_CACHE_HOME": "/c"})) == "/c/torch_extensions"
    assert str(get_builds_folder({"XDG_CACHE_HOME": "/c", "TORCH_EXTENSIONS_DIR": "/t"})) == "/t"


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "a" / "b")}
    assert not find_write_problem(environ)
    assert not (tmp_path / "a").exists()
    refused = {tmp_path}
    monkeypatch.setattr(os, "access", lambda path, mode: path not in refused)  # root may write anywhere
    text = f"{tmp_path}/a/b, where operators of DeepSpeed are built, cannot be made in {tmp_path}"
    assert find_write_problem(environ) == text
    (tmp_path / "a").touch()
    assert find_write_problem(environ).endswith(f"cannot be made in {tmp_path}/a")
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    assert find_write_problem(environ) == f"{tmp_path}, where operators of DeepSpeed are built, cannot be written"
