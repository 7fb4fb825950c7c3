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


def test_what_a_folder_cannot_do_is_said_and_it_is_removed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    run, real, said = tmp_path / "run", os.open, {}

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **more)

    other = folder.with_name("ulysses-0123456789ab")
    other.mkdir()
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)._replace(free=2**30)
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        said["a full disk"] = open_folder(folder, run, 2**30, 1000)
        assert open_folder(folder, run, 2**24, 1000) == ""
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        said["no direct writes"] = open_folder(folder, run, 1000, 1000)
    with monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
        patch.setattr(states, "_may_lock_all", lambda: False)
        said["little locked memory"] = open_folder(folder, run, 1 << 19, 16 << 20)
        assert not folder.exists()
        assert open_folder(folder, run, 1 << 19, 8 << 20) == ""
    assert other.exists(), "it may be another run's"
    (tmp_path / "file").touch()
    below = name_folder(str(tmp_path / "file"), run)
    said["a file in its place"] = open_folder(below, run, 1000, 1000).replace(below.name, "FOLDER")
    assert said == snapshot
