"""Tests the folder of optimizer states on a disk: private and empty at first, refused with a reason, removed at the
end."""

import errno
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.train.optimizer import states
from ulysses_cli.train.optimizer.states import name_folder, open_folder, remove_rank_files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    (tmp_path / "fast").mkdir()
    return name_folder(str(tmp_path / "fast"), tmp_path / "run")


def test_the_folder_is_private_empty_and_the_same_for_every_rank(folder: Path, tmp_path: Path) -> None:
    left = folder / "zero_stage_3" / "optimizer" / "rank7" / "0_5.tensor.swp"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"of a run that was killed")
    assert open_folder(folder, tmp_path / "run", 1000, 1000) == ""
    assert [path.name for path in folder.iterdir()] == ["run.txt"]
    assert (folder / "run.txt").read_text() == f"{tmp_path / 'run'}\n"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert name_folder(f"{tmp_path}/x/../fast/", tmp_path / "run") == folder
    assert name_folder(str(tmp_path / "fast"), tmp_path / "other") != folder


def test_other_ranks_of_the_machine_do_not_touch_the_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert open_folder(folder, tmp_path / "run", 10**18, 1000) == ""
    assert not folder.exists()


def test_the_last_rank_removes_the_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_folder(folder, tmp_path / "run", 1000, 1000)
    for rank in (0, 1):
        (folder / "zero_stage_3" / "optimizer" / f"rank{rank}").mkdir(parents=True)
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        assert folder.exists()
        remove_rank_files(folder)
    assert not folder.exists()
    remove_rank_files(folder)
    remove_rank_files(None)


def test_a_full_disk_is_refused_and_leftovers_are_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    other = folder.with_name("ulysses-0123456789ab")
    other.mkdir()
    usage = shutil.disk_usage(tmp_path)._replace(free=2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert open_folder(folder, tmp_path / "run", 2**30, 1000) == snapshot
    assert not folder.exists()
    assert other.exists()
    assert open_folder(folder, tmp_path / "run", 2**24, 1000) == ""


def test_a_file_system_without_direct_writes_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    assert open_folder(folder, tmp_path / "run", 1000, 1000) == snapshot
    assert not folder.exists()


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    (tmp_path / "file").write_text("")
    folder = name_folder(str(tmp_path / "file"), tmp_path / "run")
    problem = open_folder(folder, tmp_path / "run", 1000, 1000)
    assert problem.replace(folder.name, "FOLDER") == snapshot


def test_a_limit_of_locked_memory_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    monkeypatch.setattr(states, "_may_lock_all", lambda: False)
    assert open_folder(folder, tmp_path / "run", 1 << 19, 8 << 20) == ""
    assert open_folder(folder, tmp_path / "run", 1 << 19, 16 << 20) == snapshot
    assert not folder.exists()
