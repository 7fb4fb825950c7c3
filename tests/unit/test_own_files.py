"""Tests that files of a run's folder are opened without following a link, and that nothing there is waited for."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ulysses_cli.launch.failures import MachineLogs
from ulysses_cli.launch.start_lock import lock_run
from ulysses_cli.plan.files.regular_files import open_own
from ulysses_cli.plan.files.whole_files import write_whole
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.run_folder.failure_record import give_room, keep_room, read_json, write_failure_record
from ulysses_cli.run_folder.line_files import LineFile
from ulysses_cli.run_folder.resume import count_restarts, describe_restart
from ulysses_cli.run_folder.run_key import drop_key, share_key
from ulysses_cli.run_folder.run_lock import RunLock
from ulysses_cli.run_folder.told import note_told

WRITERS: dict[str, Callable[[Path], object]] = {
    "lock-0": lambda run: lock_run(run, 0, {}),
    "lock-1": lambda run: RunLock(run / "lock-1"),
    "logs/rank-0.log": lambda run: lock_run(run, 0, {}),
    "logs/agent.log": lambda run: lock_run(run, 0, {}),
    "logs/launch.json": lambda run: count_restarts(run / "logs"),
    "logs/rank-0.room": lambda run: keep_room(run / "logs", 0),
    "logs/.rank-0.error.json.PID.part": lambda run: write_failure_record(run / "logs", 0, {"message": "m"}),
    "metrics.jsonl": lambda run: LineFile(run / "metrics.jsonl").write({"step": 1}),
    "told.jsonl": lambda run: note_told(run, "hub", "x", "y"),
    "key": share_key,
    ".run.json.PID.part": lambda run: write_whole(run / "run.json", "x"),
}


@pytest.mark.parametrize("name", list(WRITERS))
def test_what_a_link_leads_to_is_never_written(name: str, tmp_path: Path) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    (run / "logs").mkdir(parents=True)
    victim.write_text("mine")
    (run / name.replace("PID", str(os.getpid()))).symlink_to(victim)
    try:
        WRITERS[name](run)
    except RecipeError as error:
        assert "a link" in str(error) or "Too many levels of symbolic links" in str(error)
    except OSError as error:
        assert "it is a link, not a file" in str(error)
    assert victim.read_text() == "mine"
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(tmp_path / "new")  # a link to nothing makes no file there
    try:
        WRITERS[name](run)
    except (RecipeError, OSError):
        pass
    assert not (tmp_path / "new").exists()


def test_a_lock_is_not_put_back_through_a_link(tmp_path: Path) -> None:
    victim, file = tmp_path / "victim", tmp_path / "lock-0"
    victim.write_text("mine")
    file.write_text("facts")
    lock = RunLock(file)
    file.unlink()
    file.symlink_to(victim)
    with pytest.raises(OSError, match="it is a link, not a file"):
        lock.put_back()
    assert victim.read_text() == "mine"


def test_nothing_waits_for_a_fifo(tmp_path: Path) -> None:
    for name in ("rank-0.error.json", "launch.json", "rank-0.log", "key"):
        os.mkfifo(tmp_path / name)
    assert read_json(tmp_path / "rank-0.error.json") is None
    assert "a rank was lost" in describe_restart(tmp_path, 1, 3)
    with pytest.raises(OSError, match="it is a FIFO, not a file"):
        count_restarts(tmp_path)
    assert MachineLogs(tmp_path).list_rank_failures(0) == []
    assert MachineLogs(tmp_path).read_last_line(0, 0) == ""
    drop_key(tmp_path, "x")
    assert (tmp_path / "key").exists()
    give_room(tmp_path, 0)
    with pytest.raises(OSError, match="it is not a file"):
        open_own("/dev/null", os.O_WRONLY)


@pytest.mark.parametrize("text", ["[1]", "3", '{"restarts": 1e999, "launch": ""}', "[" * 100_000])
def test_odd_records_are_no_records(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULYSSES_LAUNCH", "7")
    (tmp_path / "launch.json").write_text(text.replace('"launch": ""', '"launch": "7"'))
    (tmp_path / "rank-0.error.json").write_text(text)
    assert count_restarts(tmp_path) == 0
    assert "a rank was lost" in describe_restart(tmp_path, 1, 3)
    assert all(isinstance(record, dict) for record in MachineLogs(tmp_path).list_rank_failures(0))
