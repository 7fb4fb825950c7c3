"""Tests that files of a run's folder are opened without following a link, and that nothing there is waited for."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checkpoints import make_checkpoint
from support.refusals import explain
from syrupy.assertion import SnapshotAssertion

from ulysses_cli.plan.files import open_own, write_whole
from ulysses_cli.plan.problem import RecipeError
from ulysses_cli.run.checkpoints import prune_checkpoints, put_in_place, set_aside, tidy_folder
from ulysses_cli.run.folder import lock_run
from ulysses_cli.run.key import drop_key, share_key
from ulysses_cli.run.lock import RunLock
from ulysses_cli.run.records import (
    LineFile,
    MachineLogs,
    give_room,
    keep_room,
    note_notification,
    read_json,
    write_failure_record,
)
from ulysses_cli.run.resume import count_restarts, describe_restart
from ulysses_cli.train.optimizer.states import name_folder, open_folder, remove_rank_files

WRITERS: dict[str, Callable[[Path], object]] = {
    "lock-0": lambda run: lock_run(run, 0, {}),
    "lock-1": lambda run: RunLock(run / "lock-1"),
    "logs/rank-0.log": lambda run: lock_run(run, 0, {}),
    "logs/agent.log": lambda run: lock_run(run, 0, {}),
    "logs/launch.json": lambda run: count_restarts(run / "logs"),
    "logs/rank-0.room": lambda run: keep_room(run / "logs", 0),
    "logs/.rank-0.error.json.PID.part": lambda run: write_failure_record(run / "logs", 0, {"message": "m"}),
    "metrics.jsonl": lambda run: LineFile(run / "metrics.jsonl").write({"step": 1}),
    "told.jsonl": lambda run: note_notification(run, "hub", "x", "y"),
    "key": share_key,
    ".run.json.PID.part": lambda run: write_whole(run / "run.json", "x"),
}


def test_what_a_link_leads_to_is_never_written(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Nor is a file made there by a link to nothing."""
    victim, said = tmp_path / "victim", {}
    victim.write_text("mine")
    for number, (name, write) in enumerate(WRITERS.items()):
        run = tmp_path / f"run{number}"
        (run / "logs").mkdir(parents=True)
        link = run / name.replace("PID", str(os.getpid()))
        link.symlink_to(victim)
        said[name] = try_out(write, run)
        assert victim.read_text() == "mine"
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / "new")
        assert try_out(write, run) == said[name]
        assert not (tmp_path / "new").exists()
    assert said == snapshot


def try_out(write: Callable[[Path], object], run: Path) -> str:
    try:
        write(run)
    except (RecipeError, OSError) as error:
        return str(error).strip().replace(run.name, "run").replace(str(os.getpid()), "PID")
    return ""


def test_a_lock_is_not_put_back_through_a_link(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    victim, file = tmp_path / "victim", tmp_path / "lock-0"
    victim.write_text("mine")
    file.write_text("facts")
    lock = RunLock(file)
    file.unlink()
    file.symlink_to(victim)
    assert explain(lock.put_back, error=OSError) == snapshot
    assert victim.read_text() == "mine"


def link_to_victim(link: Path) -> Path:
    """A link in the place of a folder that is made or removed. Returns a file that must stay."""
    victim = link.parents[1] / "victim" / "zero_stage_3" / "optimizer" / "rank0" / "weights"
    victim.parent.mkdir(parents=True)
    victim.write_text("mine")
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(link.parents[1] / "victim")
    return victim


def put_checkpoint(run: Path) -> None:
    """Replaces an older checkpoint of the same step."""
    folder = run / "checkpoints"
    for name in ("step-3", "step-3.writing"):
        (folder / name).mkdir()
    put_in_place(folder / "step-3.writing", folder / "step-3")
    assert [path.name for path in folder.iterdir()] == ["step-3"]


def prune(run: Path) -> None:
    make_checkpoint(run, 3)
    make_checkpoint(run, 6)
    prune_checkpoints(run, 1)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-6"]


def tidy(run: Path) -> None:
    tidy_folder(run)
    assert not [*(run / "checkpoints").iterdir()]


def put_aside(run: Path) -> None:
    make_checkpoint(run, 3)
    make_checkpoint(run, 6)
    set_aside(run, run / "checkpoints" / "step-3", lambda _: None)


FOLDERS: dict[str, Callable[[Path], object]] = {
    "step-3.replaced": put_checkpoint, "step-3.gone": prune, "step-9.writing": tidy, "step-6.set-aside": put_aside,
}  # fmt: skip


@pytest.mark.parametrize("name", list(FOLDERS))
def test_a_link_in_the_place_of_a_folder_is_removed_alone(name: str, tmp_path: Path) -> None:
    """A save, a clean-up and a resume went through it, or failed because of it."""
    link = tmp_path / "run" / "checkpoints" / name
    victim = link_to_victim(link)
    FOLDERS[name](tmp_path / "run")
    assert (victim.read_text(), link.is_symlink()) == ("mine", False)


def test_a_swap_folder_is_never_opened_or_emptied_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    folder = name_folder(str(tmp_path / "fast"), tmp_path / "run")
    victim = link_to_victim(folder)
    remove_rank_files(folder)
    assert victim.read_text() == "mine"
    assert open_folder(folder, tmp_path / "run", 1000, 1000) == ""
    assert (victim.read_text(), folder.is_symlink()) == ("mine", False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes links for another user")
def test_a_link_of_another_user_in_a_runs_folder_is_refused(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """`checkpoints` may be a link to a larger disk, but only its own user decides where that is."""
    link = tmp_path / "run" / "checkpoints"
    link_to_victim(link)
    os.close(lock_run(tmp_path / "run", 0).handle)
    os.lchown(link, 12345, 12345)
    assert explain(lock_run, tmp_path / "run", 0) == snapshot


def test_nothing_waits_for_a_fifo(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    for name in ("rank-0.error.json", "launch.json", "rank-0.log", "key"):
        os.mkfifo(tmp_path / name)
    assert read_json(tmp_path / "rank-0.error.json") is None
    assert MachineLogs(tmp_path).list_rank_failures(0) == []
    assert MachineLogs(tmp_path).read_last_line(0, 0) == ""
    drop_key(tmp_path, "x")
    assert (tmp_path / "key").exists()
    give_room(tmp_path, 0)
    refused = [explain(count_restarts, tmp_path, error=OSError)]
    refused.append(explain(open_own, "/dev/null", os.O_WRONLY, error=OSError))
    assert [describe_restart(tmp_path, 1, 3), *refused] == snapshot


def test_odd_records_are_no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULYSSES_LAUNCH", "7")
    without = describe_restart(tmp_path, 1, 3)
    for text in ("[1]", "3", '{"restarts": 1e999, "launch": ""}', "[" * 100_000):
        (tmp_path / "launch.json").write_text(text.replace('"launch": ""', '"launch": "7"'))
        (tmp_path / "rank-0.error.json").write_text(text)
        assert count_restarts(tmp_path) == 0
        assert describe_restart(tmp_path, 1, 3) == without
        assert all(isinstance(record, dict) for record in MachineLogs(tmp_path).list_rank_failures(0))
