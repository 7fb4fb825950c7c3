"""Tests how processes of ranks are made, and the store in a file through which those of one machine connect."""

import os
import shutil
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from ulysses_cli.prove import ranks
from ulysses_cli.prove.ranks import start_process
from ulysses_cli.train.processes import store
from ulysses_cli.train.processes.store import FOLDER, connect, open_file_store


def test_a_folder_that_is_gone_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own store waits five minutes, during which no other thread of the process runs."""
    with pytest.raises(FileNotFoundError):
        open_file_store(str(tmp_path / "gone" / "ranks"), 2)
    monkeypatch.setenv(FOLDER, str(tmp_path / "gone"))
    assert connect(timedelta(seconds=5)) is None
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(FileNotFoundError):
        store.list_store_options(timedelta(seconds=5))


def test_open_stores_survive_their_folder(tmp_path: Path) -> None:
    """A rank that waits in a store whose folder is gone can still be ended by its other threads."""
    folder = tmp_path / "meeting"
    folder.mkdir()
    one, other = (open_file_store(str(folder / "ranks")) for _ in range(2))
    shutil.rmtree(folder)
    one.set("key", "value")
    assert other.get("key") == b"value"
    other.set_timeout(timedelta(seconds=60))
    waiter = threading.Thread(target=lambda: other.get("later"))
    waiter.start()
    one.set("later", "1")  # while the other thread waits
    waiter.join(30)
    assert not waiter.is_alive()


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
